"""Checks a reference of an "on purpose" entry: `docs/page.md#anchor`, or `docs/page.md#anchor: words of the section`."""

from __future__ import annotations

import re
from pathlib import Path


def problem(reference: str, repository: Path) -> str | None:
    """The reason why the reference doesn't resolve, or None."""
    match = re.fullmatch(r"(docs/[\w./-]+\.md)#([\w-]+)(?:: (.+))?", reference)
    if match is None:
        return f"{reference!r}: expected docs/PAGE.md#ANCHOR or docs/PAGE.md#ANCHOR: WORDS"
    page, anchor, words = match.groups()
    path = repository / page
    if not path.exists():
        return f"{reference!r}: there is no {page}"
    section = _sections(path.read_text()).get(anchor)
    if section is None:
        return f"{reference!r}: {page} has no heading #{anchor}"
    if words and words not in " ".join(section.split()):
        return f"{reference!r}: the section doesn't have these words"
    return None


def _sections(text: str) -> dict[str, str]:
    """The sections of a page, by anchor."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {_anchor(heading): body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
