"""The page: sections, template, style and scripts become one HTML file that loads nothing.

The browser may run the page's own scripts only: the content security policy names them by their hash, and forbids every
request. So even a fault in the escaping of a value could run nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files

from footplate.core.optional import require
from footplate.reporting.html import Html, escaped, tag

_FOLDER = "page"
_TITLES = re.compile(r'<h2 id="([\w-]+)-title">(.*?)</h2>', re.DOTALL)


def plotly_script() -> str:
    """Return plotly.js.

    Raises:
        MissingExtra: plotly is not installed.
    """
    return require("plotly.offline", "report", "A report").get_plotlyjs()


def build_page(title: str, subtitle: str, sections: Sequence[Html], more: Sequence[Html] = ()) -> str:
    """Build the file.

    Args:
        title: the heading.
        subtitle: a sentence below it.
        sections: the sections, which the navigation lists.
        more: parts after them, which it doesn't list.

    Raises:
        MissingExtra: plotly is not installed.
    """
    plotly, script = plotly_script().strip(), _file("report.js")
    links = [
        tag("li", tag("a", Html(heading), href=f"#{key}"))
        for section in sections
        for key, heading in _TITLES.findall(section)[:1]
    ]
    parts = {
        "title": escaped(title),
        "subtitle": escaped(subtitle),
        "script_hashes": f"{_hash(plotly)} {_hash(script)}",
        "style": _file("report.css"),
        "navigation": tag("ul", *links),
        "sections": "\n".join([*sections, *more]),
        "plotly": plotly,
        "script": script,
    }
    # One pass, so that no value is searched for the names of others.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("report.html"))


def _file(name: str) -> str:
    return files("footplate.reporting").joinpath(_FOLDER, name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
