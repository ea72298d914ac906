"""The step of a tiny MLP before and after a profile of ten steps, and while it is recorded.

    python benchmarks/profiler_overhead.py --json benchmarks/results/profiler_overhead.json

Each round trains twice: with a profile in the middle, and without. Processor time of the thread that trains counts.

    after_vs_before         a step after the profile, when its files are written, against a step before it
    control_vs_before       the same two stretches of a training without a profile: the noise of the figure above
    recorded_vs_before      a recorded step, without the writing of the files
    check_ns                what the loop asks between two steps to know whether a profile is due
    write_s                 the files of a profile, in their thread
    pause_s                 what the training waits for after ten steps with `pause_events` events each: the longest time
                            between two steps; `pause_if_it_waited_s`, if the training waited for the files, too
"""

from __future__ import annotations

import gzip
import json
import logging
import tempfile
import threading
import time
import timeit
from pathlib import Path
from typing import Any

import torch
from common import CPU_STEP, QUICK_ROUNDS, Figures, arguments, interleave, machine, median, ratio, report, row
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.training.profiler.recording import Recording

ROUNDS = 15
FIRST, STEPS = 1000, 10
STRETCH = 1500
PROFILED, CONTROL = "with a profile", "without a profile"


class TinyMLP(fp.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(fp.Callback):
    """Notes the processor time at some steps. Before that, it waits until the files of a profile are written."""

    def __init__(self, steps: set[int]) -> None:
        self.at: dict[int, float] = {}
        self._steps = steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self._steps:
            for thread in threading.enumerate():
                if thread.name == "footplate-profile":
                    thread.join()
            self.at[trainer.global_step] = time.thread_time()


def train(entrant: str, stretch: int) -> Figures:
    """Train for a stretch, a profile, and a stretch. Returns the processor time of a step in each."""
    first = FIRST + stretch
    last, end = first + STEPS, first + STEPS + stretch
    clock = Clock({FIRST, first - 2, last + 2, end})
    data = TensorDataset(torch.randn(640, 32), torch.randint(0, 10, (640,)))
    with tempfile.TemporaryDirectory() as directory:
        fp.Trainer(
            accelerator="cpu", max_steps=end, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=Path(directory), callbacks=clock,
            profiler=fp.Profiler((first, last)) if entrant == PROFILED else None,
        ).fit(TinyMLP(), DataLoader(data, batch_size=16))  # fmt: skip
    before = (clock.at[first - 2] - clock.at[FIRST]) / (first - 2 - FIRST)
    after = (clock.at[end] - clock.at[last + 2]) / (end - last - 2)
    return {"before_us": 1e6 * before, "after_us": 1e6 * after}


def recorded(stretch: int) -> Figures:
    """Return the processor time of a recorded step, and that of its files."""
    spent: dict[str, float] = {}
    start, stop, write = Recording.start, Recording.stop, Recording.write

    def noted_start(self: Recording, step: int) -> None:
        start(self, step)
        spent["began"] = time.thread_time()

    def noted_stop(self: Recording, step: int) -> None:
        spent["recorded_us"] = 1e6 * (time.thread_time() - spent["began"]) / STEPS
        stop(self, step)

    def noted_write(self: Recording) -> Any:
        began = time.thread_time()
        written = write(self)
        spent["write_s"] = time.thread_time() - began
        return written

    Recording.start, Recording.stop, Recording.write = noted_start, noted_stop, noted_write  # type: ignore[method-assign]
    try:
        figures = train(PROFILED, stretch)
    finally:
        Recording.start, Recording.stop, Recording.write = start, stop, write  # type: ignore[method-assign]
    return {**figures, "recorded_us": spent["recorded_us"], "write_s": spent["write_s"]}


class ManyOperators(TinyMLP):
    """A step with many small operators: about twelve events for each of them, calls of Python included."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self._operators = operators

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for _ in range(self._operators):
            x = x + 1e-9
        return nn.functional.cross_entropy(self.net(x), batch[1])


class Gaps(fp.Callback):
    """Notes the processor time between two steps."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ended: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._ended is not None and trainer.global_step > 2:
            self.longest_s = max(self.longest_s, time.thread_time() - self._ended)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._ended = time.thread_time()


def pause(operators: int) -> Figures:
    """Return what the training waits for after ten steps with many events."""
    gaps, spent = Gaps(), {}
    write = Recording.write

    def noted_write(self: Recording) -> Any:
        began = time.thread_time()
        written = write(self)
        spent["write_s"] = time.thread_time() - began
        return written

    data = TensorDataset(torch.randn(640, 32), torch.randint(0, 10, (640,)))
    Recording.write = noted_write  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as directory:
            fp.Trainer(
                accelerator="cpu", max_steps=30, logger=False, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False, default_root_dir=Path(directory), callbacks=gaps,
                profiler=fp.Profiler((10, 10 + STEPS)),
            ).fit(ManyOperators(operators), DataLoader(data, batch_size=16))  # fmt: skip
            trace = gzip.decompress(Path(directory, "profile-10", "trace-rank0.json.gz").read_bytes())
    finally:
        Recording.write = write  # type: ignore[method-assign]
    events = len(json.loads(trace)["traceEvents"]) / STEPS
    waits = gaps.longest_s + spent["write_s"]
    return {"pause_s": gaps.longest_s, "pause_if_it_waited_s": waits, "pause_events": events}


def check_ns(rounds: int) -> float:
    """The time of the loop's question, without the loop."""

    class Progress:
        global_step = 7

    class Profiles:
        due = float("inf")

    names = {"progress": Progress(), "profiles": Profiles()}
    names["progress"].global_step, names["profiles"].due = 7, float("inf")
    number = 1_000_000
    asked = min(timeit.repeat("progress.global_step >= profiles.due", globals=names, number=number, repeat=rounds))
    nothing = min(timeit.repeat("pass", globals=names, number=number, repeat=rounds))
    return 1e9 * (asked - nothing) / number


def main() -> None:
    options = arguments("A step before and after a profile.")
    rounds, stretch = (QUICK_ROUNDS, 100) if options.quick else (ROUNDS, STRETCH)
    logging.getLogger("footplate").setLevel(logging.ERROR)
    host = machine()
    train(PROFILED, 20)

    def measure(entrant: str) -> Figures:
        return recorded(stretch) if entrant == PROFILED else train(entrant, stretch)

    results = interleave([PROFILED, CONTROL], measure, rounds)
    ratios = {
        "after_vs_before": ratio(results, PROFILED, PROFILED, "after_us", CPU_STEP, "before_us"),
        "control_vs_before": ratio(results, CONTROL, CONTROL, "after_us", CPU_STEP, "before_us"),
        "recorded_vs_before": ratio(results, PROFILED, PROFILED, "recorded_us", CPU_STEP, "before_us"),
    }
    for name, of in {
        "after_vs_before": "after",
        "control_vs_before": "later",
        "recorded_vs_before": "recorded",
    }.items():
        ratios[name] |= {"of": f"{ratios[name]['of']}, {of}", "against": f"{ratios[name]['against']}, before"}
    figures = {"check_ns": check_ns(5), "write_s": median(results[PROFILED], "write_s")}
    pauses = [pause(20 if options.quick else 2500) for _ in range(QUICK_ROUNDS if options.quick else 3)]
    figures |= {name: median(pauses, name) for name in pauses[0]}
    columns = {"before_us": "µs a step before", "recorded_us": "recorded", "after_us": "after", "write_s": "s to write"}
    rows = [row(name, runs) for name, runs in results.items()]
    packages = ("footplate", "torch")
    report("profiler_overhead", "Profiler", columns, rows, ratios, figures, host, packages, options.json)
    print(f"check between two steps: {figures['check_ns']:.0f} ns")
    print(
        f"pause after ten steps with {figures['pause_events']:.0f} events each: {figures['pause_s']:.2f} s, "
        f"and {figures['pause_if_it_waited_s']:.2f} s if the training waited for the files"
    )


if __name__ == "__main__":
    main()
