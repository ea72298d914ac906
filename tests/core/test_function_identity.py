"""The identity of a function changes with everything that its results depend on, and with nothing else."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import importlib
import os
import pickle
import re
import site
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import attr
import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from footplate.core.identity.function_identity import UnknownIdentity, function_identity
from footplate.core.identity.module_origin import installed_directories

ROOT = Path(__file__).parents[2]

# A module with one function, which multiplies an integer.
EXTENSION = """
#include <Python.h>
static PyObject *multiply(PyObject *self, PyObject *n) { return PyLong_FromLong(FACTOR * PyLong_AsLong(n)); }
static PyMethodDef functions[] = {{"double", multiply, METH_O, 0}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fast", 0, -1, functions};
PyMODINIT_FUNC PyInit_fast(void) { return PyModule_Create(&module); }
"""


def defined(source: str, **variables: Any) -> Callable[..., Any]:
    """The function `f` of some source, which reads some globals."""
    exec(textwrap.dedent(source), variables)
    return variables["f"]


def identity(source: str, **variables: Any) -> str:
    return function_identity(defined(source, **variables))


def reader_of(value: Any) -> Callable[..., Any]:
    return lambda batch: (batch, value)


class Color(enum.Enum):
    RED = 1


class Shade(enum.Enum):
    DARK = 1


@dataclasses.dataclass
class Cleaner:
    limit: int = 3
    words: list[str] = dataclasses.field(default_factory=list)

    def clean(self, text: str) -> str:
        return text[: self.limit]

    def save(self, path: str) -> None:
        with open(path, "w") as file:  # noqa: PTH123
            file.write(str(self))


@functools.lru_cache
def cached(text: str) -> str:
    return text.strip()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes a module of the user's, and imports it again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> ModuleType:
        (tmp_path / "helpers.py").write_text(textwrap.dedent(source))
        sys.modules.pop("helpers", None)
        importlib.invalidate_caches()
        return importlib.import_module("helpers")

    yield write
    sys.modules.pop("helpers", None)


# What counts


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(b): return b + 1", "def f(b): return b + 2"),
        ("def f(b): return b.lower()", "def f(b): return b.upper()"),
        ("def f(b, n=1): return n", "def f(b, n=2): return n"),
        ("def f(b, *, n=1): return n", "def f(b, *, n=2): return n"),
        ("def f(b): return [x + 1 for x in b]", "def f(b): return [x + 2 for x in b]"),
        ("def f(b): return b in {'x', 'y'}", "def f(b): return b in {'x', 'z'}"),
        ("LIMIT = 1\ndef f(b): return b[:LIMIT]", "LIMIT = 2\ndef f(b): return b[:LIMIT]"),
        ("def g(b): return 1\ndef f(b): return g(b)", "def g(b): return 2\ndef f(b): return g(b)"),
        ("class C:\n def go(self): return 1\nc = C()\ndef f(b): return c.go()",
         "class C:\n def go(self): return 2\nc = C()\ndef f(b): return c.go()"),
        ("class C:\n N = 1\ndef f(b): return C.N", "class C:\n N = 2\ndef f(b): return C.N"),
        ("class B:\n def go(self): return 1\nclass C(B): pass\ndef f(b): return C().go()",
         "class B:\n def go(self): return 2\nclass C(B): pass\ndef f(b): return C().go()"),
        ("def f(b):\n def g(): return 1\n return g()", "def f(b):\n def g(): return 2\n return g()"),
        ("class C: pass\ndef f(b): return type(C()).__name__", "class D: pass\nC = D\ndef f(b): return type(C()).__name__"),
    ],
)  # fmt: skip
def test_another_function_has_another_identity(before: str, after: str) -> None:
    assert identity(before) == identity(before)
    assert identity(before) != identity(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(b): return b + 1", "\n\n# A comment.\ndef f(b):\n    return b + 1  # another\n"),
        ("UNUSED = 1\ndef f(b): return b", "UNUSED = 2\ndef f(b): return b"),
        ("def f(b): return b", "f = lambda b: b"),
    ],
)
def test_comments_lines_and_unused_values_dont_count(before: str, after: str) -> None:
    assert identity(before) == identity(after)


def test_a_method_that_runs_without_its_name_counts() -> None:
    source = "class C:\n def forward(self): return {}\nc = C()\ndef f(b, apply): return apply(c)"
    assert identity(source.format(1)) != identity(source.format(2))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), ("1", b"1"), ([1], (1,)), ({1: 2, 3: 4}, {3: 4, 1: 2}), ([[1], 2], [[1, 2]]),
        ({1, 2}, frozenset({1, 2})), (np.arange(2000), np.arange(2000) // 1999), (re.compile("a"), re.compile("a", re.I)),
        (functools.partial(max, 1), functools.partial(max, 2)), (len, max), (str.lower, str.upper), ("a".join, "b".join),
        (np.add, np.subtract), (torch.int8, torch.int16), (torch.eye(2).to_sparse(), torch.eye(3).to_sparse()),
        (torch.tensor([1j]), torch.tensor([1j]).conj()), (pa.table({"x": [1]}), pa.table({"x": [2]})),
        (np.zeros(2, [("x", "<i4"), ("y", "<i4")]), np.zeros(2, [("y", "<i4"), ("x", "<i4")])),
        ({cached, reader_of}, {cached, len}), ({Color.RED}, {Color.RED, Shade.DARK}),
    ],
)  # fmt: skip
def test_other_values_give_other_identities(one: Any, other: Any) -> None:
    assert function_identity(reader_of(one)) != function_identity(reader_of(other))
    assert function_identity(reader_of(one)) == function_identity(reader_of(copy.copy(one)))


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashable = plain | st.tuples(plain, plain) | st.frozensets(plain)
values = st.recursive(
    hashable | st.sets(hashable),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(plain, inner),
    max_leaves=12,
)


@given(values, values)
def test_values_count_by_content_and_type(one: Any, other: Any) -> None:
    def same(one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(same, one, other))
        if isinstance(one, dict):
            return same(list(one.items()), list(other.items()))
        if isinstance(one, (set, frozenset)):
            return len(one) == len(other) and all(any(same(a, b) for b in other) for a in one)
        return repr(one) == repr(other)

    identities = [function_identity(reader_of(value)) for value in (one, copy.deepcopy(one), other)]
    assert identities[0] == identities[1]
    assert (identities[0] == identities[2]) == same(one, other)


@given(values)
def test_a_copy_in_another_process_has_the_same_identity(value: Any) -> None:
    # With the name of a script, as cloudpickle looks through all modules for functions without one.
    source = "def f(b): return g(b), VALUE\ndef g(b): return [f, VALUE]"
    function = defined(source, VALUE=value, __name__="__main__")
    assert function_identity(cloudpickle.loads(cloudpickle.dumps(function))) == function_identity(function)


def test_values_that_contain_themselves_are_hashed() -> None:
    def knot(n: int) -> list[Any]:
        items: list[Any] = [n]
        items.append([items, items])
        return items

    assert function_identity(reader_of(knot(1))) == function_identity(reader_of(knot(1)))
    assert function_identity(reader_of(knot(1))) != function_identity(reader_of(knot(2)))


def test_objects_count_with_class_and_state() -> None:
    cleaner = Cleaner()

    def f(batch: Any) -> Any:
        return cleaner.clean(batch), Color.RED, cached("a"), np.asarray([1])

    before = function_identity(f)
    cached("b")
    assert function_identity(f) == before
    assert function_identity(cloudpickle.loads(cloudpickle.dumps(f))) == before
    cleaner.words.append("x")
    assert function_identity(f) != before


def test_a_decorated_function_counts_with_what_it_wraps() -> None:
    source = "import functools\ndef around(g):\n @functools.wraps(g)\n def call(b): return g(b)\n return call\n"
    assert identity(source + "@around\ndef f(b): return 1") != identity(source + "@around\ndef f(b): return 2")
    source = "import contextlib\n@contextlib.contextmanager\ndef g(): yield {}\ndef f(b):\n with g() as x: return x"
    assert identity(source.format(1)) != identity(source.format(2))


# Modules


def test_an_edited_helper_of_another_module_counts(module: Callable[[str], ModuleType]) -> None:
    source = "LIMIT = {}\ndef clean(t): return cut(t)\ndef cut(t): return t[:LIMIT]\ndef other(t): return {}\n"

    def through_module(helpers: ModuleType) -> str:
        return identity("def f(b): return helpers.clean(b)", helpers=helpers)

    def through_import(_: ModuleType) -> str:
        return identity("def f(b):\n from helpers import clean\n return clean(b)")

    def by_name(helpers: ModuleType) -> str:
        return identity("def f(b, name): return getattr(helpers, name)(b)", helpers=helpers)

    for read in (through_module, through_import):
        first = read(module(source.format(1, 1)))
        assert read(module(source.format(1, 1))) == first
        assert read(module(source.format(1, 2))) == first
        assert read(module(source.format(2, 1))) != first
    assert by_name(module(source.format(1, 1))) != by_name(module(source.format(1, 2)))


@pytest.mark.parametrize(
    "source",
    [
        "def f(b):\n from package import part\n return part.clean(b)",
        "def f(b):\n import package.part\n return package.part.clean(b)",
        "def f(b):\n import package.part as p\n return p.clean(b)",
        # Python puts prefixes before instructions that have large numbers.
        "def f(b):\n x = [" + ", ".join(f"b.a{n} + {n}.5" for n in range(300)) + "]\n"
        " from .part import clean\n return clean(b)",
    ],
    ids=["from", "import", "as", "relative"],
)
def test_a_module_that_is_imported_when_the_function_runs_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()

    def identity_with(limit: int) -> str:
        (tmp_path / "package" / "part.py").write_text(f"def clean(t): return t[:{limit}]")
        for name in ("package", "package.part"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return identity(source, __package__="package", __name__="package")

    assert identity_with(1) == identity_with(1)
    assert identity_with(1) != identity_with(2)


def test_what_makes_the_missing_attributes_of_a_module_counts(module: Callable[[str], ModuleType]) -> None:
    source = "def __getattr__(name): return {}"
    one, other = (identity("def f(b): return h.x", h=module(source.format(n))) for n in (1, 2))
    assert one != other


def test_a_compiled_module_of_the_users_counts_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / f"fast{EXTENSION_SUFFIXES[0]}"
    script = "import fast\nfrom footplate.core.identity.function_identity import function_identity\n"
    script += "print(function_identity(lambda b: fast.double(b)))"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def identity_with(factor: int) -> str:
        code = EXTENSION.replace("FACTOR", str(factor))
        compiler = sysconfig.get_config_var("CC").split()
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run(
            [*compiler, "-shared", "-fPIC", include, "-xc", "-", "-o", file], input=code, text=True, check=True
        )
        return subprocess.check_output([sys.executable, "-c", script], env=environ, text=True)

    assert identity_with(2) != identity_with(3)


def test_a_module_that_hides_one_of_pythons_is_the_users(tmp_path: Path) -> None:
    script = (
        "import tokenize\nfrom footplate.core.identity.module_origin import origin_of\nprint(origin_of('tokenize'))"
    )
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def origin() -> str:
        return subprocess.run(
            [sys.executable, "-c", script], env=environ, capture_output=True, text=True
        ).stdout.strip()

    assert origin().startswith("CPython 3")
    (tmp_path / "tokenize.py").write_text("def open(path): ...\n")
    assert origin() == "None"


def test_folders_of_packages_are_known_by_both_names_where_they_are_links(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "link")])
    assert {str(tmp_path / "link"), str(tmp_path / "real")} < set(installed_directories())


def test_installed_packages_count_with_their_version() -> None:
    from footplate.core.identity.module_origin import origin_of

    assert origin_of("numpy.linalg") == f"numpy {np.__version__}"
    assert origin_of(__name__) is None


def test_the_identity_is_the_same_in_every_process() -> None:
    program = """
        import enum, re
        import pydantic
        from footplate.core.identity.function_identity import function_identity
        WORDS = {"a", "bb", "ccc", "dddd"}
        class C:
            words = frozenset(WORDS)
            def go(self, b): return b in {"x", "y", "zz"} or b in self.words or re.match("a", b)
        class D: pass
        class Kind(enum.Enum): A = 1
        class Sort(enum.Enum): B = 1
        make = lambda n: lambda b: n
        SETS = [{C, D}, {C.go, print, len}, {make(1), make(2)}, {Kind.A, Sort.B}, {("a", C), ("b", D)}, {C(), D()}]
        class Model(pydantic.BaseModel):
            size: int = 3
        print(function_identity(C().go), function_identity(lambda b: SETS), function_identity(lambda b: Model()))
    """
    outputs = set()
    for seed in ("1", "2", "3"):
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        outputs.add(subprocess.check_output([sys.executable, "-c", textwrap.dedent(program)], env=environ))
    assert len(outputs) == 1


# Tokenizers


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["[UNK]", "[PAD]"], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    return tokenizer


def test_a_tokenizer_counts_with_its_content(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def encode(tokenizer: Tokenizer) -> Callable[..., Any]:
        return lambda batch: [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]

    tokenizer.save(str(tmp_path / "tokenizer.json"))
    before = function_identity(encode(tokenizer))
    tokenizer.encode_batch(["the dog"])
    assert function_identity(encode(tokenizer)) == before
    assert function_identity(encode(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))) == before
    assert function_identity(tokenizer.encode_batch) == function_identity(
        pickle.loads(pickle.dumps(tokenizer)).encode_batch
    )
    tokenizer.add_tokens(["<new>"])
    assert function_identity(encode(tokenizer)) != before


# What has no identity


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import random\ndef f(b): return random.random()", "draws random numbers"),
        ("def f(b):\n import random\n return random.shuffle(b)", "draws random numbers"),
        ("from random import choice\ndef f(b): return choice(b)", r"global 'choice'.*draws random numbers"),
        ("import numpy as np\ndef f(b): return np.random.rand(3)", "draws random numbers"),
        ("import numpy as np\nrng = np.random.default_rng(0)\ndef f(b): return rng.normal()", "draws random numbers"),
        ("import torch\ndef f(b): return torch.randn(3)", "draws random numbers"),
        ("import time\ndef f(b): return time.time()", "reads the time"),
        ("import datetime\ndef f(b): return datetime.datetime.now()", "reads the time"),
        ("import os\ndef f(b): return os.environ['X']", "reads environment variables"),
        ("def f(b): return open('words.txt').read()", r"f: it reads files \(open\)"),
        ("def f(b): return Tokenizer.from_file('t.json')", "loads from files"),
        ("def f(b):\n import pandas\n return pandas.read_csv('words.csv')", "reads files"),
        ("from os import getenv as variable\ndef f(b): return variable('X')", "reads environment variables"),
        ("import datetime\nclock = datetime.datetime.now\ndef f(b): return clock()", r"global 'clock'.*reads the time"),
        ("read = open\ndef f(b): return read('x')", r"global 'read': it reads files \(io\.open\)"),
        (
            "import pathlib\nwords = pathlib.Path('x')\ndef f(b): return words.open().read()",
            r"f: it reads files \(open\)",
        ),
        ("def f(b): return hash(b)", "differs from process to process"),
        ("n = 0\ndef f(b):\n global n\n n += 1", "assigns the variable 'n'"),
        ("def g():\n n = 0\n def f(b):\n  nonlocal n\n  n += 1\n return f\nf = g()", "assigns the variable 'n'"),
        ("def f(b): return helper(b)\ndef helper(b): return open(b)", r"f → global 'helper': it reads files"),
        ("class C:\n def __init__(self): self.x = open('x')\ndef f(b): return C()", "reads files"),
        ("class C:\n def go(self): return open('x')\nc = C()\ndef f(b): return c.go()", r"global 'c'.*reads files"),
    ],
)
def test_a_function_that_may_not_repeat_its_results_is_refused(source: str, says: str) -> None:
    with pytest.raises(UnknownIdentity, match=says):
        identity(source)


def test_an_object_that_cannot_be_pickled_is_named() -> None:
    state = {"model": [1, threading.Lock()]}
    with pytest.raises(
        UnknownIdentity, match=r"variable 'value'\['model'\]\[1\]: its type _thread.lock can't be pickled"
    ):
        function_identity(reader_of(state))


def test_a_method_that_is_not_called_may_do_anything() -> None:
    assert function_identity(Cleaner().clean) != function_identity(Cleaner(limit=4).clean)
    with pytest.raises(UnknownIdentity, match="reads files"):
        function_identity(Cleaner().save)


def test_generated_methods_that_hash_do_not_stand_in_the_way() -> None:
    @dataclasses.dataclass(frozen=True)
    class Limit:
        size: int

    @attr.frozen
    class Other:
        size: int

    for kind in (Limit, Other):
        assert function_identity(reader_of(kind(1))) == function_identity(reader_of(kind(1)))
        assert function_identity(reader_of(kind(1))) != function_identity(reader_of(kind(2)))


def test_a_function_that_pickle_does_not_find_by_its_name_has_no_identity() -> None:
    with pytest.raises(UnknownIdentity, match=r"variable 'value': its type ufunc can't be pickled"):
        function_identity(reader_of(np.frompyfunc(lambda n: n + 1, 1, 1)))
