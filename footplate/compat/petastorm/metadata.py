"""Reads the Unischema of a table that Petastorm wrote, without running code.

`materialize_dataset` writes a file `_common_metadata` beside the table's files. Its Parquet metadata has the schema as a
pickle. A pickle is a program: it can name any function of any module, and call it with any arguments. So the names in this
pickle are never imported. Each name becomes an empty record class, made for this one reading, whose objects keep the
arguments of their construction. Only numpy's types, Decimal and OrderedDict are used themselves. A name that no Unischema
needs is an error. `_schema` then builds the schema from the records with plain code.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from footplate.compat.petastorm.unischema import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NdarrayCodec,
    ScalarCodec,
    Unischema,
    UnischemaField,
)
from footplate.core.errors import DataError
from footplate.data.remote.location import exists, locate

_KEY = b"dataset-toolkit.unischema.v1"
# Petastorm, and the names that it had before.
_PACKAGES = ("petastorm", "av.ml.dataset_toolkit", "av.experimental.deepdrive.dataset_toolkit")
_RECORDS = {
    "unischema": ("Unischema", "UnischemaField"),
    "codecs": ("ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec"),
}
_CODECS = {"NdarrayCodec": NdarrayCodec, "CompressedNdarrayCodec": CompressedNdarrayCodec}
_NUMPY_OLD = {"unicode_": "str_", "string_": "bytes_", "bool": "bool_", "str": "str_", "object": "object_"}


def read_unischema(url: Any) -> Unischema | None:
    """Read the Unischema of a table; None for a table without one.

    Raises:
        DataError: the schema can't be read, or names something that isn't part of a Unischema.
    """
    location = locate(url)
    path = f"{location.path.rstrip('/')}/_common_metadata"
    if exists(location, path) != pafs.FileType.File:
        return None
    try:
        with location.filesystem.open_input_file(path) as file:
            metadata = pq.read_schema(file).metadata or {}
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file of metadata ({error}).") from error
    return parse_unischema(metadata[_KEY], path) if _KEY in metadata else None


def parse_unischema(pickled: bytes, path: str = "_common_metadata") -> Unischema:
    """Read a Unischema from a pickle; error texts name the file `path`.

    Raises:
        DataError: the pickle can't be read, or names something that isn't part of a Unischema.
    """
    try:
        return _schema(_Records(io.BytesIO(pickled), encoding="utf-8").load())
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:
        raise DataError(f"{path}: its Unischema can't be read ({type(error).__name__}: {error}).") from error


class _Record:
    """An object of a pickle, with the arguments of its construction and its attributes."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> _Record:
        record = object.__new__(cls)
        record.arguments = arguments
        return record

    def __init__(self, *_: Any) -> None:
        """Do nothing: `__new__` has kept the arguments."""


class _Records(pickle.Unpickler):
    """Reads a pickle of a Unischema into records."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return a record class in place of a name of the pickle.

        Raises:
            DataError: the name isn't part of a Unischema.
        """
        package, _, module = module_name.rpartition(".")
        if package in _PACKAGES and global_name in _RECORDS.get(module, ()):
            return type(global_name, (_Record,), {})
        if module_name == "pyspark.sql.types" and global_name.endswith(("Type", "StructField")):
            return type(global_name, (_Record,), {})
        if module_name == "numpy":
            kind = getattr(np, _NUMPY_OLD.get(global_name, global_name), None)
            if kind is np.dtype or (isinstance(kind, type) and issubclass(kind, np.generic)):
                return kind
        if (module_name, global_name) in (("copy_reg", "_reconstructor"), ("copyreg", "_reconstructor")):
            return _reconstructed
        if module_name in ("__builtin__", "builtins") and global_name in ("object", "tuple"):
            return {"object": object, "tuple": tuple}[global_name]
        known = {("collections", "OrderedDict"): OrderedDict, ("decimal", "Decimal"): Decimal}
        if (module_name, global_name) in known:
            return known[module_name, global_name]
        raise DataError(
            f"its Unischema names {module_name}.{global_name}, which is not part of a Unischema and isn't imported. If "
            "the table has a codec of your own, read it with make_batch_reader, which gives the stored values."
        )


def _reconstructed(kind: Any, base: Any, state: Any) -> Any:
    """Make an object in the way that pickles of Python 2 do.

    Raises:
        DataError: the object is not a record.
    """
    if not (isinstance(kind, type) and issubclass(kind, _Record)):
        raise DataError(f"its Unischema makes an object of {kind!r}.")
    return kind(*state) if base is tuple else kind()


def _schema(record: Any) -> Unischema:
    if type(record).__name__ != "Unischema":
        raise DataError(f"expected a Unischema, found {type(record).__name__}.")
    return Unischema(str(vars(record)["_name"]), [_field(field) for field in vars(record)["_fields"].values()])


def _field(record: Any) -> UnischemaField:
    # Petastorm 0.6 and older leave out the codec and `nullable`.
    name, kind, shape, codec, nullable = (*record.arguments, None, False)[:5]
    return UnischemaField(str(name), kind, tuple(shape or ()), None if codec is None else _codec(codec), bool(nullable))


def _codec(record: Any) -> Any:
    name, attributes = type(record).__name__, vars(record)
    if name == "CompressedImageCodec":
        return CompressedImageCodec(attributes["_image_codec"].lstrip("."), attributes.get("_quality", 80))
    if name == "ScalarCodec":
        kind = attributes["_spark_type"]
        return ScalarCodec(kind.__name__ if isinstance(kind, type) else type(kind).__name__)
    if name in _CODECS:
        return _CODECS[name]()
    raise DataError(f"its Unischema has the codec {name}, which isn't supported.")
