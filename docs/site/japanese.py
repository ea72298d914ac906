"""Build hook of the site: what the pages of docs/ja need besides their text."""

from __future__ import annotations

import re
from typing import Any

# The end of a line of Japanese, which a browser would show as a space: after a comma or a full stop, unless a block of
# Markdown begins, and between two Japanese characters.
LINE_END = re.compile(
    r"(?<=[、。])\n *(?!- |\d+\. |```|[|#<\s])"
    r"|(?<=[\u3041-\u30ff\u4e00-\u9fff])\n *(?=[\u3001-\u30ff\u4e00-\u9fff])"
)

SEARCH_BOOST = 0.5


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Join the lines of a Japanese paragraph, and let a search for a name in code find the English page first."""
    if not _is_japanese(page):
        return markdown
    page.meta["search"] = {"boost": SEARCH_BOOST}
    return LINE_END.sub("", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Name the language of a Japanese page, for browsers and screen readers."""
    return output.replace('<html lang="en"', '<html lang="ja"', 1) if _is_japanese(page) else output


def _is_japanese(page: Any) -> bool:
    return page.file.src_uri.startswith("ja/")
