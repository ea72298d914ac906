"""Write the image files of DIRECTORY/folder in the peers' own formats. Run this in the peers' environments.

    python data_formats.py DIRECTORY FORMAT…

`hf` is the format into which Hugging Face datasets converts Parquet files when it opens them for the first time.
"""

import io
import sys
import tarfile
from pathlib import Path

ROWS_PER_SHARD = 1000


def row(file):
    path = Path(file)
    return {"jpg": path.read_bytes(), "label": int(path.parent.name)}


def write_webdataset(directory, files):
    (directory / "webdataset").mkdir()
    for start in range(0, len(files), ROWS_PER_SHARD):
        with tarfile.open(directory / "webdataset" / f"{start:08}.tar", "w") as tar:
            for file in files[start : start + ROWS_PER_SHARD]:
                for ending, data in ((".jpg", row(file)["jpg"]), (".cls", Path(file).parent.name.encode())):
                    entry = tarfile.TarInfo(Path(file).stem + ending)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))


def write_mds(directory, files):
    from streaming import MDSWriter

    with MDSWriter(out=str(directory / "mds"), columns={"jpg": "bytes", "label": "int"}) as out:
        for file in files:
            out.write(row(file))


def write_litdata(directory, files):
    import litdata

    litdata.optimize(fn=row, inputs=files, output_dir=str(directory / "litdata"), chunk_bytes="64MB", num_workers=1)


def write_hf(directory, files):
    import datasets

    parquet = sorted(str(path) for path in directory.glob("*/*.parquet"))
    datasets.load_dataset("parquet", data_files=parquet, split="train", cache_dir=str(directory / "hf"))


def write_lance(directory, files):
    import lance
    import pyarrow.dataset as ds

    parquet = sorted(str(path) for path in directory.glob("*/*.parquet"))
    lance.write_dataset(ds.dataset(parquet).scanner(batch_size=ROWS_PER_SHARD).to_reader(), str(directory / "lance"))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    files = sorted((str(path) for path in root.glob("folder/*/*.jpg")), key=lambda file: Path(file).name)
    for name in sys.argv[2:]:
        if not (root / name).exists():
            globals()[f"write_{name}"](root, files)
