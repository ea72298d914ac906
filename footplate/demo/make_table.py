"""Make the demo's two Delta tables, `train/` and `val/`, from the original Fashion-MNIST files.

    apt-get install dataset-fashion-mnist
    python -m footplate.demo.make_table /usr/share/datasets/fashion-mnist

The originals are four gzipped IDX files: a big-endian header (a magic number whose last byte counts the dimensions,
then the length of each dimension), followed by the values as unsigned bytes. The script draws 1,200 images of each class
from the 60,000 training images, and 200 of each class from the 10,000 test images. It shuffles both, so every file and row
group has all classes. An image becomes a small greyscale PNG. The draw, the order and the pixels depend only on `SEED`.
Delta chooses the names of the Parquet files and the times in its log, which differ each time.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from footplate.core.errors import DataError
from footplate.core.optional import require
from footplate.demo import LABEL_NAMES

if TYPE_CHECKING:
    import pyarrow as pa

SEED = 20170825
"""The day Fashion-MNIST was published; any number would do."""

ROWS_PER_FILE = {"train": 3000, "val": 1000}
ROWS_PER_GROUP = 500


def read_idx(path: Path) -> np.ndarray:
    """Read the array of a gzipped IDX file of unsigned bytes.

    Raises:
        DataError: the file is missing, or isn't such a file.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. Expected the folder with the four original Fashion-MNIST files; "
            "the Debian package dataset-fashion-mnist puts them into /usr/share/datasets/fashion-mnist."
        )
    content = gzip.decompress(path.read_bytes())
    # The third byte is the type: 0x08 is unsigned bytes.
    if content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path}: not an IDX file of unsigned bytes (it begins with {content[:4].hex()}).")
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def draw(labels: np.ndarray, per_class: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the positions of `per_class` examples of every class, without repeats, and shuffle them together."""
    classes = np.unique(labels)
    chosen = [rng.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in classes]
    return rng.permutation(np.concatenate(chosen))


def encode_png(image: np.ndarray) -> bytes:
    """Encode a greyscale image (height, width) of bytes as the smallest PNG that OpenCV makes."""
    cv2 = require("cv2", "images", "Encoding images")
    flags = [cv2.IMWRITE_PNG_COMPRESSION, 9, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_FILTERED]
    return cv2.imencode(".png", image, flags)[1].tobytes()


def to_arrow(images: np.ndarray, labels: np.ndarray) -> pa.Table:
    """Make the rows of the table: image (PNG bytes), label (int32), label_name (string)."""
    import pyarrow as pa

    schema = pa.schema([("image", pa.binary()), ("label", pa.int32()), ("label_name", pa.string())])
    rows = {
        "image": [encode_png(image) for image in images],
        "label": labels.astype(np.int32),
        "label_name": [LABEL_NAMES[label] for label in labels],
    }
    return pa.table(rows, schema=schema)


def write_table(rows: pa.Table, target: Path, rows_per_file: int) -> None:
    """Write a new Delta table over any older one: a commit and a Parquet file for every `rows_per_file` rows."""
    from deltalake import ColumnProperties, WriterProperties, write_deltalake

    # PNGs are compressed already, and all of them differ, so neither compression nor a dictionary would save space.
    properties = WriterProperties(
        compression="UNCOMPRESSED",
        max_row_group_size=ROWS_PER_GROUP,
        column_properties={"image": ColumnProperties(dictionary_enabled=False, statistics_enabled="NONE")},
    )
    shutil.rmtree(target, ignore_errors=True)
    for start in range(0, rows.num_rows, rows_per_file):
        write_deltalake(target, rows.slice(start, rows_per_file), mode="append", writer_properties=properties)


def make_tables(source: Path, target: Path, per_class: dict[str, int]) -> None:
    """Write `target/train` and `target/val` from the original files in `source`.

    Args:
        source: the folder with the four `.gz` files.
        target: the folder for the two tables.
        per_class: the number of images of each class in `"train"` and `"val"`.

    Raises:
        DataError: an original is missing or isn't an IDX file.
    """
    rng = np.random.default_rng(SEED)
    for split, prefix in (("train", "train"), ("val", "t10k")):
        images = read_idx(source / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(source / f"{prefix}-labels-idx1-ubyte.gz")
        chosen = draw(labels, per_class[split], rng)
        write_table(to_arrow(images[chosen], labels[chosen]), target / split, ROWS_PER_FILE[split])


def main() -> None:
    """Make the tables that are shipped with the package."""
    parser = argparse.ArgumentParser(description="Make the demo's Delta tables from the original Fashion-MNIST files.")
    parser.add_argument("source", type=Path, help="folder with the four original .gz files")
    parser.add_argument(
        "--target", type=Path, default=Path(__file__).parent / "fashion_mnist", help="folder for the tables"
    )
    arguments = parser.parse_args()
    make_tables(arguments.source, arguments.target, {"train": 1200, "val": 200})


if __name__ == "__main__":
    main()
