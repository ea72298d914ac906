"""The notebooks: they run from top to bottom, and print what is committed."""

from __future__ import annotations

import re

import nbformat
import pytest
from notebooks import NOTEBOOKS, VARIES, execute, printed, texts

MACHINE_PATH = re.compile(r"(?<![\w.~/:-])/(?:tmp|home|root|work|usr|opt|var|Users)/\S*")
MAX_OUTPUT = 50_000


def ids(paths):
    return [path.stem for path in paths]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_a_notebook_prints_what_is_committed(path, tmp_path):
    committed, ran = nbformat.read(path, as_version=4), execute(path, tmp_path)
    for before, after in zip(committed.cells, ran.cells, strict=True):
        if VARIES not in before.metadata.get("tags", []):
            assert printed(after) == printed(before), before.source
        assert [output.output_type for output in after.get("outputs", []) if output.output_type == "error"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_a_notebook_is_committed_as_it_ran(path):
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any(cell.outputs for cell in code)
    assert book.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_the_outputs_are_short_and_name_no_folder_of_a_machine(path):
    book = nbformat.read(path, as_version=4)
    outputs = [text for cell in book.cells for text in texts(cell)]
    assert [match for text in outputs for match in MACHINE_PATH.findall(text)] == []
    assert max(map(len, outputs)) < MAX_OUTPUT


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_links_of_a_notebook_lead_somewhere(path):
    book = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    assert targets
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids(NOTEBOOKS))
def test_the_japanese_text_has_each_markdown_cell(path):
    book = nbformat.read(path, as_version=4)
    japanese = path.parent / "ja" / f"{path.stem}.md"
    marks = re.findall(r"^<!-- cell (\d+) -->$", japanese.read_text(), re.MULTILINE)
    cells = [cell for cell in book.cells if cell.cell_type == "markdown"]
    assert marks == [str(number) for number in range(1, len(cells) + 1)], f"number the Markdown cells in {japanese}"


def test_there_are_notebooks():
    assert NOTEBOOKS
