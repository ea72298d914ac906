"""Build hook of the site: what the pages of docs/ja need besides their text, and links between the languages of a page."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.structure.files import Files

# The end of a line of Japanese, which a browser would show as a space: after a comma or a full stop, unless a block of
# Markdown begins, and between two Japanese characters.
LINE_END = re.compile(
    r"(?<=[、。])\n *(?!- |\d+\. |```|[|#<\s])"
    r"|(?<=[\u3041-\u30ff\u4e00-\u9fff])\n *(?=[\u3001-\u30ff\u4e00-\u9fff])"
)

SEARCH_BOOST = 0.5

HEADING = re.compile(r"^# .+\n", re.MULTILINE)
# The start pages have their line in the file, so that it is on GitHub, too.
WITH_LINKS = ("index.md", "ja/index.md")


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Link a page to its other language, and prepare a Japanese one.

    The lines of a Japanese paragraph are joined. A search for a name in code finds the English page first.
    """
    markdown = with_link(markdown, page.file.src_uri, files)
    if not _is_japanese(page):
        return markdown
    page.meta["search"] = {"boost": SEARCH_BOOST}
    return LINE_END.sub("", markdown)


def with_link(markdown: str, name: str, files: Files) -> str:
    """Return a page with a line of its languages under its heading, if it has two."""
    is_japanese = name.startswith("ja/")
    other = name.removeprefix("ja/") if is_japanese else f"ja/{name}"
    if name in WITH_LINKS or files.get_file_from_path(other) is None:
        return markdown
    target = posixpath.relpath(other, posixpath.dirname(name))
    line = f"[English]({target}) · 日本語" if is_japanese else f"English · [日本語]({target})"
    return HEADING.sub(lambda heading: f"{heading[0]}\n{line}\n", markdown, count=1)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Name the language of a Japanese page, for browsers and screen readers."""
    return output.replace('<html lang="en"', '<html lang="ja"', 1) if _is_japanese(page) else output


def _is_japanese(page: Any) -> bool:
    return page.file.src_uri.startswith("ja/")
