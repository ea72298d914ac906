"""The parser of `arguments`, under the names that the commands of `jobs` use."""

from __future__ import annotations

from typing import Any

from footplate.cli.arguments import Parser as Parser


def make(kind: Any, name: str, description: str) -> Any:
    """Make the parser of the command `name`."""
    return kind(prog=f"footplate {name}", description=description, allow_abbrev=False)
