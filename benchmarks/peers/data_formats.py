"""Write the image files of DIRECTORY/folder in the peers' own formats. Run this in the peers' environments.

    python data_formats.py DIRECTORY FORMAT…

`hf` is the format into which Hugging Face datasets converts Parquet files when it opens them for the first time.
"""

import io
import sys
import tarfile
from pathlib import Path

ROWS_PER_SHARD = 1000
SEQUENCE_LENGTH = 2048


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


def documents(path):
    import pyarrow.parquet as pq

    for row in pq.read_table(path)["tokens"]:
        yield row.values.to_numpy()


def tensors(path):
    import torch

    for tokens in documents(path):
        yield torch.from_numpy(tokens.copy())


def write_litdata_tokens(directory, files):
    """All tokens one after another, which LitData's loader of tokens cuts into sequences."""
    import litdata

    paths = sorted(str(path) for path in directory.glob("parquet/*.parquet"))
    target, loader = str(directory / "litdata_tokens"), litdata.TokensLoader(block_size=SEQUENCE_LENGTH)
    litdata.optimize(
        fn=tensors,
        inputs=paths,
        output_dir=target,
        chunk_size=SEQUENCE_LENGTH * 8192,
        num_workers=1,
        item_loader=loader,
    )


def write_mds_tokens(directory, files):
    """All tokens one after another, cut into sequences, as Mosaic's own scripts write them."""
    import numpy as np
    from streaming import MDSWriter

    paths = sorted(directory.glob("parquet/*.parquet"))
    tokens = np.concatenate([tokens for path in paths for tokens in documents(path)])
    with MDSWriter(out=str(directory / "mds_tokens"), columns={"tokens": f"ndarray:int32:{SEQUENCE_LENGTH}"}) as out:
        for row in tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].reshape(-1, SEQUENCE_LENGTH):
            out.write({"tokens": row})


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
