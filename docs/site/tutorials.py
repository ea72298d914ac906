"""Build hook of the site: the notebooks of examples/notebooks, as pages with their outputs.

A notebook becomes Markdown: its text, its code, and what each cell has shown. Tables stay HTML, which `footplate.core.html`
has made without scripts. Pictures become files beside the page.

The Japanese page of a notebook has the same code and outputs. Its text is in examples/notebooks/ja/NAME.md, where a line
`<!-- cell 2 -->` begins the translation of the second Markdown cell.
"""

from __future__ import annotations

import base64
import copy
import json
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
CELL = re.compile(r"^<!-- cell \d+ -->\n", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")


@dataclass(frozen=True)
class Language:
    """A language of the tutorials.

    Attributes:
        source: the folder of the text, in the repository.
        pages: the folder of the pages, in docs/.
        about: the paragraph under the heading. NOTEBOOK stands for a link to the notebook.
        picture: what is read in place of a picture.
    """

    source: str
    pages: str
    about: str
    picture: str


ENGLISH = Language(
    "examples/notebooks",
    "tutorials",
    "This page is the notebook NOTEBOOK, with the outputs of a run.",
    "What the cell shows",
)
JAPANESE = Language(
    "examples/notebooks/ja",
    "ja/tutorials",
    "このページは、ノートブック NOTEBOOK に日本語の説明を付けたものです。コードと出力は、ノートブックのままです。",
    "セルの出力",
)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook in each of its languages, and its pictures."""
    for path in NOTEBOOKS:
        book = json.loads(path.read_text())
        _add(files, config, book, path.stem, ENGLISH)
        translation = ROOT / JAPANESE.source / f"{path.stem}.md"
        if translation.exists():
            _add(files, config, translated(book, translation.read_text()), path.stem, JAPANESE)
    return files


def _add(files: Files, config: Any, book: dict[str, Any], name: str, language: Language) -> None:
    text, pictures = page_of(book, name, language)
    files.append(File.generated(config, f"{language.pages}/{name}.md", content=text))
    for picture, content in pictures.items():
        files.append(File.generated(config, f"{language.pages}/{picture}", content=content))


def translated(book: dict[str, Any], translation: str) -> dict[str, Any]:
    """Return a notebook whose Markdown cells have the texts of a translation.

    Raises:
        ValueError: the translation has more or fewer cells.
    """
    book = copy.deepcopy(book)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "markdown"]
    for cell, text in zip(cells, CELL.split(translation)[1:], strict=True):
        cell["source"] = text.strip()
    return book


def page_of(book: dict[str, Any], name: str, language: Language) -> tuple[str, dict[str, bytes]]:
    """Convert a notebook.

    Args:
        book: the notebook's JSON.
        name: its name, for its pictures.
        language: the language of its text.

    Returns:
        The page in Markdown, and its pictures by file name.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(relinked(source, language))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(data["image/png"])
                parts.append(f"![{language.picture}]({picture})")
            elif html := "".join(data.get("text/html", "")):
                parts.append(f'<div class="output">\n{_without_blank_lines(html)}\n</div>')
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{text}\n```")
    notebook = posixpath.relpath(f"examples/notebooks/{name}.ipynb", f"docs/{language.pages}")
    about = language.about.replace("NOTEBOOK", f"[{name}.ipynb]({notebook})")
    title, *rest = parts
    first_line, _, introduction = title.partition("\n")
    return "\n\n".join([first_line, about, introduction.strip(), *rest]) + "\n", pictures


def relinked(text: str, language: Language) -> str:
    """Return the text of a notebook with links for its page. A notebook's own page is beside it."""

    def relink(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(language.source, link[1]))
        if path.endswith(".ipynb"):
            return f"]({Path(path).stem}.md"
        return f"]({posixpath.relpath(path, f'docs/{language.pages}')}"

    return LINK.sub(relink, text)


def _without_blank_lines(html: str) -> str:
    """Leave out blank lines, which would end a block of HTML in Markdown."""
    return "\n".join(line for line in html.splitlines() if line.strip())
