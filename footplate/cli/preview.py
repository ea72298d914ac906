"""Values that are too long to show: bytes become their kind and size, long text and lists their beginning."""

from __future__ import annotations

import struct
from typing import Any

_TEXT = 60
_ITEMS = 4


def short(value: Any) -> str:
    """A value in at most about sixty characters.

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
    """A value as JSON has it: bytes as a description, what JSON doesn't know as text."""
    if isinstance(value, bytes):
        return describe_bytes(value)
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def describe_bytes(value: bytes) -> dict[str, Any]:
    """`{"bytes": length}`, for an image with its `image` format and, where its header says them, `height` and `width`."""
    kind = image_kind(value)
    size = None if kind is None else image_size(value, kind)
    found: dict[str, Any] = {"bytes": len(value)}
    if kind is not None:
        found["image"] = kind
    if size is not None:
        found["height"], found["width"] = size
    return found


def image_kind(value: bytes) -> str | None:
    """The format of an encoded image by its first bytes; None when it is none that Footplate decodes."""
    from footplate.data.pipeline.images import looks_like_image

    if not looks_like_image(value):
        return None
    known = {
        b"\xff\xd8": "JPEG",
        b"\x89P": "PNG",
        b"BM": "BMP",
        b"II": "TIFF",
        b"MM": "TIFF",
        b"GI": "GIF",
        b"RI": "WebP",
    }
    return known[value[:2]]


def image_size(value: bytes, kind: str) -> tuple[int, int] | None:
    """(height, width) in pixels from an image's header; None for formats whose header is not read here."""
    if kind == "PNG" and len(value) >= 24:
        width, height = struct.unpack(">II", value[16:24])
        return height, width
    if kind == "JPEG":
        import numpy as np

        from footplate.data.pipeline.images import jpeg_size

        return jpeg_size(np.frombuffer(value, np.uint8))
    return None


def _blob(value: bytes) -> str:
    found = describe_bytes(value)
    size = f"{len(value):,} bytes"
    if "image" not in found:
        return f"{size}: {value[:12].hex(' ')}{' …' if len(value) > 12 else ''}" if value else size
    pixels = f" {found['height']}×{found['width']}" if "height" in found else ""
    return f"{found['image']}{pixels}, {size}"


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
