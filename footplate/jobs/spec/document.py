"""What a config.yaml says, as plain values with the line of each key: what yamlfile.py makes of its text.

A scalar that YAML takes for a number or a truth value is a `Scalar`, which keeps its text: `runtimeVersion: 2.10` is the
text 2.10, though as a number it would be 2.1. A job that flags describe needs no more than this, and imports no YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from footplate.jobs.spec.problems import Path, Problem

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True)
class Scalar:
    """A number or a truth value, and how it was written."""

    value: int | float | bool
    text: str


@dataclass(frozen=True)
class Document:
    """What a file says.

    Attributes:
        name: the file, for messages.
        text: all of it.
        root: YAML's node of the whole; None for an empty file.
        values: the mapping that it is.
        lines: the line, from 1, of each key and item.
        problems: keys that are given twice.
    """

    name: str
    text: str
    root: yaml.Node | None
    values: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path) -> str:
        """Where a key stands, or the nearest that leads to it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name} line {self.lines[path]}" if path in self.lines else self.name
