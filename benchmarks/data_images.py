"""Images from a table to shuffled uint8 batches: Footplate, its peers, and the limit that decoding sets.

    bash benchmarks/peers/data.sh && python benchmarks/data_images.py --json benchmarks/results/data_images.json

JPEGs of about 30 KB (a thousand different synthetic ones, in as many rows as asked for), batches of 64, 224 pixels, two
threads or worker processes each. The limit is OpenCV decoding the same bytes from memory on all cores.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
from data_common import HERE, Entrant, best, how_long, once, parse, ratio, report, run, with_data
from deltalake import write_deltalake

BATCH = 64
ROWS_PER_FILE = 1000

PEERS = [
    Entrant("torch DataLoader, files", "image_torch_imagefolder"),
    Entrant("webdataset", "image_webdataset", "data"),
    Entrant("litdata", "image_litdata", "data"),
    Entrant("mosaicml-streaming", "image_mosaicml", "data"),
    Entrant("hf datasets, map", "image_hf_datasets", "data"),
]
PETASTORM = Entrant("petastorm", "image_petastorm", "petastorm", workers=10)
FOOTPLATE = Entrant("footplate", "image_footplate")
CACHED = Entrant("footplate, cached epoch", "image_footplate_cached")
LIMIT = Entrant("limit: decode only", "image_limit")


def photo(rng: np.random.Generator) -> bytes:
    """Noise of several scales, about as heavy as a real photograph of this size."""
    height, width = (int(size) for size in rng.integers(224, 300, 2))
    image = np.full((height, width, 3), 128.0, np.float32)
    for cells, strength in ((8, 90), (24, 60), (70, 40), (150, 20)):
        noise = rng.normal(0, strength, (cells, cells, 3)).astype(np.float32)
        image += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(".jpg", np.clip(image, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 85])[1].tobytes()


def make(directory: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    photos = [photo(rng) for _ in range(min(rows, 1000))]
    for label in range(10):
        (directory / "folder" / str(label)).mkdir(parents=True)
    for number in range(rows):
        (directory / "folder" / str(number % 10) / f"{number:08}.jpg").write_bytes(photos[number % len(photos)])
    for start in range(0, rows, ROWS_PER_FILE):
        numbers = range(start, min(start + ROWS_PER_FILE, rows))
        images = pa.array([photos[number % len(photos)] for number in numbers], pa.binary())
        labels = pa.array([number % 10 for number in numbers], pa.int32())
        write_deltalake(directory / "delta", pa.table({"image": images, "label": labels}), mode="append")
    peers = Entrant("formats", "", "data")
    if peers.there():
        subprocess.run([peers.python, str(HERE / "peers" / "data_formats.py"), str(directory)], check=True)


def main() -> None:
    options = parse(__doc__ or "")
    rows = options.rows or (2000 if options.quick else 60_000)
    rounds, seconds = how_long(options)

    def body(directory: Path) -> None:
        once(CACHED, directory, BATCH)
        found = run([LIMIT, FOOTPLATE, CACHED, *PEERS, PETASTORM], directory, BATCH, rounds, seconds)
        peers = [peer.name for peer in PEERS]
        ratios = {"footplate_vs_limit": ratio(found, FOOTPLATE.name, LIMIT.name, "steady")}
        fastest = best(found, peers, "steady")
        if fastest:
            ratios["footplate_vs_best_peer"] = ratio(found, FOOTPLATE.name, fastest, "steady")
            ratios["cached_vs_best_peer"] = ratio(found, CACHED.name, fastest, "steady")
        for name, figure, least in (
            ("whole_epoch_vs_best_peer", "whole", False),
            ("first_batch_vs_best_peer", "first_batch_s", True),
            ("memory_vs_best_peer", "peak_mb", True),
        ):
            peer = best(found, peers, figure, least)
            if peer:
                ratios[name] = ratio(found, FOOTPLATE.name, peer, figure)
        if PETASTORM.name in found:
            ratios["footplate_vs_petastorm"] = ratio(found, FOOTPLATE.name, PETASTORM.name, "whole")
        report("data_images", found, ratios, options.json)

    with_data(options.data, lambda directory: make(directory, rows), body)


if __name__ == "__main__":
    main()
