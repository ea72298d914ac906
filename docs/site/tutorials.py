"""Build hook of the site: the notebooks of examples/notebooks, as pages with their outputs.

A notebook becomes Markdown: its text, its code, and what each cell has shown. Tables stay HTML, which `footplate.core.html`
has made without scripts. Pictures become files beside the page.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook, and its pictures."""
    for path in NOTEBOOKS:
        text, pictures = page_of(json.loads(path.read_text()), path.stem)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def page_of(book: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Convert a notebook.

    Args:
        book: the notebook's JSON.
        name: its name, for its pictures.

    Returns:
        The page in Markdown, and its pictures by file name.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(relinked(source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell shows]({picture})")
            elif html := "".join(data.get("text/html", "")):
                parts.append(f'<div class="output">\n{_without_blank_lines(html)}\n</div>')
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{text}\n```")
    where = (
        f"This page is the notebook [{name}.ipynb](../../examples/notebooks/{name}.ipynb), with the outputs of a run."
    )
    title, *rest = parts
    first_line, _, introduction = title.partition("\n")
    return "\n\n".join([first_line, where, introduction.strip(), *rest]) + "\n", pictures


def relinked(text: str) -> str:
    """Return the text of a notebook with links for a page in docs/tutorials."""
    text = text.replace("](../../docs/", "](../")
    return re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", text)


def _without_blank_lines(html: str) -> str:
    """Leave out blank lines, which would end a block of HTML in Markdown."""
    return "\n".join(line for line in html.splitlines() if line.strip())
