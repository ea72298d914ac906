"""Images from a table to shuffled uint8 batches: Footplate, its peers, and the limit set by decoding.

    bash benchmarks/peers/data.sh && python benchmarks/data_images.py --json benchmarks/results/data_images.json

Both kinds of data are made from real photographs (`peers/pictures.py`): JPEGs of 20 to 40 KB, and photos of 1 to 2
megapixels. Batches have 64 images of 224 pixels. Each entrant has two threads or worker processes. All decode with
Footplate's function, except `petastorm, Pillow`, which is written as its users write it. The limit is the decoding function
on all cores, from memory. The files of all other entrants are in the page cache when their turn begins. To run this
benchmark in parts, see `data_common.py`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import common
import data_common
import pyarrow as pa
from data_common import Entrant
from deltalake import write_deltalake

BATCH = 64
ROWS = {"small": 40_000, "photos": 3_000}
ROWS_PER_FILE = {"small": 1000, "photos": 100}  # a file is a row group: 30 to 40 MB

FOOTPLATE = Entrant("footplate", "image_footplate", reads="delta")
CACHED = Entrant("footplate, cached", "image_footplate_cached", reads="cache")
LIMIT = Entrant("limit: decode only", "image_limit")
PEERS = [
    Entrant("torch DataLoader, files", "image_torch_imagefolder", reads="folder"),
    Entrant("webdataset", "image_webdataset", "data", reads="webdataset"),
    Entrant("litdata", "image_litdata", "data", reads="litdata"),
    Entrant("mosaicml-streaming", "image_mosaicml", "data", reads="mds"),
    Entrant("hf datasets, map", "image_hf_map", "data", reads="hf"),
    Entrant("hf datasets, streaming", "image_hf_streaming", "data", reads="delta"),
    Entrant("lance", "image_lance", "lake", reads="lance"),
    Entrant("ray data", "image_ray", "lake", reads="delta"),
    Entrant("daft", "image_daft", "lake", reads="delta", streams=False),  # its shuffle() sorts decoded rows
]
AS_WRITTEN = Entrant("petastorm, Pillow", "image_petastorm_pillow", "petastorm", workers=10, reads="delta")
SAME_DECODER = Entrant("petastorm", "image_petastorm", "petastorm", workers=2, reads="delta")
PETASTORM = [
    AS_WRITTEN,
    SAME_DECODER,
    Entrant("petastorm, batched", "image_petastorm_batched", "petastorm", workers=2, reads="delta"),
]
FORMATS = {"webdataset": "data", "mds": "data", "litdata": "data", "hf": "data", "lance": "lake"}


def make(directory: Path, kind: str, rows: int) -> None:
    """Make the data set in every format."""
    pictures = [str(data_common.HERE / "peers" / "pictures.py"), str(directory), kind, str(rows)]
    subprocess.run([Entrant("", "", "data").python, *pictures], check=True)
    write_tables(directory, kind)


def write_tables(directory: Path, kind: str) -> None:
    """Write the picture files as a Delta table, and in the peers' table formats."""
    files = sorted(directory.glob("folder/*/*.jpg"), key=lambda file: file.name)
    for start in range(0, len(files), ROWS_PER_FILE[kind]):
        some = files[start : start + ROWS_PER_FILE[kind]]
        images = pa.array([file.read_bytes() for file in some], pa.binary())
        labels = pa.array([int(file.parent.name) for file in some], pa.int32())
        write_deltalake(directory / "delta", pa.table({"image": images, "label": labels}), mode="append")
    data_common.peers_formats(directory, FORMATS)
    (directory / "complete").touch()


def main() -> None:
    options = data_common.parse(__doc__ or "", list(ROWS))
    machine = common.machine()
    results = data_common.earlier(options.json, options.add)
    with data_common.data_directory(options.data) as root:
        for kind in options.kinds:
            rows = options.rows or (ROWS[kind] // 20 if options.quick else ROWS[kind])
            directory = data_common.data_set(root / kind, make, kind, rows)
            data_common.once(CACHED, directory, BATCH)  # fill the cache
            entrants = [LIMIT, FOOTPLATE, CACHED, *PEERS, *PETASTORM]
            results[kind] = data_common.continued(results.get(kind, {}), entrants, directory, BATCH, options)
    ratios = {}
    for kind, rounds in results.items():
        prefix = "" if kind == "small" else f"{kind}_"
        ours = FOOTPLATE.name
        ratios[f"{prefix}footplate_vs_limit"] = data_common.paired(rounds, ours, LIMIT.name, "steady")
        for name, peer in (
            ("footplate_vs_petastorm", AS_WRITTEN),
            ("footplate_vs_petastorm_same_decoder", SAME_DECODER),
        ):
            ratios[prefix + name] = data_common.paired(rounds, ours, peer.name, "whole")
        for name, one, figure, least in (
            ("footplate_vs_best_peer", ours, "steady", False),
            ("whole_epoch_vs_best_peer", ours, "whole", False),
            ("cached_vs_best_peer", CACHED.name, "steady", False),
            ("first_batch_vs_best_peer", ours, "first_batch_s", True),
            ("memory_vs_best_peer", ours, "peak_mb", True),
        ):
            peer = data_common.best(rounds, PEERS, figure, least)
            ratios[prefix + name] = data_common.paired(rounds, one, peer, figure)
    data_common.report("data_images", "images to batches", results, ratios, machine, options.json)


if __name__ == "__main__":
    main()
