"""The names that a function's code reads: globals, imports and attributes, those of nested functions included."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class CodeReads:
    """The names that some code reads and writes.

    Attributes:
        globals: the globals that it reads, sorted.
        imports: the modules that it imports while it runs, sorted: (level, name, names imported from it), as `__import__`
            takes them.
        names: all names in the code, those of attributes included.
        texts: all texts in the code. `getattr` may take them.
        written: globals, and variables of enclosing functions, that it assigns or deletes.
    """

    globals: tuple[str, ...]
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    names: frozenset[str]
    texts: frozenset[str]
    written: frozenset[str]


def code_reads(code: types.CodeType) -> CodeReads:
    """Find the names that code reads.

    >>> code_reads((lambda batch: clean(batch["text"], re.sub)).__code__).globals
    ('clean', 're')
    """
    reads: set[str] = set()
    imports: set[tuple[int, str, tuple[str, ...]]] = set()
    names: set[str] = set()
    texts: set[str] = set()
    written: set[str] = set()
    for part in _nested(code):
        # A name that a nested function takes from `code` is a variable of the call, not of an enclosing function.
        outside = set(part.co_freevars) & set(code.co_freevars)
        names.update(part.co_names)
        texts.update(const for const in part.co_consts if isinstance(const, str))
        # With more than 255 names or constants, prefixes stand between the instructions.
        instructions = [step for step in dis.get_instructions(part) if step.opname != "EXTENDED_ARG"]
        for index, instruction in enumerate(instructions):
            operation, name = instruction.opname, instruction.argval
            if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                reads.add(name)
            elif operation.endswith("_GLOBAL") or (operation in ("STORE_DEREF", "DELETE_DEREF") and name in outside):
                written.add(name)
            elif operation == "IMPORT_NAME":
                # Before an import, the code loads the level of a relative import, and then the imported names.
                level, imported = (step.argval for step in instructions[index - 2 : index])
                imports.add((level, name, imported or ()))
    return CodeReads(
        tuple(sorted(reads)), tuple(sorted(imports)), frozenset(names), frozenset(texts), frozenset(written)
    )


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)
