"""Host cost of augmentation: per row in the loader, compared with augmentation on the device.

    python benchmarks/augmentation.py --json benchmarks/results/augmentation.json

The data are JPEGs (256 pixels, about 30 KB) in memory. They become shuffled batches of 64 at 224 pixels: mirrored at
random, shifted by up to 16 pixels, and scaled to float32. There are three entrants:

- *left to the device* returns uint8 as decoded.
- *row by row* augments in `transform=`, in the threads that decode.
- *batch by batch* does the device's work in torch on the same cores, to show what it costs.

Each entrant runs twice: with decoding, and with decoded images from the cache. The figures are processor time of all
threads.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from common import LESS, QUICK_ROUNDS, Figures, arguments, interleave, machine, median, ratio, report

import footplate as fp

BATCH, SIZE, SHIFT = 64, 224, 16
ROWS, ROUNDS = 2048, 5
PLACES = {"left to the device": None, "row by row": "row", "batch by batch": "batch"}


def pictures(count: int) -> pa.Table:
    """Smooth random pictures with some noise."""
    draws = np.random.default_rng(0)
    encoded = []
    for _ in range(count):
        coarse = draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        picture = cv2.resize(coarse, (256, 256), interpolation=cv2.INTER_CUBIC).astype(np.int16)
        noisy = np.clip(picture + draws.normal(0, 6, picture.shape), 0, 255).astype(np.uint8)
        encoded.append(cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return pa.table({"image": encoded, "label": list(range(count))})


def augment_row(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Augment one image: uint8 (3, H, W) to float32."""
    image = torch.as_tensor(row["image"])
    if rng.random() < 0.5:
        image = image.flip(2)
    top, left = rng.integers(0, 2 * SHIFT + 1, 2)
    image = F.pad(image, (SHIFT,) * 4)[:, top : top + SIZE, left : left + SIZE]
    return {**row, "image": image.float().div_(127.5).sub_(1.0)}


def augment_batch(image: torch.Tensor) -> torch.Tensor:
    """Augment a batch with tensor operations only, as a device would: uint8 (B, 3, H, W) to float32 (B, 3, H, W)."""
    batch, device = len(image), image.device
    mirror = torch.rand(batch, 1, 1, 1, device=device) < 0.5
    image = F.pad(torch.where(mirror, image.flip(3), image), (SHIFT,) * 4)
    shift = torch.randint(0, 2 * SHIFT + 1, (2, batch, 1, 1), device=device)
    rows = shift[0] + torch.arange(SIZE, device=device).view(1, -1, 1)
    columns = shift[1] + torch.arange(SIZE, device=device).view(1, 1, -1)
    sample = torch.arange(batch, device=device).view(-1, 1, 1)
    return image[sample, :, rows, columns].permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def epoch(table: pa.Table, where: str | None, cache: Path | None) -> Figures:
    """Run one pass. Return rows per second, processor time per row, and the part of it that would move to the device."""
    transform = augment_row if where == "row" else None
    loader = fp.Loader(fp.Table(table), BATCH, shuffle=True, image_size=SIZE, cache=cache, transform=transform)
    nbytes = rows = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in loader:
        image = augment_batch(batch["image"]) if where == "batch" else batch["image"]
        rows += len(image)
        nbytes += batch["image"].nbytes
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"rows_per_s": rows / wall, "cpu_us": 1e6 * cpu / rows, "kb_per_row": nbytes / rows / 1000}


def main() -> None:
    options = arguments("Augmentation in the loader, and on the device.")
    table, rounds = (pictures(2 * BATCH if options.quick else ROWS), QUICK_ROUNDS if options.quick else ROUNDS)
    host = machine()
    with tempfile.TemporaryDirectory() as cache_directory:
        caches = {"decoded": None, "cached": Path(cache_directory)}
        entrants = {f"{kind}, {name}": (PLACES[name], cache) for kind, cache in caches.items() for name in PLACES}
        epoch(table, None, Path(cache_directory))
        results = interleave(list(entrants), lambda name: epoch(table, *entrants[name]), rounds)
    columns = {"rows_per_s": "rows/s", "cpu_us": "processor µs a row", "kb_per_row": "KB a row to the device"}
    rows = [
        {"name": name, **{figure: median(runs, figure) for figure in columns}, "rounds": runs}
        for name, runs in results.items()
    ]
    ratios = {
        f"{kind}_row_by_row_vs_left": ratio(
            results, f"{kind}, row by row", f"{kind}, left to the device", "cpu_us", f"processor time of a row, {LESS}"
        )
        for kind in caches
    }
    packages = ("footplate", "torch", "numpy", "opencv-python-headless")
    report("augmentation", "Augmentation", columns, rows, ratios, {}, host, packages, options.json)


if __name__ == "__main__":
    main()
