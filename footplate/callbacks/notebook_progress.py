"""The progress of a run in a notebook: one display, which is updated.

A notebook keeps each line that a cell writes, so lines would fill the page. IPython can replace a display in place. Front
ends that don't show HTML, and the file of the notebook, have the same text as lines.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

# The last epochs that stay visible.
LINES = 10


class NotebookProgress:
    """A display with the lines of finished epochs and, below them, a bar. It appears when it has something to show."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        self._left_out = 0
        self._display: Any = None

    def add(self, line: str) -> None:
        """Add the line of a finished epoch. The bar disappears."""
        self._left_out += len(self._lines) == LINES
        self._lines.append(line)
        self.show()

    def show(self, line: str = "", done: float = 0, total: float | None = None) -> None:
        """Replace the bar.

        Args:
            line: the text beside it; empty for no bar.
            done: batches that are done.
            total: all batches; None if their number isn't known.
        """
        from IPython.display import display

        from footplate.core import html

        above = [f"… {self._left_out} earlier epochs", *self._lines] if self._left_out else list(self._lines)
        text = "\n".join([*above, line] if line else above)
        bar = html.progress(done, total) if line and total is not None else ""
        # "raw" passes both forms on as they are.
        bundle = {"text/plain": text, "text/html": f"{html.preformatted(text)}{bar}"}
        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
