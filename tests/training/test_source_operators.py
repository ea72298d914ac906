"""The lines of operators whose calls were not recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from footplate.training.profiler.source_operators import operator_line

FUNCTIONS = """
def plain(x, w):
    y = x * 2
    z = y + 1
    z += y
    return -z

class Net:
    @decorated
    def forward(self, x):
        for _ in range(3):
            x = x @ self.w
            x = x / 2
        if x > 1:
            x = x[0]
        return (x
                - 1)
"""


@pytest.mark.parametrize(
    ("first", "after", "operator", "line"),
    [
        (2, 2, "aten::mul", 3), (2, 3, "aten::add", 4), (2, 5, "aten::add_", 5), (2, 5, "aten::neg", 6),
        (2, 2, "aten::matmul", None), (9, 10, "aten::matmul", 12), (10, 12, "aten::div", 13),
        # In a loop, the operator is above the last line that ran.
        (9, 13, "aten::matmul", 12), (9, 14, "aten::gt", 14), (9, 14, "aten::is_nonzero", 14), (9, 14, "aten::select", 15),
        (9, 15, "aten::sub", 16), (99, 99, "aten::add", None),
    ],
)  # fmt: skip
def test_an_operator_without_a_call_finds_its_line(
    tmp_path: Path, first: int, after: int, operator: str, line: int | None
):
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    assert operator_line(str(file), first, after, operator) == line
    assert operator_line(str(tmp_path / "is-not-there.py"), first, after, operator) is None
