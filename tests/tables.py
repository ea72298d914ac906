"""The tables of the docs that are made from the code. `make tables` writes them: `python -m tables`, in this folder.

Tests compare each page with its table: tests/training/test_config.py, tests/compat/test_lightning_table.py,
tests/step/xla/test_operations.py and tests/test_status.py.
"""

from __future__ import annotations

from pathlib import Path

import arguments
import status_page
from models import table as lightning

from footplate.step.xla.lowering.__main__ import page as operations

OPERATIONS = Path(__file__).parents[1] / "docs" / "reference" / "xla-operations.md"


def with_operations(text: str) -> str:
    """The page of operations with a new table."""
    return lightning.with_table(text, "operations", operations())


PAGES = {
    arguments.DOCS: arguments.filled,
    **dict.fromkeys(lightning.DOCS, lightning.filled),
    OPERATIONS: with_operations,
    status_page.DOCS: status_page.filled,
}
"""The pages, and the function that replaces the tables in a page's text."""

if __name__ == "__main__":
    for path, filled in PAGES.items():
        path.write_text(filled(path.read_text()))
