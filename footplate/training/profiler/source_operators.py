"""Lines of operators that are written as symbols, such as `a @ b`, from the source.

A call tells its line to torch.profiler. `a @ b` makes no call: torch sees `aten::matmul` in a function, after the last call
of that function. Its line is the next one in the function's source that has the symbol:

    12  h = self.encoder(x)      a call: line 12 is known
    13  h = h @ self.weight      aten::matmul after line 12: the next `@` is here
    14  return h + x             aten::add after line 13: the next `+` is here
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

_SYMBOLS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Add: ("add",),
    ast.Sub: ("sub", "rsub"),
    ast.Mult: ("mul",),
    ast.MatMult: ("matmul",),
    ast.Div: ("div", "reciprocal"),
    ast.FloorDiv: ("floor_divide",),
    ast.Mod: ("remainder", "fmod"),
    ast.Pow: ("pow",),
    ast.USub: ("neg",),
    ast.Invert: ("bitwise_not",),
    ast.BitAnd: ("bitwise_and", "__and__"),
    ast.BitOr: ("bitwise_or", "__or__"),
    ast.BitXor: ("bitwise_xor", "__xor__"),
    ast.LShift: ("__lshift__", "bitwise_left_shift"),
    ast.RShift: ("__rshift__", "bitwise_right_shift"),
    ast.Eq: ("eq",),
    ast.NotEq: ("ne",),
    ast.Lt: ("lt",),
    ast.LtE: ("le",),
    ast.Gt: ("gt",),
    ast.GtE: ("ge",),
    ast.Subscript: ("select", "slice", "index", "unsqueeze", "index_put", "copy", "fill"),
    ast.If: ("is_nonzero",),
    ast.While: ("is_nonzero",),
    ast.IfExp: ("is_nonzero",),
    ast.BoolOp: ("is_nonzero",),
    ast.Assert: ("is_nonzero",),
    ast.Not: ("is_nonzero",),
    ast.For: ("unbind",),
    ast.Starred: ("unbind",),
    ast.Tuple: ("unbind",),
}


def operator_line(file: str, first: int, after: int, operator: str) -> int | None:
    """Return the line of an operator that is written as a symbol. None if the source has no such symbol.

    Args:
        file: the file.
        first: the first line of the function.
        after: the last line of the function that is known to have run. In a loop, the operator may be above it.
        operator: torch's name, such as "aten::add_".
    """
    name = operator.removeprefix("aten::")
    name = name if name.endswith("__") else name.removesuffix("_")
    lines = [line for line, names in _symbols_of(file, first) if name in names]
    return next((line for line in lines if line >= after), lines[0] if lines else None)


@functools.lru_cache(maxsize=4096)
def _symbols_of(file: str, first: int) -> list[tuple[int, tuple[str, ...]]]:
    """The symbols of the function that begins at a line, or that has the line: their lines, and torch's names for them."""
    function = next((function for function in _functions(file) if first in _span(function)), None)
    return [] if function is None else sorted(set(_symbols(function)))


def _span(function: Function) -> range:
    decorated = function.decorator_list[0].lineno if function.decorator_list else function.lineno
    return range(decorated, (function.end_lineno or function.lineno) + 1)


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> list[Function]:
    """The functions of a file, inner ones before those around them."""
    try:
        tree = ast.parse(Path(file).read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return []
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    return sorted(functions, key=lambda function: len(_span(function)))


def _symbols(node: ast.AST) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The symbols below a node, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        line = getattr(child, "lineno", 0)
        kinds: list[ast.AST] = [child]
        if isinstance(child, (ast.BinOp, ast.AugAssign, ast.UnaryOp)):
            kinds = [child.op]
        elif isinstance(child, ast.Compare):
            kinds = list(child.ops)
        for kind in kinds:
            if line and type(kind) in _SYMBOLS:
                yield line, _SYMBOLS[type(kind)]
        yield from _symbols(child)
