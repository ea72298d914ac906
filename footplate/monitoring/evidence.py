"""What the monitor knows of a training. The rules turn it into advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LoaderFacts:
    """The training loader.

    Attributes:
        kind: "table" (Footplate's), "torch" (a `DataLoader`), or "other".
        workers: processes of a `DataLoader`; threads of a table's loader.
        busy: the share of time (0 … 1) in which the threads of a table's loader had work. None if it isn't known.
        computing: the share of that in which they computed. They also wait for Python's lock and for worker processes.
        decodes: the image columns that a table's loader decodes.
        transform: rows go through a function of the user.
        cores: the cores that the loader could use.
    """

    kind: Literal["table", "torch", "other"]
    workers: int = 0
    busy: float | None = None
    computing: float | None = None
    decodes: tuple[str, ...] = ()
    transform: bool = False
    cores: int = 1


@dataclass(frozen=True)
class Compilation:
    """A program that was compiled for a form of batch, or compiled again, with the reason."""

    name: str
    form: str
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """The measurements of one training, on rank 0.

    Attributes:
        seconds: the wall time by cause: "input", "transfer", "forward", "backward", "optimizer", "step" (the rest of a
            step), "dispatch" and "compilation" (of XLA), "communication", "callbacks", "logging", "checkpoint",
            "validation". They sum to the wall time.
        batches: training batches.
        rows: rows of a batch on one rank; None if they can't be counted.
        samples: rows that all ranks trained on.
        tokens: integers in sequences that all ranks trained on; None without sequences.
        device: the type of the device: "cpu", "cuda", "xla".
        precision: the trainer's precision.
        log_every_n_steps: the trainer's argument.
        saves: checkpoints that were written.
        loader: the training loader.
        hooks: the owners of hooks that run at every batch.
        operations: operations of one step; 0 if none was examined.
        flops: their floating-point operations, of all ranks.
        reads: how often lines of the user's code read a value from the device in one step, by "file:line".
        visits: how often the forward pass came to each line of the user's code, by "file:line".
        by_line: operations of the forward pass by line.
        pauses: shares of a step (0 … 1) in which no operation ran, by the lines of the user's code before and after ("" for
            none).
        least_step_s: the time of the fastest step that was timed, which nothing else disturbed. None if none was.
        operation_s: the time of an operation that computes nothing, forward and backward.
        compilations: programs and recompilations.
        launching: on a GPU, the share of a step in which the host launches operations. None elsewhere.
        own_s: by rank, the seconds of an epoch in which the rank did not wait for other ranks.
        peak_flops_per_s: the device's peak in this precision, times the devices; None if it isn't known.
        bfloat16_flops_per_s: likewise in bfloat16.
        gc_s: seconds in Python's garbage collector.
        memory_bytes: the peak of the process's memory.
        device_memory_bytes: the peak on a GPU; None elsewhere.
    """

    seconds: Mapping[str, float]
    batches: int
    rows: int | None = None
    samples: int | None = None
    tokens: int | None = None
    device: str = "cpu"
    precision: str = "32-true"
    log_every_n_steps: int = 50
    saves: int = 0
    loader: LoaderFacts = field(default_factory=lambda: LoaderFacts("other"))
    hooks: tuple[str, ...] = ()
    operations: int = 0
    flops: float | None = None
    reads: Mapping[str, int] = field(default_factory=dict)
    visits: Mapping[str, int] = field(default_factory=dict)
    by_line: Mapping[str, int] = field(default_factory=dict)
    pauses: Mapping[tuple[str, str], float] = field(default_factory=dict)
    least_step_s: float | None = None
    operation_s: float | None = None
    compilations: tuple[Compilation, ...] = ()
    launching: float | None = None
    own_s: Mapping[int, float] = field(default_factory=dict)
    peak_flops_per_s: float | None = None
    bfloat16_flops_per_s: float | None = None
    gc_s: float = 0.0
    memory_bytes: int = 0
    device_memory_bytes: int | None = None

    @property
    def wall_s(self) -> float:
        """The wall time."""
        return sum(self.seconds.values())

    def share(self, *causes: str) -> float:
        """Return the share of the wall time (0 … 1) of some causes."""
        return sum(self.seconds.get(cause, 0.0) for cause in causes) / max(self.wall_s, 1e-9)

    @property
    def mfu(self) -> float | None:
        """The share of the peak rate (0 … 1) that the model's operations use; None if a figure isn't known."""
        if not self.flops or not self.peak_flops_per_s:
            return None
        return self.flops * self.batches / max(self.wall_s, 1e-9) / self.peak_flops_per_s
