"""Make two small Delta tables of images: 40 rows of each class of Fashion-MNIST to train on, and 500 rows to validate on.

    python data.py

Few rows are the case for a pretrained network. To use your own images, write tables with a column `image` (encoded
bytes, such as JPEG) and an integer column `label`.
"""

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from footplate.demo import TABLES


def rows_of_each_class(table: pa.Table, rows: int) -> pa.Table:
    labels = table["label"].to_pylist()
    seen = dict.fromkeys(labels, 0)
    chosen = []
    for row, label in enumerate(labels):
        if seen[label] < rows:
            seen[label] += 1
            chosen.append(row)
    return table.take(chosen)


if __name__ == "__main__":
    for part, rows in (("train", 40), ("val", 50)):
        table = rows_of_each_class(DeltaTable(TABLES / part).to_pyarrow_table(columns=["image", "label"]), rows)
        write_deltalake(f"lake/{part}", table, mode="overwrite")
        print(f"lake/{part} has {len(table):,} rows.")
