"""Image decoding with OpenCV: bytes become uint8, scaled to cover a size, cropped to its centre, laid out as NCHW.

OpenCV releases Python's lock while it decodes and scales, so threads use all cores. A batch is decoded straight into the
memory that the consumer gets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from footplate.core.errors import ConfigError, DataError
from footplate.core.optional import require

ImageMode = Literal["auto", "L", "RGB", "bytes"]

_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"II*\x00", b"MM\x00*", b"GIF8")
_LARGE_JPEG_BYTES = 48 * 1024
_HEADER_BYTES = 64 * 1024


class BadImage(Exception):
    """An image that can't be decoded. The message is the reason. The caller knows which row it is."""


@dataclass(frozen=True)
class ImageFormat:
    """The format that every image of a column is converted to.

    Attributes:
        channels: 1 (grey) or 3 (red, green, blue).
        size: (height, width), or None to leave them as they are.
    """

    channels: int
    size: tuple[int, int] | None


def looks_like_image(value: bytes) -> bool:
    """Return True if bytes begin as a JPEG, PNG, WebP, BMP, TIFF or GIF file does."""
    return value.startswith(_SIGNATURES) or (value[:4] == b"RIFF" and value[8:12] == b"WEBP")


def parse_size(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Return the (height, width) of `image_size=224` or `image_size=(192, 256)`.

    Raises:
        ConfigError: not one or two positive integers.
    """
    if image_size is None:
        return None
    sizes = [image_size, image_size] if isinstance(image_size, int) else list(image_size)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"image_size={image_size!r}: expected a number of pixels, or (height, width).")
    return sizes[0], sizes[1]


def choose_format(example: np.ndarray, mode: ImageMode, size: tuple[int, int] | None) -> ImageFormat:
    """Choose the format of a column. `mode="auto"` takes the channels of an example: a grey image keeps one channel.

    Raises:
        BadImage: the example can't be decoded.
    """
    if mode != "auto":
        return ImageFormat(1 if mode == "L" else 3, size)
    cv2 = _cv2()
    image = cv2.imdecode(example, cv2.IMREAD_UNCHANGED)
    if image is None:
        raise BadImage("it is damaged or of an unknown format")
    return ImageFormat(1 if image.ndim == 2 else 3, size)


def decode(data: np.ndarray | None, format: ImageFormat) -> np.ndarray:
    """Decode one image: uint8, (height, width) if grey, else (height, width, 3) in OpenCV's order blue, green, red.

    Raises:
        BadImage: null, damaged, or of an unknown format.
    """
    cv2 = _cv2()
    if data is None or not len(data):
        raise BadImage("it is null or empty")
    image = cv2.imdecode(data, _flag(data, format))
    if image is None:
        raise BadImage("it is damaged or of an unknown format")
    return image if format.size is None else cover(image, format.size)


def _flag(data: np.ndarray, format: ImageFormat) -> int:
    """Choose OpenCV's flag. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size, which is cheaper, if that still covers."""
    cv2 = _cv2()
    grey = format.channels == 1
    if format.size is not None and len(data) >= _LARGE_JPEG_BYTES:
        shorter = min(jpeg_size(data) or (0, 0))
        times = shorter // max(format.size)
        if times >= 8:
            return cv2.IMREAD_REDUCED_GRAYSCALE_8 if grey else cv2.IMREAD_REDUCED_COLOR_8
        if times >= 4:
            return cv2.IMREAD_REDUCED_GRAYSCALE_4 if grey else cv2.IMREAD_REDUCED_COLOR_4
        if times >= 2:
            return cv2.IMREAD_REDUCED_GRAYSCALE_2 if grey else cv2.IMREAD_REDUCED_COLOR_2
    return cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR


def decoder_version() -> str:
    """Name and version of the decoder. Another version may give other pixels for the same bytes."""
    return f"OpenCV {_cv2().__version__}"


def jpeg_size(data: np.ndarray) -> tuple[int, int] | None:
    """Read (height, width) from the header of a JPEG; None if the bytes are something else."""
    head = data[:_HEADER_BYTES].tobytes()
    if head[:2] != b"\xff\xd8":
        return None
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        is_frame_header = 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)
        if is_frame_header:
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return height, width
        at += 2 + struct.unpack(">H", head[at + 2 : at + 4])[0]
    return None


def cover(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scale an image so that it just covers (height, width), and crop the centre."""
    height, width = image.shape[:2]
    if (height, width) == size:
        return image
    cv2 = _cv2()
    scale = max(size[0] / height, size[1] / width)
    scaled = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    if scaled != (height, width):
        shrinks_much = min(height, width) >= 2 * min(scaled)
        image = cv2.resize(
            image, (scaled[1], scaled[0]), interpolation=cv2.INTER_AREA if shrinks_much else cv2.INTER_LINEAR
        )
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    return image[top : top + size[0], left : left + size[1]]


def write_planes(image: np.ndarray, out: np.ndarray) -> None:
    """Write an image into `out` as (channels, height, width), red first."""
    if out.shape[0] == 1:
        out[0] = image
    else:
        _cv2().split(image, [out[2], out[1], out[0]])


def decode_into(rows: Sequence[np.ndarray | None], format: ImageFormat, out: np.ndarray) -> list[tuple[int, str]]:
    """Decode rows into `out`, (rows, channels, height, width). Return (row, reason) for rows that can't be decoded.

    Raises:
        DataError: images of different sizes, and no `image_size`.
    """
    bad = []
    for number, data in enumerate(rows):
        try:
            image = decode(data, format)
        except BadImage as error:
            bad.append((number, str(error)))
            continue
        if image.shape[:2] != out.shape[2:]:
            raise DataError(
                f"Images differ in size ({_pixels(image.shape)} and {_pixels(out.shape[2:])}), so they can't be "
                "stacked into a batch: pass image_size=."
            )
        write_planes(image, out[number])
    return bad


def _pixels(shape: Sequence[int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _cv2() -> Any:
    global _module
    if _module is None:
        _module = require("cv2", "images", "Decoding images")
        # OpenCV logs corrupt images itself, without file and row. Ours are errors that name both, so this silences
        # OpenCV. Its versions 4 and 5 have the function in different places.
        set_level = getattr(_module, "setLogLevel", None) or _module.utils.logging.setLogLevel
        silent = 0
        set_level(silent)
    return _module


_module: Any = None
