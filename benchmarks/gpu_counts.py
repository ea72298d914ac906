"""Calculations of `gpu_train.py` beside the training: the rates of the GPU, operations, predicted memory, and the table.

Each runs in a process of its own. What fails there is named in the report, and doesn't stop the benchmark.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_variants import Model, loss_of, module

FILES = 8  # of the table; each has the same pictures


def measure_card(accelerator: str, quick: bool) -> dict[str, Any]:
    """Measure the rate of matrix products in bfloat16, and the bandwidth of copies from device to device."""

    def median_s(function: Callable[[], Any], calls: int) -> float:
        """Return the median time of a call, over ten rounds."""
        times = []
        for round_number in range(-3, 10):
            _synchronize(accelerator)
            begun = time.perf_counter()
            for _ in range(calls):
                function()
            _synchronize(accelerator)
            if round_number >= 0:
                times.append((time.perf_counter() - begun) / calls)
        return statistics.median(times)

    size, nbytes = (256, 2**20) if quick else (8192, 4 * 2**30)
    a, b = (torch.randn(size, size, device=accelerator, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    rate = 2 * size**3 / median_s(lambda: torch.mm(a, b, out=product), 5)
    source = torch.randint(0, 256, (nbytes,), device=accelerator, dtype=torch.uint8)
    target = torch.empty_like(source)
    bandwidth = 2 * nbytes / median_s(lambda: target.copy_(source), 2)
    card = {"matmul_tflops": rate / 1e12, "copy_gb_per_s": bandwidth / 1e9, "torch_cuda": torch.version.cuda}
    if accelerator == "cuda":
        from footplate.hardware.cuda import CUDA

        peak = CUDA().peak_flops_per_s(torch.device("cuda", 0), "bf16-mixed")
        about = torch.cuda.get_device_properties(0)
        card |= {"gpu": about.name, "gpu_memory_gb": about.total_memory / 2**30, "peak_tflops": peak and peak / 1e12}
    return card


def _synchronize(accelerator: str) -> None:
    if accelerator == "cuda":
        torch.cuda.synchronize()


def count_flops(model: Model, accelerator: str) -> float:
    """Count the floating-point operations of a forward and backward pass. They are proportional to the rows."""
    from torch.utils.flop_counter import FlopCounterMode

    rows = 2
    net = model.network(accelerator)
    ((x, y),) = replace(model, rows=rows).batches(accelerator, 1)
    with FlopCounterMode(display=False) as counter:
        with model.autocast(accelerator):
            loss = loss_of(net(x), y)
        loss.backward()
    return counter.get_total_flops() * model.rows / rows


def predict_memory(model: Model, gpu: str) -> int | None:
    """Return the peak of the memory that a plan predicts for a GPU, in bytes."""
    import footplate as fp

    batch = model.batches("cpu", 1)[0]
    planned = module(fp.Module, model.network("cpu"), "cpu")
    precision = "32" if model.precision == "32-true" else "bf16"
    return fp.plan(planned, batch, on=[gpu], precision=precision).choices[0].memory.peak


def make_table(directory: str, pictures: int) -> int:
    """Write a Parquet table of JPEGs of 256 pixels, smooth with some noise. Return the bytes of a picture.

    Making a picture takes longer than decoding it. So a number of pictures is made, and written to several files.
    """
    import cv2
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(pictures):
        smooth = cv2.resize(
            rng.integers(0, 256, (12, 12, 3), dtype=np.uint8), (256, 256), interpolation=cv2.INTER_CUBIC
        )
        noisy = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        encoded.append(cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    table = pa.table({"image": pa.array(encoded, pa.binary()), "label": rng.integers(0, 1000, pictures)})
    Path(directory).mkdir()
    for number in range(FILES):
        pq.write_table(table, Path(directory) / f"{number}.parquet", row_group_size=500, compression="none")
    return sum(map(len, encoded)) // pictures
