"""The modules that a program will import, read from its source: no line of it runs.

    imported_names("trainer.task", source)  →  ["hypertune", "torch", "torch.nn", "footplate.Trainer", …]

The search begins with the program's module and follows the imports of modules that belong to the package. It takes the
imports at the top of modules, also those in `if` and `try`. What a function imports when it is called is left out, and so
is what only type checkers see. Attributes of `footplate` count as imports, since it imports a name when it is first used.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

# What a program imports later: torch when it makes an optimizer, pyarrow when it reads a file, Footplate when it trains.
LATER = {
    "torch": ("torch._dynamo",),
    "pyarrow": ("pyarrow.dataset",),
    "footplate": ("torch._dynamo", "footplate.training.trainer", "footplate.step.eager", "rich.table"),
}
# Footplate's own names, used as attributes.
_LAZY = "footplate"


def imported_names(modules: Sequence[str], source: Path) -> list[str]:
    """The names outside of a package that some of its modules import, in order.

    Args:
        modules: the names of the modules, such as "trainer.task". Unknown ones count as imports themselves.
        source: the directory with the package.
    """
    names: dict[str, None] = {}
    waiting, seen = list(modules), set(modules)
    while waiting:
        module = waiting.pop(0)
        file = _file_of(module, source)
        if file is None:
            if not _is_within(module, source):
                names[module] = None
            continue
        for name in _imports_of(file, module):
            # "a.b.c" may be an attribute of a module. Then "a.b" is the module.
            for inner in _prefixes(name):
                if inner not in seen:
                    seen.add(inner)
                    waiting.append(inner)
    roots = {name.partition(".")[0] for name in names}
    return list(dict.fromkeys([*names, *(later for root in sorted(roots) for later in LATER.get(root, ()))]))


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _is_within(module: str, source: Path) -> bool:
    """Return True if a module's top-level package is in the directory."""
    top = source / module.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").is_file()


def _file_of(module: str, source: Path) -> Path | None:
    path = source.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _imports_of(file: Path, module: str) -> Iterator[str]:
    """The names that a file imports, in order: "a.b" for `import a.b` and for `from a import b`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        # The program will show the error.
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    aliases = set()
    for statement in _statements(tree.body):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
            aliases |= {alias.asname or alias.name for alias in statement.names if alias.name == _LAZY}
        elif isinstance(statement, ast.ImportFrom):
            home = statement.module or ""
            if statement.level:
                try:
                    home = importlib.util.resolve_name("." * statement.level + home, package)
                except ImportError:
                    continue
            yield from (home if alias.name == "*" else f"{home}.{alias.name}" for alias in statement.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield f"{_LAZY}.{node.attr}"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, without those for type checkers."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from _statements(statement.orelse)
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for inner in ("body", "handlers", "orelse", "finalbody"):
                for child in getattr(statement, inner, ()):
                    yield from _statements(child.body if isinstance(child, ast.ExceptHandler) else [child])
