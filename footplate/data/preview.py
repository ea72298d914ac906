"""Short forms of long values: bytes become their format and size, long text and lists are cut."""

from __future__ import annotations

import struct
from typing import Any

_TEXT = 60
_ITEMS = 4


def short(value: Any) -> str:
    """Shorten a value to about sixty characters.

    >>> short([1, 2, 3, 4, 5, 6])
    '[1, 2, 3, 4, … 6 items]'
    """
    if isinstance(value, bytes):
        return _blob(value)
    if isinstance(value, (list, tuple)):
        shown = [short(item) for item in value[:_ITEMS]]
        if len(value) > _ITEMS:
            shown.append(f"… {len(value)} items")
        return _cut(f"[{', '.join(shown)}]")
    if isinstance(value, dict):
        return _cut("{" + ", ".join(f"{name}: {short(item)}" for name, item in value.items()) + "}")
    if isinstance(value, float):
        return f"{value:.6g}"
    return _cut(str(value))


def plain(value: Any) -> Any:
    """Convert a value for JSON: bytes become a description, and other types that JSON lacks become text."""
    if isinstance(value, bytes):
        return describe_bytes(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def describe_bytes(value: bytes) -> dict[str, Any]:
    """Return `{"bytes": length}`; for an image also its format, and its height and width if the header has them."""
    kind = image_kind(value)
    size = None if kind is None else image_size(value, kind)
    description: dict[str, Any] = {"bytes": len(value)}
    if kind is not None:
        description["image"] = kind
    if size is not None:
        description["height"], description["width"] = size
    return description


def image_kind(value: bytes) -> str | None:
    """Recognise the format of an encoded image by its first bytes; None if Footplate doesn't decode it."""
    from footplate.data.pipeline.images import looks_like_image

    if not looks_like_image(value):
        return None
    formats = {
        b"\xff\xd8": "JPEG",
        b"\x89P": "PNG",
        b"BM": "BMP",
        b"II": "TIFF",
        b"MM": "TIFF",
        b"GI": "GIF",
        b"RI": "WebP",
    }
    return formats[value[:2]]


def image_size(value: bytes, kind: str) -> tuple[int, int] | None:
    """Read (height, width) in pixels from an image's header; None for formats other than PNG and JPEG."""
    if kind == "PNG" and len(value) >= 24:
        width, height = struct.unpack(">II", value[16:24])
        return height, width
    if kind == "JPEG":
        import numpy as np

        from footplate.data.pipeline.images import jpeg_size

        return jpeg_size(np.frombuffer(value, np.uint8))
    return None


def _blob(value: bytes) -> str:
    description = describe_bytes(value)
    size = f"{len(value):,} bytes"
    if "image" not in description:
        return f"{size}: {value[:12].hex(' ')}{' …' if len(value) > 12 else ''}" if value else size
    pixels = f" {description['height']}×{description['width']}" if "height" in description else ""
    return f"{description['image']}{pixels}, {size}"


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
