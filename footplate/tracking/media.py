"""Values that aren't floats: images, histograms, texts, figures and tables, as files that every logger can store.

| kind | file | content |
| --- | --- | --- |
| image | `.png` | 8 bits for each of 1, 3 or 4 channels |
| figure | `.png` | a Matplotlib figure, as `savefig` draws it |
| histogram | `.json` | `counts`, and `edges`: one more than counts |
| text | `.txt` | UTF-8 |
| table | `.json` | `columns` and `data`, a list of rows |

The conversion happens in the call, because the value may change afterwards. So it reads from the device: log such
values now and then, not at each step.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from footplate.tracking.parameters import plain

Kind = Literal["image", "histogram", "text", "figure", "table"]

EXTENSIONS: dict[Kind, str] = {
    "image": "png", "histogram": "json", "text": "txt", "figure": "png", "table": "json",
}  # fmt: skip
BINS = 64
LONGEST_NAME = 100


@dataclass(frozen=True)
class Media:
    """A value that isn't a float.

    Attributes:
        kind: its kind; see the module's docstring.
        key: its name.
        data: the bytes of its file.
        caption: a text that is shown with it.
        index: its place among the images of one call.
    """

    kind: Kind
    key: str
    data: bytes
    caption: str | None = None
    index: int = 0

    def file_name(self, step: int) -> str:
        """Return a name for its file, without a folder."""
        number = f"-{self.index}" if self.index else ""
        return f"{step}{number}.{EXTENSIONS[self.kind]}"

    def path(self, step: int) -> str:
        """Return a relative path for its file, for a logger that keeps all files."""
        key = re.sub(r"[^\w\-.]+", "_", self.key).strip(".")[:LONGEST_NAME] or "_"
        return f"{self.kind}/{key}/{self.file_name(step)}"

    def parsed(self) -> Any:
        """Return the object of a JSON file, or the text of a text file."""
        text = self.data.decode()
        return json.loads(text) if EXTENSIONS[self.kind] == "json" else text


def images(key: str, values: Any, captions: Sequence[str] | None) -> list[Media]:
    """Convert images.

    Args:
        key: their name.
        values: an image, or a list of images. A tensor has the shape (C, H, W) or (H, W); an array (H, W, C) or (H, W).
            There are 1, 3 or 4 channels. Floats are from 0 to 1; integers from 0 to 255. A PIL image is an array.
        captions: a caption for each image.

    Raises:
        ValueError: a shape or a number of captions that doesn't fit.
    """
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    if captions is not None and len(captions) != len(values):
        raise ValueError(f"{len(captions)} captions for {len(values)} images")
    return [
        Media("image", key, _png(_pixels(value)), captions[index] if captions else None, index)
        for index, value in enumerate(values)
    ]


def histogram(key: str, values: Any) -> Media:
    """Count finite values in equal bins between the least and the greatest."""
    numbers = _array(values).astype(np.float64).ravel()
    counts, edges = np.histogram(numbers[np.isfinite(numbers)], bins=BINS)
    return Media("histogram", key, json.dumps({"counts": counts.tolist(), "edges": edges.tolist()}).encode())


def text(key: str, value: str) -> Media:
    """Convert a text."""
    return Media("text", key, str(value).encode())


def figure(key: str, value: Any) -> Media:
    """Draw a Matplotlib figure.

    Raises:
        ValueError: an object that has no `savefig`.
    """
    if not hasattr(value, "savefig"):
        raise ValueError(f"expected a Matplotlib figure, got {type(value).__name__}")
    file = io.BytesIO()
    value.savefig(file, format="png")
    return Media("figure", key, file.getvalue())


def table(key: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Media:
    """Convert a table.

    Raises:
        ValueError: a row of another length than `columns`.
    """
    columns = [str(column) for column in columns]
    cells = [[_cell(value) for value in row] for row in rows]
    for number, row in enumerate(cells):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} values for {len(columns)} columns")
    return Media("table", key, json.dumps({"columns": columns, "data": cells}).encode())


def _cell(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    # JSON has no form for them.
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else plain(value)


def _array(value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return np.asarray(value)


def _pixels(value: Any) -> np.ndarray[Any, Any]:
    """Return an image as (H, W, C) bytes."""
    array = _array(value)
    # A tensor has its channels first, as in torchvision.
    if hasattr(value, "detach") and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise ValueError(f"expected an image with 1, 3 or 4 channels, got shape {tuple(np.shape(value))}")

    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.floating):
        array = np.nan_to_num(array) * 255
    return np.clip(np.round(array), 0, 255).astype(np.uint8)


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Encode (H, W, C) bytes as a PNG file."""
    height, width, channels = pixels.shape
    colour_type = {1: 0, 3: 2, 4: 6}[channels]
    # Each line begins with the number of its filter: 0, none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
