"""Our reading of .gitignore beside git's own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.jobs.package import gitignore

TREE = [
    "a",
    "a.py",
    "b/a",
    "b/c/a.py",
    "b/c/d/a",
    "ab/a",
    "[a]",
    "x y",
    "data/keep.csv",
    "data/big.csv",
    "data/sub/big.csv",
]

LINES = st.one_of(
    st.sampled_from(
        ["*.py", "b/", "/a", "a", "b/c", "b/*", "**/a", "b/**", "b/**/a", "!a.py", "!b/c/a.py", "# a", "\\#", "*", "!*/",
         "?", "[ab]", "[!a]*", "data/*", "!data/keep.csv", "x y", "a ", "a\\ ", "/", "", "**", "***", "a**", "b/c/", "\\a",
         "[a", "[]a]", "[z-a]"]
    ),
    st.text("ab*/!?[].c\\ ", min_size=1, max_size=6),
)  # fmt: skip


def ours(root: Path) -> set[str]:
    files: set[str] = set()

    def look(directory: Path, rules: list[gitignore.Rules]) -> None:
        rules = [*rules, *gitignore.read(directory)]
        for path in directory.iterdir():
            if path.name in (".git", ".gitignore"):
                continue
            if not gitignore.ignored(path, path.is_dir(), rules):
                if path.is_dir():
                    look(path, rules)
                else:
                    files.add(path.relative_to(root).as_posix())

    look(root, [])
    return files


def gits(root: Path) -> set[str]:
    command = ["git", "-c", "core.excludesFile=", "ls-files", "--others", "--exclude-standard", "-z"]
    shown = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    return {name for name in shown.split("\0") if name and not name.endswith(".gitignore")}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(LINES, max_size=5), st.lists(LINES, max_size=3))
def test_git_leaves_out_the_same_files(lines, inner):
    root = Path(tempfile.mkdtemp())
    try:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        for name in TREE:
            path = root / name
            if not path.parent.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("")
        (root / ".gitignore").write_text("\n".join(lines))
        (root / "b/.gitignore").write_text("\n".join(inner))
        assert ours(root) == gits(root)
    finally:
        shutil.rmtree(root)


def test_rules_above_a_directory_reach_it_up_to_the_root_of_its_repository(tmp_path):
    (tmp_path / ".gitignore").write_text("never")
    root = tmp_path / "repository"
    (root / ".git").mkdir(parents=True)
    (root / ".gitignore").write_text("*.csv")
    inner = root / "a/b"
    inner.mkdir(parents=True)
    (root / "a/.gitignore").write_text("!keep.csv")
    assert [rules.directory for rules in gitignore.above(inner)] == [root, root / "a"]
    assert gitignore.above(tmp_path) == []
