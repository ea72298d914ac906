"""Encoded images of a table's column as small pictures inside the page.

Only formats that browsers draw, and that hold no scripts, are embedded: PNG, JPEG, GIF, WebP, BMP. A large image becomes a
small JPEG, if OpenCV is installed. Otherwise the page says that it is too large.
"""

from __future__ import annotations

import base64
import importlib.util
from typing import Any

from footplate.data.pipeline.images import looks_like_image

LARGEST = 24_000
SIDE = 192
_TYPES = {b"\x89P": "png", b"\xff\xd8": "jpeg", b"GI": "gif", b"RI": "webp", b"BM": "bmp"}


def is_picture(value: Any) -> bool:
    """Return True if a value is an encoded image."""
    return isinstance(value, bytes) and looks_like_image(value)


def data_uri(value: bytes) -> str | None:
    """Return an encoded image as a `data:` URI; None if it can't be shown in a small space."""
    kind = _TYPES.get(value[:2])
    if kind is None or len(value) > LARGEST:
        value, kind = _shrunk(value), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(value).decode()}" if value else None


def _shrunk(value: bytes) -> bytes:
    """Return a small JPEG of an image; empty if it can't be decoded here."""
    if importlib.util.find_spec("cv2") is None:
        return b""
    import cv2
    import numpy as np

    try:
        image = cv2.imdecode(np.frombuffer(value, np.uint8), cv2.IMREAD_COLOR)
        if image is None:
            return b""
        factor = min(1.0, SIDE / max(image.shape[:2]))
        size = (max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor)))
        done, encoded = cv2.imencode(".jpg", cv2.resize(image, size, interpolation=cv2.INTER_AREA))
    except cv2.error:
        return b""
    return encoded.tobytes() if done else b""
