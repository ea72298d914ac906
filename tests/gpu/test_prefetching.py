"""Batches that are copied to a GPU before their step: concurrently, in time, and into memory that no kernel still reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
import torch
from models.small import Classifier, loader
from training.test_prefetching import LOADERS, SETTINGS, fit

import footplate as fp
from footplate.data import Loader, Prefetcher, Table
from footplate.hardware.cuda import CUDA
from footplate.hardware.transfer import to_device

DEVICE = torch.device("cuda", 0)


class AtTheStep(CUDA):
    batches_ahead = 0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("source", LOADERS)
def test_losses_and_weights_are_bit_for_bit_those_of_copies_at_the_step(source, setting, make_trainer, tmp_path):
    data, settings = LOADERS[source], SETTINGS[setting]
    seen, weights, _ = fit(make_trainer, tmp_path / "at the step", data(), AtTheStep(), **settings)
    ahead, weights_ahead, made = fit(make_trainer, tmp_path / "ahead", data(), CUDA(), **settings)
    assert ahead == seen
    assert all(torch.equal(value, weights_ahead[name]) for name, value in weights.items())
    assert made.run.loop.source is not made.run.loop.loader


def spin(seconds: float) -> None:
    """Keep the GPU busy. The host goes on."""
    torch.cuda._sleep(int(seconds * cycles_per_second()))


def cycles_per_second() -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    torch.cuda._sleep(100_000_000)
    after.record()
    after.synchronize()
    return 100_000_000 / (before.elapsed_time(after) / 1000)


@dataclass
class Held:
    """A batch that holds its tensor as a field."""

    numbers: Any


class Opaque:
    """Moves itself, and can't be told which stream uses its memory."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def to(self, device: torch.device, non_blocking: bool = False) -> Opaque:
        return Opaque(self.numbers.to(device, non_blocking=non_blocking))


@pytest.mark.parametrize("kind", [lambda numbers: numbers, Held, Opaque], ids=["tensor", "dataclass", "opaque"])
@pytest.mark.parametrize("pinned", [True, False])
def test_no_batch_is_written_over_while_the_gpu_still_reads_it(kind, pinned):
    """The host drops each batch long before the GPU reads it."""

    def source() -> Iterator[Any]:
        for number in range(40):
            yield kind(torch.full((1 << 22,), number, dtype=torch.int32, pin_memory=pinned))

    sums = []
    for batch in Prefetcher(source(), lambda batch: to_device(batch, DEVICE), DEVICE):
        spin(0.005)
        numbers = getattr(batch, "numbers", batch)
        sums.append(numbers.sum())
        del batch, numbers
    assert [int(total) for total in sums] == [number << 22 for number in range(40)]


def test_all_tensors_of_a_batch_are_page_locked_lists_too():
    table = pa.table({"number": [1, 2, 3], "tokens": [[1, 2], [], [3]]})
    (batch,) = Loader(Table(table), 3, pin_memory=True)
    assert sorted(batch) == ["number", "tokens", "tokens_length"]
    assert all(value.is_pinned() for value in batch.values())


@pytest.mark.alone
def test_copies_go_on_beside_the_work():
    batches = [torch.ones(1 << 26, dtype=torch.uint8, pin_memory=True) for _ in range(30)]

    def timed(ahead: bool, work_s: float) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        moved = (
            Prefetcher(batches, lambda batch: to_device(batch, DEVICE), DEVICE)
            if ahead
            else (to_device(batch, DEVICE) for batch in batches)
        )
        for _ in moved:
            if work_s:
                torch.cuda._sleep(int(work_s * rate))
        torch.cuda.synchronize()
        return time.perf_counter() - began

    rate = cycles_per_second()
    timed(True, 0.0)  # its memory is there from now on
    copies_s = timed(False, 0.0)
    each_s = copies_s / len(batches)
    one_after_the_other, at_once = timed(False, each_s), timed(True, each_s)
    assert one_after_the_other > 1.8 * copies_s
    assert at_once < 1.4 * copies_s


@pytest.mark.parametrize(("work_s", "batch_s", "least", "most"), [(0.02, 0.01, 0.0, 0.2), (0.001, 0.02, 0.7, 1.0)])
def test_waiting_counts_only_while_the_gpu_has_nothing_to_do(work_s, batch_s, least, most, make_trainer):
    class Works(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.cuda._sleep(int(work_s * rate))
            return super().training_step(batch, batch_idx)

    class Slow:
        def __iter__(self) -> Iterator[Any]:
            for batch in loader(600, shuffle=False):
                time.sleep(batch_s)
                yield batch

    rate = cycles_per_second()
    trainer = make_trainer(
        max_epochs=1, callbacks=fp.DataWaitMonitor(), enable_checkpointing=False, log_every_n_steps=30
    )
    trainer.fit(Works(), Slow())
    assert least <= float(trainer.callback_metrics["data_wait"]) <= most
