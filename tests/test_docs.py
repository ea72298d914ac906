"""The pages: their code runs, their links resolve, and their lists match the code.

A Python block after a line `<!-- test -->` is run. The blocks of one page share their names and run in order.

README.ja.md, docs/ja and examples/notebooks/ja are translations. Each ends with the name and the digest of its English
text. If that text changes, a test fails until the change is translated. The blocks of a translation are those of the
English page, and don't run again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import posixpath
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from mkdocs.utils.yaml import yaml_load
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate import callbacks, tracking
from footplate.cli.commands import COMMANDS
from footplate.cli.main import main
from footplate.hardware.registry import accelerators
from footplate.training.module_hooks import ModuleHooks

ROOT = Path(__file__).parent.parent
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("footplate/**/*.md")]
}
MAX_WORDS = 1500
TESTED = re.compile(r"^<!-- test -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
# The sections of the site that have Japanese pages.
TRANSLATED = ("Start", "Tutorials", "Migration")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_column(text: str, heading: str) -> list[str]:
    """The names in backticks at the beginning of the table rows under a heading."""
    return re.findall(r"^\| `([^`]+)`", section(text, heading), re.MULTILINE)


def programs(text: str) -> list[str]:
    """The blocks of Python in a text."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_imports(program: str) -> list[str]:
    """The lines of a program, without its imports."""
    return [line for line in program.splitlines() if not line.startswith(("import ", "from "))]


def section(text: str, heading: str) -> str:
    """The text under a heading, up to the next heading."""
    return re.split(r"^#+ ", text.split(f" {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if TESTED.search(text)])
def test_what_a_page_shows_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in TESTED.findall(PAGES[name]):
        exec(compile(block, name, "exec"), names)


@pytest.mark.parametrize("name", ["docs/guide/horovod.md", "docs/guide/petastorm.md"])
def test_a_program_for_a_library_that_is_not_installed_differs_in_its_imports_alone(name):
    (before,) = programs(section(PAGES[name], "Before"))
    after = programs(section(PAGES[name], "After"))
    assert without_imports(before) in [without_imports(program) for program in after]


def test_a_command_of_ai_platform_is_accepted_under_another_name(tmp_path, monkeypatch):
    page = PAGES["docs/migration/ai-platform.md"]
    before, after = (FENCED.search(section(page, heading))[0].strip("`\n") for heading in ("Before", "After"))
    assert after == before.replace("gcloud ai-platform", "footplate")

    monkeypatch.chdir(tmp_path)
    Path("trainer").mkdir()
    Path("trainer/__init__.py").touch()
    Path("trainer/task.py").touch()
    Path("config.yaml").write_text("trainingInput: {scaleTier: CUSTOM, masterType: n1-standard-8}")
    command, program = shlex.split(after.replace("\\\n", "")), ["--", "--epochs", "2"]
    assert command[-3:] == program
    assert main([*command[1:-3], "--dry-run", *program]) == 0


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in LINK.findall(FENCED.sub("", PAGES[name])):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert file.exists(), f"{name}: {target} leads nowhere"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{name}: {target} has no such heading"


@pytest.mark.parametrize("name", [name for name in PAGES if re.match("docs/(?!decisions/)", name)])
def test_a_page_has_at_most_1500_words(name):
    words = len(COMMENT.sub("", PAGES[name]).split())
    assert words <= MAX_WORDS, f"{name} has {words} words: split it"


def test_the_architecture_shows_the_layers_that_the_linter_holds():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers, _ = pyproject["tool"]["importlinter"]["contracts"]
    shown = FENCED.search(section(PAGES["docs/architecture.md"], "Who may import whom"))
    assert shown
    assert shown[0].split("\n")[1:-1] == [re.sub(" [:|] ", "  ", layer) for layer in layers["layers"]]


def test_every_decision_stands_in_the_list_of_the_architecture():
    listed = re.findall(r"^- \[(.+)\]\((decisions/.+)\)$", PAGES["docs/architecture.md"], re.MULTILINE)
    headings = {
        name.removeprefix("docs/"): text.split("\n", 1)[0].removeprefix("# ")
        for name, text in PAGES.items()
        if name.startswith("docs/decisions/")
    }
    assert {path: title for title, path in listed} == headings


def test_the_readme_shows_an_example():
    program = (ROOT / "examples/images.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{program}```" in PAGES["README.md"]


def test_the_readme_lists_every_command():
    shown = re.findall(r"`footplate (\w+)", PAGES["README.md"].split("## Commands", 1)[1])
    assert set(COMMANDS) == set(shown)


def test_the_reference_of_the_command_line_lists_every_command():
    shown = set()
    block = FENCED.search(PAGES["docs/reference/cli.md"])
    assert block
    for usage in re.findall(r"^footplate (.+?)(?:  |$)", block[0], re.MULTILINE):
        # "fit | validate" are two commands; "jobs list | describe" are two actions of one command.
        first, *alternatives = (each.split() for each in usage.split(" | "))
        shown.update(words[0] for words in ([first, *alternatives] if len(first) == 1 else [first]))
    assert set(COMMANDS) == shown


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for text in PAGES.values() for target in re.findall(r"^make (\w+)|`make (\w+)`", text, re.MULTILINE)
    }
    assert {one or other for one, other in named} <= targets


def test_training_lists_every_argument_of_the_trainer_in_order():
    arguments = list(inspect.signature(fp.Trainer).parameters.values())
    named = [argument.name for argument in arguments if argument.kind is not inspect.Parameter.VAR_KEYWORD]
    assert first_column(PAGES["docs/reference/trainer.md"], "Every argument") == named


def test_training_shows_the_hooks_in_the_order_in_which_they_come(tmp_path):
    called: list[str] = []

    class Recorded(fp.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).sum()

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def record(hook: str) -> None:
        before = getattr(Recorded, hook)

        def recorded(self, *args, **named):
            called.append(hook)
            return before(self, *args, **named)

        setattr(Recorded, hook, recorded)

    hooks = {name for name in vars(ModuleHooks) if not name.startswith("_") and "checkpoint" not in name}
    for hook in hooks | {"training_step", "validation_step", "configure_optimizers"}:
        record(hook)
    loader = DataLoader(TensorDataset(torch.zeros(1, 1)))
    trainer = fp.Trainer(
        accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Recorded(), loader, loader)

    shown = PAGES["docs/reference/trainer.md"].split("<!-- hooks -->\n```\n", 1)[1].split("```", 1)[0]
    words = re.findall(r"\w+", re.sub(r"\(.*?\)", "", shown))
    assert [word for word in words if "_" in word or word in hooks] == called


@pytest.mark.parametrize(
    ("page", "heading", "package", "base"),
    [
        ("docs/guide/metrics-and-callbacks.md", "Callbacks", callbacks, fp.Callback),
        ("docs/guide/trackers.md", "Log to files, the console, W&B and Trackio", tracking, fp.Logger),
    ],
)
def test_every_callback_and_logger_has_a_row_on_its_page(page, heading, package, base):
    rows = section(PAGES[page], heading)
    kinds = {name: getattr(package, name) for name in package.__all__}
    names = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, base)}
    assert names - {base.__name__} <= set(re.findall(r"`(?:fp\.)?(\w+)[`(]", rows)), f"add a row to the table of {page}"


def test_every_built_in_accelerator_has_a_row_with_its_priority_and_precisions():
    table = section(PAGES["docs/reference/accelerators.md"], "Built-in accelerators")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (-?\d+)[^|]* \| ([^|]+) \|", table, re.MULTILINE)
    shown = {name: (int(priority), set(re.findall(r"[\w-]+", precisions))) for name, priority, precisions in rows}
    built_in = [each for each in accelerators() if type(each).__module__.startswith("footplate.")]
    expected = {each.name: (each.priority, each.precisions) for each in built_in}
    assert shown == expected, "correct the table of docs/reference/accelerators.md"


def test_dependencies_lists_every_requirement_and_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [re.split(r"[\[>=<~ ]", requirement, maxsplit=1)[0] for requirement in project["dependencies"]]
    page = PAGES["docs/reference/dependencies.md"]
    assert first_column(page, "Core") == required
    assert first_column(page, "Extras") == list(project["optional-dependencies"])


def test_architecture_names_every_module_and_folder():
    house = PAGES["docs/architecture.md"].split("```\n", 1)[1].split("```", 1)[0]
    rooms = {"": re.findall(r"^  (\S+) ", house, re.MULTILINE)}
    for folder, inside in re.findall(r"^  (\S+/) .*\n((?:    \S.*\n)+)", house, re.MULTILINE):
        rooms[folder] = [line.split()[0] for line in inside.splitlines()]
    assert len(rooms) > 2
    for folder, shown in rooms.items():
        inside = [
            path for path in (ROOT / "footplate" / folder).iterdir() if not path.name.startswith((".", "__pycache__"))
        ]
        there = {f"{path.name}/" if path.is_dir() else path.name for path in inside} - {"py.typed"}
        expected = there - {"__init__.py"} if folder else there
        assert set(shown) == expected, f"docs/architecture.md, {folder}: {sorted(set(shown) ^ expected)}"


def test_horovods_table_has_every_name_and_no_other():
    import footplate.compat.horovod as hvd

    table = section(PAGES["docs/reference/horovod.md"], "The verbs").split("\nNot there:", 1)[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in names)


def file_of(page: str) -> str:
    """The file of a page of the site, which may be a notebook."""
    return f"examples/notebooks/{Path(page).stem}.ipynb" if page.startswith("tutorials/") else f"docs/{page}"


def japanese_of(name: str) -> str:
    """The Japanese file of an English one."""
    if name == "README.md":
        return "README.ja.md"
    if name.endswith(".ipynb"):
        return f"examples/notebooks/ja/{Path(name).stem}.md"
    return name.replace("docs/", "docs/ja/", 1)


NAV = yaml_load((ROOT / "mkdocs.yml").read_text())["nav"]
SECTIONS = {title: pages for entry in NAV for title, pages in entry.items()}
ENGLISH = ["README.md", *(file_of(page) for title in TRANSLATED for page in SECTIONS[title])]
JAPANESE = {japanese_of(name): name for name in ENGLISH}
# A notebook has one file for both languages. Its Japanese text is on the site.
LINKED_PAGES = {name: japanese_of(name) for name in ENGLISH if name.endswith(".md")}


def text_of(name: str) -> str:
    """The text of a page. That of a notebook is in its Markdown cells."""
    text = (ROOT / name).read_text()
    if not name.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def places(name: str, replaced: dict[str, str]) -> Counter[str]:
    """What a page links to, by its path from the root, after some paths are replaced."""
    counts: Counter[str] = Counter()
    for target in LINK.findall(FENCED.sub("", text_of(name))):
        path, _, anchor = target.partition("#")
        if "://" not in path:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        path = replaced.get(path, path)
        # A Japanese heading has an anchor of its own.
        counts[path if path in JAPANESE else f"{path}#{anchor}"] += 1
    return counts


def names(text: str) -> list[str]:
    """The names in backticks, in the order of the alphabet."""
    return sorted(" ".join(name.split()) for name in re.findall("`([^`]+)`", text))


def rows(text: str) -> list[list[str]]:
    """The names in backticks in each row of a page's tables."""
    return [names(row) for row in re.findall(r"^\|.*", FENCED.sub("", text), re.MULTILINE)]


def test_the_readme_the_start_the_tutorials_and_the_migration_have_japanese_pages():
    files = [*ROOT.glob("*.ja.md"), *ROOT.glob("docs/ja/**/*.md"), *ROOT.glob("examples/notebooks/ja/*.md")]
    there = {path.relative_to(ROOT).as_posix() for path in files}
    assert sorted(set(JAPANESE) - there) == [], "translate the English pages of these"
    assert sorted(there - set(JAPANESE)) == [], f"delete these: they have no English pages in {TRANSLATED}"


@pytest.mark.parametrize(("name", "english"), JAPANESE.items(), ids=JAPANESE)
def test_a_japanese_page_says_what_the_english_one_says(name, english):
    source, text = text_of(english), text_of(name)
    stamp = f"<!-- {english} {hashlib.sha256(source.encode()).hexdigest()[:16]} -->\n"
    assert text.endswith(stamp), f"translate what has changed in {english}, then end {name} with {stamp}"
    assert FENCED.findall(text) == FENCED.findall(source), f"copy the blocks of {english} into {name}"
    assert not TESTED.search(text), f"leave <!-- test --> out of {name}: its blocks run on {english}"
    assert set(names(FENCED.sub("", text))) == set(names(FENCED.sub("", source))), f"name what {english} names"
    assert rows(text) == rows(source), f"name in each row of a table what {english} names there"
    assert places(name, {english: name}) == places(english, LINKED_PAGES), (
        f"link from {name} to what {english} links to, and there to the Japanese page if it has one"
    )
