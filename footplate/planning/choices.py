"""What a plan is: for each target a `Choice`, and of the choices the cheapest and the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from footplate.planning.hlo import Collective
from footplate.planning.roofline import Roofline
from footplate.planning.subject import Subject
from footplate.planning.targets import Target

if TYPE_CHECKING:
    from footplate.planning.measure import Measured


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, by kind; None where the way of counting doesn't tell kinds apart.

    Attributes:
        limit: what the device has.
        peak: the most that is needed at once; None if the compiler found it too large and gave no number.
        arguments: state and batch.
        temporaries: what lives within a step.
        outputs: what is new beside the state.
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
        """What is left."""
        return None if self.peak is None else self.limit - self.peak


@dataclass(frozen=True)
class Choice:
    """What one target would need and give.

    Attributes:
        target: the hardware.
        batch_size: the global batch.
        per_device: the batch of one device.
        fits: whether memory suffices.
        memory: of one device.
        flops: of one device and step.
        nbytes: that one device must at least move to and from its memory in a step.
        accessed: that all operations of the compiled program read and write, as its compiler counts; None for GPUs.
        collectives: what devices exchange in a step.
        roofline: the least time of a step.
        samples_per_second: of all devices, at most.
        hours: of the whole training, at least; None if nobody said how long it is.
        usd: its price, at least; None if hours or price are unknown.
        largest_batch: the largest global batch that fits.
        searched: whether that was tried; if not it is reckoned from this program.
        counted_by: "the TPU's compiler", "XLA" or "the graph".
        compile_s: how long that took, when it was done.
        problem: why there is no answer, or what to know beside it.
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


@dataclass(frozen=True)
class Plan:
    """A plan: `print` it, or take `choices`.

    Attributes:
        subject: what was planned.
        choices: one for each target, in the order in which they were asked for.
        measured: some steps run here, beside what was predicted; None unless asked for.
    """

    subject: Subject
    choices: tuple[Choice, ...]
    measured: Measured | None = None

    @property
    def fastest(self) -> Choice | None:
        """The choice that fits and whose training is the shortest."""
        return _least(self.choices, lambda choice: choice.samples_per_second and -choice.samples_per_second)

    @property
    def cheapest(self) -> Choice | None:
        """The choice that fits and whose sample costs the least, among those with a known price."""
        return _least(self.choices, usd_per_sample)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, as `--format json` prints them."""
        from footplate.planning.report import to_dict

        return to_dict(self)

    def __str__(self) -> str:
        from footplate.planning.report import to_text

        return to_text(self)


def usd_per_sample(choice: Choice) -> float | None:
    """The least that a sample costs; None where the price isn't known."""
    if choice.samples_per_second is None or choice.target.usd_per_hour is None:
        return None
    return choice.target.usd_per_hour / 3600 / choice.samples_per_second


def _least(choices: Sequence[Choice], of: Callable[[Choice], float | None]) -> Choice | None:
    known = [
        (value, index) for index, choice in enumerate(choices) if choice.fits and (value := of(choice)) is not None
    ]
    return choices[min(known)[1]] if known else None
