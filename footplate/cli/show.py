"""Printing what rich draws: a table, a page of findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(page: RenderableType) -> None:
    """Print `page` to standard output, as wide as the terminal. A closed pipe raises BrokenPipeError, as `print` does."""
    from rich.console import Console

    console = Console()
    with console.capture() as drawn:
        console.print(page)
    print(drawn.get(), end="")
