"""The package `petastorm` for the inner run: it has the names of `footplate.compat.petastorm`.

It is a package and not a plugin, so that the processes that a case starts find it too. A name that
`footplate.compat.petastorm` doesn't have is an `Absent`: its use raises `NotOffered`, except while test files are imported,
because they define schemas.
"""

from __future__ import annotations

import datetime
import importlib.abc
import importlib.machinery
import pkgutil
import sys
import types
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import fsspec
import numpy as np
import pandas  # noqa: F401

import footplate.compat.petastorm as ours
from footplate.compat.petastorm import TransformSpec, make_batch_reader, make_reader, predicates
from petastorm import writing

__all__ = ["OFFERED", "NotOffered", "TransformSpec", "make_batch_reader", "make_reader", "refuse_absent_names"]
__path__ = pkgutil.extend_path(__path__, __name__)  # with the folders of the tests
_refusing = False


class NotOffered(Exception):
    """A case uses a name that `footplate.compat.petastorm` doesn't have."""


def refuse_absent_names(refuse: bool) -> None:
    """Set whether the use of an absent name raises. It must not while test files are imported."""
    global _refusing
    _refusing = refuse


class Absent:
    """Stands for a name of a package that isn't installed."""

    def __init__(self, name: str) -> None:
        self._name: str = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._used(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Absent:
        return self._used(self._name)

    def __iter__(self):
        self._used(self._name)
        return iter(())

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    def _used(self, name: str) -> Absent:
        if _refusing:
            raise NotOffered(f"{self._name} isn't in footplate.compat.petastorm")
        return Absent(name)


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of Petastorm and TensorFlow that no other finder has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in ("petastorm", "tensorflow") or fullname == "pyarrow.hdfs":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        offered = OFFERED.get(module.__name__, {})
        vars(module).update({name: value for name, value in offered.items() if not name.startswith("__")})


class FilesystemResolver:
    """Petastorm's helper, with which a case checks deleted files."""

    def __init__(self, url: str) -> None:
        self._scheme = urlsplit(url).scheme

    def filesystem(self) -> fsspec.AbstractFileSystem:
        """The file system of the URL."""
        return fsspec.filesystem(self._scheme)


def _writes_no_index(*_: object, **__: object) -> None:
    """Write no row group index, because only selectors would read it."""


_CONVERTER = {"SparkDatasetConverter": ours.SparkDatasetConverter, "make_spark_converter": ours.make_spark_converter}
OFFERED = {
    "petastorm.spark": _CONVERTER,
    "petastorm.spark.spark_dataset_converter": {
        **_CONVERTER,
        "make_batch_reader": ours.make_batch_reader,
        "register_delete_dir_handler": ours.register_delete_dir_handler,
    },
    "petastorm.pytorch": {
        "DataLoader": ours.DataLoader,
        "BatchedDataLoader": ours.BatchedDataLoader,
        "InMemBatchedDataLoader": ours.InMemBatchedDataLoader,
        "decimal_friendly_collate": ours.decimal_friendly_collate,
    },
    "petastorm.predicates": vars(predicates),
    "petastorm.transform": {"TransformSpec": ours.TransformSpec, "edit_field": ours.edit_field},
    "petastorm.unischema": {
        "Unischema": writing.Unischema,
        "UnischemaField": writing.UnischemaField,
        "dict_to_spark_row": writing.dict_to_spark_row,
    },
    "petastorm.codecs": {
        "ScalarCodec": writing.ScalarCodec,
        "NdarrayCodec": writing.NdarrayCodec,
        "CompressedNdarrayCodec": writing.CompressedNdarrayCodec,
        "CompressedImageCodec": writing.CompressedImageCodec,
    },
    "petastorm.etl.dataset_metadata": {"materialize_dataset": writing.materialize_dataset},
    "petastorm.etl.rowgroup_indexers": {"SingleFieldIndexer": _writes_no_index},
    "petastorm.etl.rowgroup_indexing": {"build_rowgroup_index": _writes_no_index},
    "petastorm.reader": {"Reader": ours.Reader},
    "petastorm.fs_utils": {"FilesystemResolver": FilesystemResolver},
    "petastorm.tests.test_tf_utils": {"create_tf_graph": lambda function: function},
}

sys.meta_path.append(_Finder())
# The tests of TensorFlow define this decorator, and can't be imported without TensorFlow.
_tf_utils = _AbsentModule("petastorm.tests.test_tf_utils")
vars(_tf_utils).update(OFFERED["petastorm.tests.test_tf_utils"])
sys.modules[_tf_utils.__name__] = _tf_utils
# Names of older NumPy versions that Petastorm's tests use.
for _name, _type in {"unicode_": np.str_, "string_": np.bytes_}.items():
    setattr(np, _name, _type)
# pandas, imported above, would expect more of this stand-in for pytz.
if "pytz" not in sys.modules:
    sys.modules["pytz"] = types.ModuleType("pytz")
    vars(sys.modules["pytz"])["UTC"] = datetime.UTC
