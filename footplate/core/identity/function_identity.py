"""A hash of a function that changes with everything that its results depend on.

    tokenize ── its code, defaults and closure
      ├── global `clean` ── a function of the user's: its code, and what it reads, …
      ├── global `tokenizer` ── an object: its class and its state, as pickle sees them
      └── global `re` ── Python or an installed package: its version

The code of a user's functions and classes counts as bytecode. Names of files and numbers of lines don't, so a function
keeps its hash when it moves in its file. Between a notebook and a script the hash may change: Python compiles a call of an
imported module's function in two ways. Values count by content. The hash is the same in every process.

Some functions have no such identity: one that draws random numbers, reads files or the time, or changes globals, and one
that reads an object which can't be pickled. Then `UnknownIdentity` names what is in the way. A method that isn't named in
the code that runs counts too, but never stands in the way: a tokenizer may have a method that saves it.

The hash doesn't see:

- an edit in the files of an installed package that keeps its version
- an attribute of a module, if its name is computed, or if the module was passed to the function that reads it
- names, docstrings and annotations that code reads
- what an object leaves out when it is pickled. The function runs in worker processes, which don't get that either
"""

from __future__ import annotations

import builtins
import copyreg
import dataclasses
import functools
import importlib.util
import math
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from footplate.core.hashing import hashed
from footplate.core.identity.code_reads import CodeReads, code_reads
from footplate.core.identity.module_origin import origin_of
from footplate.core.identity.nondeterminism import attribute_effect, builtin_effect, library_effect

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, type(...), type(NotImplemented))
_DESCRIPTORS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
# Py_TPFLAGS_HEAPTYPE
_MADE_AT_RUN_TIME = 1 << 9
_CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
# Sets, dicts and messages call these. What dataclasses and attrs generate uses `hash` and `id`, which changes no result.
_HARMLESS = {"__hash__", "__repr__"}
# Attributes of a class that Python sets, and that don't change what it does. Those of pydantic follow from its other
# attributes, and contain the address of the class or what was around its definition.
_SET_BY_PYTHON = {
    "__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__slotnames__",
    "__abstractmethods__", "_abc_impl",
    "__pydantic_core_schema__", "__pydantic_serializer__", "__pydantic_validator__", "__pydantic_parent_namespace__",
}  # fmt: skip
# With one of these, a function reads attributes whose names aren't in its code.
_BY_COMPUTED_NAME = {"getattr", "attrgetter", "methodcaller", "__dict__", "vars"}


class UnknownIdentity(Exception):
    """A function whose results depend on something that can't be known. The text names it."""


def function_identity(function: Callable[..., Any]) -> str:
    """Return 32 hexadecimal digits that change with everything that a function's results depend on.

    Args:
        function: a function, a method, a partial function, or an object that can be called.

    Raises:
        UnknownIdentity: the function isn't a function of its arguments, or reads an object that can't be pickled.
    """
    return _Walk().hash(function)


@dataclasses.dataclass(frozen=True)
class _Member:
    """An attribute of a user's class or module, whose turn comes when its name is read.

    Attributes:
        owner: the number of the class or module.
        name: its name.
        value: its value.
        path: where it is, for messages.
        implicit: operators and protocols may use it without its name.
    """

    owner: str
    name: str
    value: Any
    path: str
    implicit: bool


class _Walk:
    """One walk through all that a function reads.

    A user's function or class is a *definition*. Wherever it is read, its number is hashed, and itself once. So definitions
    may read each other. A value is hashed where it is read, by its content.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._definitions: deque[tuple[Any, str]] = deque()
        self._members: list[_Member] = []
        # Names in the code that runs. Members of other names are read last, when nothing is refused any more.
        self._named: set[str] = set()
        self._refuses = True
        # Values that contain the present one, and the outermost of them that it refers to.
        self._open: dict[int, int] = {}
        self._outermost: float = math.inf
        self._open_modules: set[int] = set()
        self._known: dict[int, str] = {}
        # Keeps all values, so that no other value gets the address of one.
        self._kept: list[Any] = []

    def hash(self, function: Callable[..., Any]) -> str:
        """Walk from a function through all that it reads."""
        self._named.add("__call__")
        hashes = [self._value(function, name_of(function))]
        while self._definitions or self._members:
            if self._definitions:
                definition, path = self._definitions.popleft()
                is_class = isinstance(definition, type)
                hashes.append(self._class(definition, path) if is_class else self._function(definition, path))
            else:
                member = self._next_member()
                hashes.append(hashed(member.owner, member.name, self._value(member.value, member.path)))
        return hashed(sys.implementation.cache_tag, hashes)

    def _next_member(self) -> _Member:
        """Take the next member that the code can reach; if there is none, the first of all."""
        for index, member in enumerate(self._members):
            if member.implicit or member.name in self._named:
                return self._members.pop(index)
        self._refuses = False
        return self._members.pop(0)

    def _refuse(self, path: str, reason: str) -> None:
        if self._refuses:
            raise UnknownIdentity(f"{path}: {reason}")

    def _refuse_effect(self, path: str, effect: str | None, name: str) -> None:
        if effect is not None:
            self._refuse(path, f"it {effect} ({name})")

    # Definitions

    def _reference(self, definition: Any, path: str) -> str:
        """Return the number of a definition. The first time, it is put in line to be hashed itself."""
        if id(definition) not in self._numbers:
            self._numbers[id(definition)] = len(self._numbers)
            self._kept.append(definition)
            self._definitions.append((definition, path))
        return f"#{self._numbers[id(definition)]}"

    def _function(self, function: types.FunctionType, path: str) -> str:
        reads = code_reads(function.__code__)
        if reads.written:
            self._refuse(path, f"it assigns the variable {min(reads.written)!r} of the code around it")
        for name in sorted(reads.names):
            self._refuse_effect(path, attribute_effect(name), name)
        if self._refuses:
            self._named |= reads.names | reads.texts

        parts = [
            self._code(function.__code__, path),
            self._value(function.__defaults__, f"{path} → a default argument"),
            self._value(function.__kwdefaults__, f"{path} → a default argument"),
            self._value(vars(function), f"{path} → an attribute"),
        ]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            parts.append(self._cell(cell, f"{path} → variable {name!r}", reads))
        for name in reads.globals:
            parts.append(self._global(function.__globals__, name, path, reads))
        for level, name, imported in reads.imports:
            parts.append(self._import(function.__globals__, level, name, imported, path, reads))
        return hashed("function", parts)

    def _class(self, kind: type, path: str) -> str:
        """Hash the bases of a class. Its attributes have their turn later."""
        owner = self._reference(kind, path)
        for name, value in sorted(vars(kind).items()):
            # Slots count by `__slots__`. cloudpickle makes the class again without them.
            if name not in _SET_BY_PYTHON and not isinstance(value, types.MemberDescriptorType):
                is_code = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
                is_protocol = name.startswith("__") and name.endswith("__") and name not in _CONSTRUCTORS | _HARMLESS
                self._members.append(_Member(owner, name, value, f"{path}.{name}", is_code and is_protocol))
        bases = [self._value(base, path) for base in kind.__bases__]
        return hashed("class", kind.__name__, bases, self._value(type(kind), path))

    def _code(self, code: types.CodeType, path: str) -> str:
        """Hash code, without its names, files and lines."""
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        consts = [self._value(const, path) for const in code.co_consts]
        return hashed("code", counts, names, consts, code.co_code, code.co_exceptiontable)

    def _cell(self, cell: types.CellType, path: str, reads: CodeReads | None = None) -> str:
        try:
            value = cell.cell_contents
        except ValueError:
            return hashed("empty variable")
        return self._read(value, path, reads)

    def _global(self, scope: dict[str, Any], name: str, path: str, reads: CodeReads) -> str:
        if name in scope:
            return hashed(name, self._read(scope[name], f"{path} → global {name!r}", reads))
        self._refuse_effect(path, builtin_effect(name), name)
        return hashed(name, hasattr(builtins, name))

    def _import(
        self, scope: dict[str, Any], level: int, name: str, imported: tuple[str, ...], path: str, reads: CodeReads
    ) -> str:
        """Hash a module that a function imports while it runs. The code may live without it."""
        try:
            absolute = importlib.util.resolve_name("." * level + name, scope.get("__package__")) if level else name
            # `import a.b` gives `a`, from which the code goes on to `b`. `from a import b` also imports a module `a.b`.
            given = __import__(name, scope, None, imported, level)
        except ImportError:
            return hashed(name, "is missing")
        module = sys.modules[absolute]
        modules = [module] if module is given else [given, module]
        return hashed(name, [self._module(part, f"{path} → module {part.__name__}", reads) for part in modules])

    def _read(self, value: Any, path: str, reads: CodeReads | None) -> str:
        """Hash a value that code reads by a variable."""
        if isinstance(value, types.ModuleType):
            return self._module(value, path, reads)
        if isinstance(value, type) and self._refuses:
            self._named |= _CONSTRUCTORS
        return self._value(value, path)

    def _module(self, module: types.ModuleType, path: str, reads: CodeReads | None) -> str:
        """Hash the version of a module, or what code reads of a user's module."""
        if origin_of(module.__name__) is not None:
            return self._library(module.__name__, "", path)
        if reads is None:
            self._refuse(path, "it reads a module as a value")
            return hashed("module")
        # A package and its modules may have each other as attributes.
        if id(module) in self._open_modules:
            return hashed("module")
        content = vars(module)
        # A module's `__getattr__` makes the attributes that it lacks.
        by_name = sorted((reads.names | reads.texts | {"__getattr__"}) & content.keys())
        if reads.names & _BY_COMPUTED_NAME:
            owner = hashed(len(self._members))
            others = (name for name in sorted(content.keys() - set(by_name)) if not name.startswith("__"))
            self._members += [_Member(owner, name, content[name], f"{path}.{name}", False) for name in others]
        self._open_modules.add(id(module))
        hashes = [self._read(content[name], f"{path}.{name}", reads) for name in by_name]
        self._open_modules.remove(id(module))
        return hashed(by_name, hashes)

    def _library(self, module: str, qualname: str, path: str) -> str:
        """Hash the version of an installed function, class or module."""
        self._refuse_effect(path, library_effect(module, qualname), f"{module}.{qualname}".rstrip("."))
        return hashed("library", origin_of(module), module, qualname)

    # Values

    def _value(self, value: Any, path: str) -> str:
        """Hash a value. A value that contains itself is hashed as the distance to where it began."""
        if type(value) in _PLAIN:
            return hashed(type(value).__name__, value)
        key, depth = id(value), len(self._open)
        if key in self._open:
            self._outermost = min(self._outermost, self._open[key])
            return hashed("inside of", depth - self._open[key])
        if key in self._known:
            return self._known[key]

        self._open[key] = depth
        around, self._outermost = self._outermost, math.inf
        try:
            result = self._object(value, path)
        finally:
            del self._open[key]
        self._kept.append(value)
        # Inside of a value that isn't finished, the hash depends on where the walk began.
        if self._outermost >= depth:
            self._known[key] = result
            self._outermost = math.inf
        self._outermost = min(self._outermost, around)
        return result

    def _object(self, value: Any, path: str) -> str:
        """Hash an object by its kind."""
        kind = type(value)
        if isinstance(value, (types.FunctionType, type, types.MethodType, types.BuiltinFunctionType)):
            return self._callable(value, path)
        if isinstance(value, types.ModuleType):
            return self._module(value, path, None)
        if isinstance(value, types.CodeType):
            return self._code(value, path)
        if isinstance(value, types.CellType):
            return self._cell(value, path)
        if isinstance(value, (*_DESCRIPTORS, types.MethodWrapperType)):
            owner = value.__self__ if isinstance(value, types.MethodWrapperType) else value.__objclass__
            return hashed("descriptor", self._value(owner, path), value.__name__)
        wrapped = _wrapped(value)
        if wrapped is not None:
            return hashed(kind.__qualname__, [self._value(part, path) for part in wrapped])
        if kind in (list, tuple):
            return hashed(kind.__name__, [self._value(item, f"{path}[{index}]") for index, item in enumerate(value)])
        if kind in (set, frozenset):
            return hashed(kind.__name__, [self._value(item, f"{path}[{item!r}]") for item in self._sorted(value)])
        if kind in (dict, types.MappingProxyType):
            return hashed("dict", list(self._pairs(value.items(), path)))
        if (kind is np.ndarray and not value.dtype.hasobject) or _is_dense_tensor(value):
            return hashed(kind.__name__, value)
        return self._reduced(value, path)

    def _sorted(self, items: Iterable[Any]) -> list[Any]:
        """Sort the items of a set, since their order differs from process to process, and definitions are numbered."""
        order = _SetOrder()
        return sorted(items, key=lambda item: order._value(item, ""))

    def _callable(self, value: Any, path: str) -> str:
        if isinstance(value, types.MethodType):
            return hashed("method", self._value(value.__self__, path), self._value(value.__func__, path))
        if isinstance(value, types.BuiltinFunctionType):
            if isinstance(value.__self__, (types.ModuleType, type(None))):
                return self._library(value.__module__ or "builtins", value.__qualname__, path)
            self._refuse_effect(path, attribute_effect(value.__name__), value.__name__)
            if self._refuses:
                self._named.add(value.__name__)
            return hashed("method", self._value(value.__self__, path), value.__name__)
        if isinstance(value, type):
            # A metaclass of Cython has a descriptor there.
            module = value.__module__ if isinstance(value.__module__, str) else ""
            if origin_of(module) is not None and _is_of(value, module):
                return self._library(module, value.__qualname__, path)
            return self._reference(value, path)

        # A library's decorator gives its wrapper the name and module of what it wraps. Its globals tell where it is from.
        module = value.__globals__.get("__name__", "")
        if origin_of(module) is None:
            return self._reference(value, path)
        closure = [self._cell(cell, path) for cell in value.__closure__ or ()]
        return hashed(self._library(module, value.__code__.co_name, path), closure)

    def _reduced(self, value: Any, path: str) -> str:
        """Hash the parts that pickle would store of an object."""
        kind = type(value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            self._refuse(path, f"its type {name} can't be pickled ({error})")
            return hashed("unknown", self._value(kind, path))
        if isinstance(reduced, str):
            module = pickle.whichmodule(value, reduced)  # type: ignore[attr-defined]
            origin = origin_of(module)
            if _found(module, reduced) is not value:
                self._refuse(path, f"its type {kind.__qualname__} can't be pickled ({module} has no {reduced!r})")
                origin = None
            return hashed("global", self._value(kind, path), origin, reduced)
        parts: tuple[Any, ...] = (*reduced, None, None, None)
        make, arguments, state, items, pairs = parts[:5]
        return hashed(
            "object",
            self._value(kind, path),
            self._value(make, path),
            self._value(arguments, path),
            self._state(state, path),
            [] if items is None else [self._value(item, f"{path}[{index}]") for index, item in enumerate(items)],
            [] if pairs is None else list(self._pairs(pairs, path)),
        )

    def _state(self, state: Any, path: str) -> str:
        # An object with slots has two dicts. If cloudpickle made its class again, it has one.
        match state:
            case (None | dict() as attributes, dict() as slots):
                state = {**(attributes or {}), **slots}
        if isinstance(state, dict):
            named = ((name, self._value(part, f"{path}.{name}")) for name, part in state.items())
            return hashed("state", list(named))
        return self._value(state, path)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], path: str) -> Iterator[tuple[str, str]]:
        for key, value in pairs:
            yield self._value(key, path), self._value(value, f"{path}[{key!r}]")


class _SetOrder(_Walk):
    """A walk that gives the items of a set an order. Definitions count by name, code and closure, not by number."""

    def __init__(self) -> None:
        super().__init__()
        self._refuses = False

    def _reference(self, definition: Any, path: str) -> str:
        if isinstance(definition, type):
            return hashed("class", definition.__qualname__)
        closure = [self._cell(cell, path) for cell in definition.__closure__ or ()]
        defaults = self._value(definition.__defaults__, path), self._value(definition.__kwdefaults__, path)
        return hashed("function", definition.__qualname__, self._code(definition.__code__, path), closure, defaults)

    def _sorted(self, items: Iterable[Any]) -> list[Any]:
        return sorted(items, key=lambda item: self._value(item, ""))


def _is_of(kind: type, module: str) -> bool:
    """Return False if a class only claims to be of a module, as one does that `exec` has made."""
    if not kind.__flags__ & _MADE_AT_RUN_TIME or "<locals>" in kind.__qualname__:
        return True
    return _found(module, kind.__qualname__) is kind


def _found(module: str, qualname: str) -> Any:
    """Return what a module has under a name with dots; None if there is nothing."""
    value: Any = sys.modules.get(module)
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value


def _wrapped(value: Any) -> list[Any] | None:
    """Return what a wrapper that can't be pickled is made of; None for any other value."""
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    return None


def _is_dense_tensor(value: Any) -> bool:
    """Return True for a tensor whose values are an array in memory. Others are hashed as pickle sees them."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


def name_of(function: Any) -> str:
    """Return the name of a function, or of what a partial function calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
