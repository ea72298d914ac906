"""Petastorm's Unischema: the fields of a table, and the codecs that its columns are encoded with.

A table that `materialize_dataset` wrote is plain Parquet. Spark has no type for an array with a shape, so Petastorm keeps
such a value as bytes, and the table's Unischema says how to read them:

    Unischema("Photos", [
        UnischemaField("label", np.int32, (), ScalarCodec(IntegerType()), False),
        UnischemaField("image", np.uint8, (32, 32, 3), CompressedImageCodec("png"), False),
        UnischemaField("boxes", np.float32, (None, 4), NdarrayCodec(), False),
    ])

`UnischemaField.decode` turns a stored value into a value of the field's type and shape. The classes only read: Petastorm
and `footplate.data` write tables.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from footplate.core.errors import DataError
from footplate.core.optional import require


@dataclass(frozen=True)
class ScalarCodec:
    """A scalar, stored in a column of a Spark type.

    Examples:
        >>> import numpy as np
        >>> from footplate.compat.petastorm import ScalarCodec, UnischemaField
        >>> print(UnischemaField("label", np.int32, (), ScalarCodec()).decode(3))
        3
    """

    spark_type: Any = None

    def decode(self, field: UnischemaField, value: Any) -> Any:
        """Convert the value to the field's type."""
        return to_scalar(field.numpy_dtype, value)


@dataclass(frozen=True)
class NdarrayCodec:
    """An array, stored as the bytes of a .npy file.

    Examples:
        >>> import io
        >>> import numpy as np
        >>> from footplate.compat.petastorm import NdarrayCodec, UnischemaField
        >>> file = io.BytesIO()
        >>> np.save(file, np.zeros((2, 4), np.float32))
        >>> UnischemaField("boxes", np.float32, (None, 4), NdarrayCodec()).decode(file.getvalue()).shape
        (2, 4)
    """

    def decode(self, field: UnischemaField, value: bytes) -> np.ndarray:
        """Read the array. An array of Python objects is refused, because only pickle could read it."""
        return np.load(io.BytesIO(value), allow_pickle=False)


@dataclass(frozen=True)
class CompressedNdarrayCodec:
    """An array, stored as the bytes of a compressed .npz file under the name `arr`.

    Examples:
        >>> import io
        >>> import numpy as np
        >>> from footplate.compat.petastorm import CompressedNdarrayCodec, UnischemaField
        >>> file = io.BytesIO()
        >>> np.savez_compressed(file, arr=np.zeros((2, 4), np.float32))
        >>> UnischemaField("boxes", np.float32, (None, 4), CompressedNdarrayCodec()).decode(file.getvalue()).shape
        (2, 4)
    """

    def decode(self, field: UnischemaField, value: bytes) -> np.ndarray:
        """Read the array. An array of Python objects is refused, because only pickle could read it."""
        with np.load(io.BytesIO(value), allow_pickle=False) as arrays:
            return arrays["arr"]


@dataclass(frozen=True)
class CompressedImageCodec:
    """A grey image (height, width) or RGB image (height, width, 3), stored as the bytes of a PNG or JPEG file.

    Examples:
        >>> import io
        >>> import numpy as np
        >>> from PIL import Image
        >>> from footplate.compat.petastorm import CompressedImageCodec, UnischemaField
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (8, 4)).save(file, "png")
        >>> UnischemaField("image", np.uint8, (4, 8, 3), CompressedImageCodec("png")).decode(file.getvalue()).shape
        (4, 8, 3)
    """

    image_codec: str = "png"
    quality: int = 80

    def decode(self, field: UnischemaField, value: bytes) -> np.ndarray:
        """Read the pixels. Pillow reads 16 bits for each pixel of grey images only."""
        image = require("PIL.Image", "images", "CompressedImageCodec").open(io.BytesIO(value))
        pixels = np.asarray(image)
        return pixels.astype(np.uint16) if image.mode.startswith("I") else pixels


class UnischemaField(NamedTuple):
    """A column of a Unischema.

    Attributes:
        name: the column's name.
        numpy_dtype: the type of a value: a numpy type, or Decimal.
        shape: the shape of a value: () for a scalar, None for a dimension of any size.
        codec: reads a stored value; None for a value that Parquet has a type for.
        nullable: True if a value may be None.

    Examples:
        >>> import numpy as np
        >>> from footplate.compat.petastorm import UnischemaField
        >>> UnischemaField("size", np.float32, (2,)).decode([1.5, 2.5])
        array([1.5, 2.5], dtype=float32)
    """

    name: str
    numpy_dtype: Any
    shape: tuple[int | None, ...] = ()
    codec: Any = None
    nullable: bool = False

    def decode(self, value: Any) -> Any:
        """Decode a stored value to the field's type and shape; None stays None.

        Raises:
            DataError: the codec can't read the bytes, or the value has another type or shape.
        """
        if value is None:
            return None
        try:
            decoded = self._decoded(value)
        except Exception as error:
            codec = type(self.codec).__name__ if self.codec is not None else f"a value of {self.numpy_dtype}"
            raise DataError(f"Column {self.name!r}: a value can't be read as {codec} ({error}).") from error
        self._check(decoded)
        return decoded

    def _decoded(self, value: Any) -> Any:
        if self.codec is not None:
            return self.codec.decode(self, value)
        if self.shape:
            return np.asarray(value, self.numpy_dtype)
        return to_scalar(self.numpy_dtype, value)

    def _check(self, decoded: Any) -> None:
        if not self.shape:
            return
        sizes = zip(decoded.shape, self.shape, strict=False)
        fits = len(decoded.shape) == len(self.shape) and all(size in (None, actual) for actual, size in sizes)

        # The length of text is part of a numpy type, and differs between values.
        wanted = np.dtype(self.numpy_dtype)
        same = decoded.dtype.kind == wanted.kind if wanted.kind in "SU" else decoded.dtype == wanted
        if not (fits and same):
            raise DataError(
                f"Column {self.name!r}: a value is {decoded.dtype} {decoded.shape}, and its field says "
                f"{wanted} {self.shape}."
            )


class Unischema:
    """The fields of a table, by name and as attributes: `schema.image`.

    Args:
        name: the schema's name.
        fields: the columns.

    Examples:
        >>> import numpy as np
        >>> from footplate.compat.petastorm import ScalarCodec, Unischema, UnischemaField
        >>> schema = Unischema("Flowers", [UnischemaField("label", np.int32, (), ScalarCodec())])
        >>> print(schema.label.decode(3))
        3
    """

    def __init__(self, name: str, fields: Iterable[UnischemaField]) -> None:
        self.name = name
        self.fields = {field.name: field for field in sorted(fields, key=lambda field: field.name)}

    def __getattr__(self, name: str) -> UnischemaField:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        return f"Unischema({self.name!r}, {list(self.fields.values())})"


def to_scalar(kind: Any, value: Any) -> Any:
    """Convert a stored scalar, or its text, to a numpy scalar or a Decimal."""
    if kind is Decimal:
        return Decimal(str(value))
    kind = np.dtype(kind).type
    if issubclass(kind, np.bool_):
        return np.bool_(int(value))
    if issubclass(kind, np.bytes_) and isinstance(value, str):
        return np.bytes_(value.encode())
    return kind(value)
