"""The results of a plan as data: a `Choice` for each target, and the `Measured` steps of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from footplate.planning.hlo import Collective
from footplate.planning.layouts import Layout
from footplate.planning.roofline import Roofline
from footplate.planning.targets import Target


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, by kind; None if this way of counting doesn't separate the kinds.

    Attributes:
        limit: the memory of the device.
        peak: the most that a step needs at once; None if the compiler only reported that the step is too large.
        arguments: state and batch.
        temporaries: values that exist only within a step.
        outputs: results beside the state.
        code: the program.
    """

    limit: int
    peak: int | None
    arguments: int | None
    temporaries: int | None
    outputs: int | None = None
    code: int | None = None

    @property
    def headroom(self) -> int | None:
        """The memory that is left at the peak; negative if it isn't enough."""
        return None if self.peak is None else self.limit - self.peak


@dataclass(frozen=True)
class Choice:
    """The needs of the training on one target, and its speed and price there.

    Attributes:
        target: the hardware.
        batch_size: the global batch size.
        per_device: the batch size of one device; with tensor parallelism, that of a group.
        fits: True if the memory suffices.
        memory: the memory of one device.
        flops: floating-point operations of one device in a step.
        nbytes: the least that one device must read from and write to its memory in a step.
        accessed: the bytes that all operations of the compiled program read and write, as the compiler counts them; None
            for GPUs.
        collectives: the data that devices exchange in a step.
        roofline: the least time of a step.
        samples_per_second: the highest possible rate of all devices together.
        hours: the least time of the whole training; None if its length wasn't given.
        usd: the least price of the whole training; None if hours or price are unknown.
        largest_batch: the largest global batch that fits.
        searched: True if `largest_batch` was found by compiling; False if it is computed from this program.
        counted_by: "the TPU's compiler", "XLA" or "the graph".
        compile_s: the duration of the compilation, when the program was compiled.
        problem: the reason why there is no result, or a remark about it.
        layout: how the devices share the training; None if a compiler planned it, by data parallelism.
        strategy: the layout as the argument `strategy` of a `Trainer`.
        rejected: other layouts, and why they aren't used.
    """

    target: Target
    batch_size: int
    per_device: int
    fits: bool
    memory: Memory
    flops: float | None
    nbytes: float | None
    accessed: float | None
    collectives: tuple[Collective, ...]
    roofline: Roofline
    samples_per_second: float | None
    hours: float | None
    usd: float | None
    largest_batch: int | None
    searched: bool
    counted_by: str
    compile_s: float | None = None
    problem: str | None = None
    layout: Layout | None = None
    strategy: str | None = None
    rejected: tuple[str, ...] = ()


def usd_per_sample(choice: Choice) -> float | None:
    """The least price of a sample; None if the price of the target is unknown."""
    if choice.samples_per_second is None or choice.target.usd_per_hour is None:
        return None
    return choice.target.usd_per_hour / 3600 / choice.samples_per_second


@dataclass(frozen=True)
class Measured:
    """The prediction for this machine, beside the measurement.

    Attributes:
        predicted_peak_bytes: the memory that the plan predicts.
        peak_bytes: state and batch, and the most by which the process that ran the program grew within a step.
        least_step_s: the step time of the roofline.
        xla_step_s: the median of some steps of XLA's program.
        xla_fastest_step_s: the fastest of these steps.
        eager_step_s: the median of the same number of steps of eager torch.
    """

    predicted_peak_bytes: int
    peak_bytes: int
    least_step_s: float
    xla_step_s: float
    xla_fastest_step_s: float
    eager_step_s: float
