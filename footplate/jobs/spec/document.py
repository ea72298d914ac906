"""A config.yaml as plain values, with the line of each key. yamlfile.py makes it from text.

A number or a boolean is a `Scalar`, which keeps its text: `runtimeVersion: 2.10` is the text 2.10, though the number is
2.1. A job made of flags alone needs no more than this module, which doesn't import YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from footplate.jobs.spec.problems import Path, Problem

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True)
class Scalar:
    """A number or a boolean, with its text in the file."""

    value: int | float | bool
    text: str


@dataclass(frozen=True)
class Document:
    """The contents of a file.

    Attributes:
        name: the file's name, for messages.
        text: the whole text.
        root: YAML's root node; None for an empty file.
        values: the file as a mapping.
        lines: the line, from 1, of each key and item.
        problems: keys that occur twice.
    """

    name: str
    text: str
    root: yaml.Node | None
    values: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path) -> str:
        """The line of a key, or of the nearest key above it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name} line {self.lines[path]}" if path in self.lines else self.name
