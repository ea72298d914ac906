"""Writes tables with a Unischema, as Petastorm does, for its tests. Footplate itself only reads such tables.

The classes are Footplate's with encoders. They are pickled in Petastorm's form: with the names of its modules, and the
attributes of its objects.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from pyspark.sql import Row
from pyspark.sql import types as spark

from footplate.compat import petastorm as ours

_KEY = b"dataset-toolkit.unischema.v1"
_SPARK_TYPES = {
    np.bool_: spark.BooleanType(), np.int8: spark.ByteType(), np.uint8: spark.ShortType(),
    np.int16: spark.ShortType(), np.uint16: spark.IntegerType(), np.int32: spark.IntegerType(),
    np.uint32: spark.LongType(), np.int64: spark.LongType(), np.float32: spark.FloatType(),
    np.float64: spark.DoubleType(), np.str_: spark.StringType(), np.bytes_: spark.BinaryType(),
    np.datetime64: spark.TimestampType(), Decimal: spark.DecimalType(38, 18),
}  # fmt: skip


class _Pickled:
    """A frozen record whose attributes have an underscore in its pickle, as Petastorm's do."""

    def __getstate__(self) -> dict[str, Any]:
        return {f"_{name}": value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name.removeprefix("_"): value for name, value in state.items()})


class ScalarCodec(_Pickled, ours.ScalarCodec):
    """A scalar in a column of a Spark type."""

    __module__ = "petastorm.codecs"

    def encode(self, field: UnischemaField, value: Any) -> Any:
        """Convert the value to a Python scalar."""
        return _scalar(field.numpy_dtype, value)

    def spark_dtype(self) -> spark.DataType:
        """The type of the column."""
        return self.spark_type


class _BytesCodec:
    def spark_dtype(self) -> spark.DataType:
        """The type of the column."""
        return spark.BinaryType()


class NdarrayCodec(_BytesCodec, _Pickled, ours.NdarrayCodec):
    """An array in the bytes of a .npy file."""

    __module__ = "petastorm.codecs"

    def encode(self, field: UnischemaField, value: np.ndarray) -> bytearray:
        """The file's bytes."""
        stream = io.BytesIO()
        np.save(stream, value)
        return bytearray(stream.getvalue())


class CompressedNdarrayCodec(_BytesCodec, _Pickled, ours.CompressedNdarrayCodec):
    """An array in the bytes of an .npz file."""

    __module__ = "petastorm.codecs"

    def encode(self, field: UnischemaField, value: np.ndarray) -> bytearray:
        """The file's bytes."""
        stream = io.BytesIO()
        np.savez_compressed(stream, arr=value)
        return bytearray(stream.getvalue())


class CompressedImageCodec(_BytesCodec, _Pickled, ours.CompressedImageCodec):
    """An image in the bytes of a PNG or JPEG file."""

    __module__ = "petastorm.codecs"

    def encode(self, field: UnischemaField, value: np.ndarray) -> bytearray:
        """The file's bytes."""
        stream = io.BytesIO()
        Image.fromarray(value).save(stream, self.image_codec)
        return bytearray(stream.getvalue())


class UnischemaField(ours.UnischemaField):
    """A column."""

    __module__ = "petastorm.unischema"
    __slots__ = ()

    def encode(self, value: Any) -> Any:
        """The stored value."""
        if value is None:
            return None
        if self.codec is not None:
            return self.codec.encode(self, value)
        if self.shape:
            return [_scalar(self.numpy_dtype, each) for each in value]
        return _scalar(self.numpy_dtype, value)

    def spark_dtype(self) -> spark.DataType:
        """The type of the stored column."""
        if self.codec is not None:
            return self.codec.spark_dtype()
        kind = _SPARK_TYPES[self.numpy_dtype]
        return spark.ArrayType(kind, False) if self.shape else kind


class Unischema(ours.Unischema):
    """The fields of a table."""

    __module__ = "petastorm.unischema"

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self.name, "_fields": self.fields}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.fields = state["_name"], state["_fields"]

    def as_spark_schema(self) -> spark.StructType:
        """The types of the stored columns."""
        fields = [(field.name, field.spark_dtype(), field.nullable) for field in self.fields.values()]
        return spark.StructType([spark.StructField(*field) for field in fields])


def dict_to_spark_row(schema: Unischema, row: dict[str, Any]) -> Row:
    """A row of values as a row of stored values, in the order of `as_spark_schema`."""
    return Row(**{name: field.encode(row.get(name)) for name, field in schema.fields.items()})


@contextlib.contextmanager
def materialize_dataset(_: object, dataset_url: str, schema: Unischema, *__: object, **___: object) -> Iterator[None]:
    """Add the pickled schema to the table that the body writes. Row groups have Spark's own size."""
    yield
    folder = Path(urlsplit(dataset_url).path)
    stored = pq.read_schema(next(iter(sorted(folder.rglob("*.parquet")))))
    pq.write_metadata(stored.with_metadata({_KEY: pickle.dumps(schema, protocol=2)}), folder / "_common_metadata")


def _scalar(kind: Any, value: Any) -> Any:
    if kind is Decimal:
        return Decimal(value)
    if kind is np.str_:
        return str(value)
    return value.item() if isinstance(value, np.generic) else value
