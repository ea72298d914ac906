"""A step that exhausts a GPU's memory: its error says what the memory held, and the batch that it names fits."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import footplate as fp

LIMIT = 4 * 2**30
WIDTH, ROWS = 1024, 1 << 16


class Wide(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        block = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.net = nn.Sequential(*block, *(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Let this process have 4 GiB of the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_batch_that_the_error_names_fits(make_trainer):
    settings = {"max_steps": 3, "enable_checkpointing": False, "deterministic": False}
    with pytest.raises(torch.OutOfMemoryError) as found:
        make_trainer(**settings).fit(Wide(), [torch.randn(4 * ROWS, WIDTH)] * 6)
    note = found.value.__notes__[0]
    del found
    print(note)
    assert f"the batch ({4 * ROWS} rows)" in note
    sizes = re.search(r"batch_size=(\d+) with accumulate_grad_batches=(\d+)", note)
    assert sizes is not None
    rows, parts = map(int, sizes.groups())
    assert rows * parts == 4 * ROWS

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    make_trainer(**settings, accumulate_grad_batches=parts).fit(Wide(), [torch.randn(rows, WIDTH)] * (3 * parts))
    estimated = re.search(r"needs about ([\d.]+) GiB", note)
    assert estimated is not None
    measured = torch.cuda.max_memory_allocated()
    print(f"{measured / 2**30:.2f} GiB at {rows} rows")
    assert measured < LIMIT
    # Weights, gradients and the two numbers of AdamW don't grow with the rows.
    state = 4 * sum(parameter.nbytes for parameter in Wide().parameters())
    assert (measured - state) * parts + state == pytest.approx(float(estimated.group(1)) * 2**30, rel=0.15)
