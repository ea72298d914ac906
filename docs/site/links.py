"""Build hook of the site: the pages of this folder, right on GitHub and on the site.

On GitHub, a page links to files outside of docs/, such as ../README.md or ../../examples/ladder.py. The site has no such
files. This hook adds CONTRIBUTING.md and CHANGELOG.md to the site, leads links to notebooks to their pages, and turns other
links out of docs/ into addresses in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BLOB = "https://github.com/footplate/footplate/blob/main"

# Files of the repository's root that are pages of the site: the name here, and the name there.
INCLUDED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

# The pages that are made of notebooks. Only such a page links to the notebook itself.
TUTORIALS = "docs/tutorials"
JAPANESE_TUTORIALS = "docs/ja/tutorials"

FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)")
# `<!-- test -->` and other marks for tests. A comment before a block of code would be a part of its paragraph.
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the included files, with links that start from docs/."""
    for source, target in INCLUDED.items():
        text = relinked((ROOT / source).read_text(), "")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, and leave out the marks for tests."""
    if page.file.src_uri not in INCLUDED.values():
        markdown = relinked(markdown, posixpath.join("docs", page.file.src_uri))
    return "".join(part if part.startswith("```") else COMMENT.sub("\n", part) for part in FENCED.split(markdown))


def relinked(text: str, page: str) -> str:
    """Return a page's text with links for the site.

    Args:
        text: the page in Markdown.
        page: its path in the repository, such as "docs/guide/data.md"; "" for a file that is moved from the root to docs/.
    """
    folder = posixpath.dirname(page)
    tutorials = JAPANESE_TUTORIALS if page.startswith("docs/ja/") else TUTORIALS

    def relink(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("examples/notebooks/") and folder != tutorials:
            path = f"{tutorials}/{posixpath.basename(path).replace('.ipynb', '.md')}"
            return f"]({posixpath.relpath(path, folder or 'docs')}{anchor})"
        if path in INCLUDED:
            return f"]({posixpath.relpath(posixpath.join('docs', INCLUDED[path]), folder or 'docs')}{anchor})"
        if path.startswith("docs/") and "." in posixpath.basename(path):
            return link[0] if page else f"]({path.removeprefix('docs/')}{anchor})"
        return f"]({BLOB}/{path}{anchor})"

    return "".join(part if part.startswith("```") else LINK.sub(relink, part) for part in FENCED.split(text))
