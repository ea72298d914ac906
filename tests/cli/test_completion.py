"""`footplate completion`: scripts that a shell accepts and that complete."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

COMPLETE = """
source {script}
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_footplate
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import contextlib
    import io

    from footplate.cli.main import main

    path = tmp_path_factory.mktemp("completion") / "footplate.bash"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"]) == 0
    path.write_text(out.getvalue())
    return path


def complete(script: Path, words: str) -> set[str]:
    bash = COMPLETE.format(script=script, words=words)
    return set(subprocess.run(["bash", "-c", bash], capture_output=True, text=True, check=True).stdout.split())


def test_bash_accepts_the_script(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("footplate do", {"doctor"}),
        ("footplate fit --trainer.max_e", {"--trainer.max_epochs"}),
        ("footplate predict --out", {"--output"}),
        ("footplate table --js", {"--json"}),
        ("footplate checkpoint ins", {"inspect"}),
        ("footplate checkpoint convert --fo", {"--force"}),
        ("footplate catalog reg", {"regions"}),
        ("footplate jobs submit training --master-acc", {"--master-accelerator"}),
        ("footplate completion z", {"zsh"}),
    ],
)
def test_commands_options_and_choices_are_completed(script, words, expected):
    assert complete(script, words) == expected


def test_short_class_names_are_completed(script):
    assert "footplate.EarlyStopping" in complete(script, "footplate fit --trainer.callbacks footplate.E")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_scripts_too(footplate, shell):
    found = footplate("completion", shell)
    assert found.code == 0
    assert "doctor" in found.out


def test_an_unknown_shell_is_a_mistake(footplate):
    found = footplate("completion", "fish")
    assert found.code == 2
    assert found.err == 'footplate completion: shell="fish": expected "bash" or "zsh" or "tcsh".\n'
