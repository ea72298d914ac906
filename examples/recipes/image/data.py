"""Make two Delta tables of images: Fashion-MNIST, 12,000 rows to train on and 2,000 to validate on.

    python data.py

To use your own images, write tables with a column `image` (encoded bytes, such as JPEG) and an integer column `label`, or
name directories of image files in run.yaml. Large tables belong into object storage: s3://…, gs://….
"""

from deltalake import DeltaTable, write_deltalake

from footplate.demo import TABLES

if __name__ == "__main__":
    for part in ("train", "val"):
        rows = DeltaTable(TABLES / part).to_pyarrow_table(columns=["image", "label"])
        write_deltalake(f"lake/{part}", rows, mode="overwrite")
        print(f"lake/{part} has {len(rows):,} rows.")
