"""`fp.plan`: does this training fit, how fast can it be at best, and what would it cost, on hardware that isn't here?

The order of events: names of hardware → the batch shared out → one capture for each size of a device's batch → operations
that are missing, all at once → for each slice (and for `cpu`) a compilation, for each GPU an analysis of the graph → times
by roofline, hours, prices → the cheapest and the fastest. A mistake is found before the first compilation begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from footplate.core.errors import ConfigError
from footplate.planning import rates, subject
from footplate.planning import largest_batch
from footplate.planning.choices import Choice, Memory, Plan
from footplate.planning.program_client import Program, program
from footplate.planning.graph import Needs, needs
from footplate.planning.hlo import Collective, wire_bytes
from footplate.planning.serialized_step import plain
from footplate.planning.roofline import Roofline, roofline
from footplate.planning.subject import Subject
from footplate.planning.targets import Target, target_of
from footplate.step.xla.capture import Captured

if TYPE_CHECKING:
    from footplate.planning.measure import Measured


def plan(
    model: Any,
    data: Any,
    *,
    on: Sequence[str],
    batch_size: int | None = None,
    precision: str = "32",
    dataset_rows: int | None = None,
    epochs: int = 1,
    gradient_clip_val: float | None = None,
    search: bool = False,
    measure: bool = False,
) -> Plan:
    """Say what training would need and cost on hardware that need not be here.

    For TPU slices the step is compiled by the TPU's own compiler, for `"cpu"` by XLA; for GPUs memory and arithmetic are
    counted from the step's graph. No weights are held, and nothing is trained. Times are rooflines: the least a step can
    take, from peak rates.

    Args:
        model: a `footplate.Module` or `LightningModule`; it may have been made under `torch.device("meta")`.
        data: a batch, a loader or a data module; of a batch only the shapes are used.
        on: names of hardware, such as `["v5e-8", "H100", "cpu"]`.
        batch_size: the global batch, of all devices together; by default that of `data`.
        precision: "32", "bf16" (mixed) or "bf16-true".
        dataset_rows: how many samples an epoch has, for hours and price.
        epochs: how many there are.
        gradient_clip_val: as the `Trainer`'s.
        search: find the largest batch by compiling, too, in at most five more compilations for each slice.
        measure: run some steps on this CPU and compare; `on` must name "cpu".

    Raises:
        ConfigError: an unknown name, a batch that can't be shared out, a number that is none of samples or epochs.
        CaptureError: the step can't be captured; the text names the line.
        MissingOperation: it needs operations that XLA's table lacks, all of them named.
        MissingExtra: JAX or libtpu isn't installed.
        PlanError: the compiler failed.
    """
    subject.require_sizes(batch_size, dataset_rows, epochs)
    batch = subject.example_of(data)
    about = Subject(
        name=type(model).__name__,
        module=model,
        batch=batch,
        batch_size=batch_size or subject.batch_size_of(batch),
        precision=subject.precision_of(precision),
        rows=dataset_rows,
        epochs=epochs,
        gradient_clip_val=gradient_clip_val,
    )
    return plan_for(about, on, search, measure)


def plan_for(about: Subject, on: Sequence[str], search: bool = False, measure: bool = False) -> Plan:
    """`plan`, for a subject that is put together already."""
    if not on:
        raise ConfigError('on: expected names of hardware, such as "v5e-8,H100,cpu".')
    targets = [target_of(name) for name in on]
    for target in targets:
        subject.per_device(about, target.devices)
    captures = _Captures(about)
    compiling = [target for target in targets if target.kind != "gpu"]
    if compiling:
        _require_operations(captures.of(compiling[0], about.batch_size))
    choices = tuple(_choice(about, target, captures, search) for target in targets)
    return Plan(about, choices, _measured(about, choices) if measure else None)


def _measured(about: Subject, choices: Sequence[Choice]) -> Measured:
    from footplate.planning.measure import measure

    here = [choice for choice in choices if choice.target.kind == "cpu"]
    if not here:
        raise ConfigError('measure=True runs on this machine: name "cpu" in on, too.')
    return measure(about, here[0])


class _Captures:
    """The subject's step, captured once for each size of a device's batch."""

    def __init__(self, about: Subject) -> None:
        self._of = cache(lambda size, averages: subject.captured(about, size, averages))
        self._about = about

    def of(self, target: Target, batch_size: int) -> Captured:
        """For a target and a global batch."""
        # One device alone has a slice's program too, with an average over itself, which costs nothing.
        averages = target.kind == "tpu" or target.devices > 1
        return self._of(batch_size // target.devices, averages)


def _require_operations(captured: Captured) -> None:
    from footplate.core.optional import require

    require("jax", "plan", "A plan for TPUs and XLA")
    from footplate.step.xla.lowering.interpret import require_ops

    require_ops(captured.name, captured.graph)


def _choice(about: Subject, target: Target, captures: _Captures, search: bool) -> Choice:
    captured = captures.of(target, about.batch_size)
    counted = needs(captured)
    if target.kind == "gpu":
        return _counted(about, target, counted, captures)
    made = program(plain(captured), target)
    return _compiled(about, target, counted, made, captures, search)


def _compiled(
    about: Subject, target: Target, counted: Needs, made: Program, captures: _Captures, search: bool
) -> Choice:
    """A slice, or this machine, by its compiler."""
    size = about.batch_size // target.devices
    fits = made.too_large is None and made.peak_bytes <= target.memory_bytes
    growing = counted.batch_bytes + made.temporaries_bytes
    if made.too_large is not None:
        growing = counted.peak_bytes - counted.state_bytes
    reckoned = largest_batch.guess(size, counted.state_bytes + made.code_bytes, max(1, growing), target.memory_bytes)
    if search:

        def fitting(per_device: int) -> bool:
            tried = program(plain(captures.of(target, per_device * target.devices)), target)
            return tried.too_large is None and tried.peak_bytes <= target.memory_bytes

        reckoned = largest_batch.largest(fitting, reckoned or 1)
    memory = Memory(
        limit=target.memory_bytes,
        peak=made.peak_bytes or None,
        arguments=made.arguments_bytes or None,
        temporaries=made.temporaries_bytes or None,
        outputs=made.outputs_bytes if fits else None,
        code=made.code_bytes if fits else None,
    )
    # A compiler counts the arithmetic of a loop's body once, and a library's product not at all. Of bytes it may count many
    # times too many: a gather, say, as all of its operand for each index. So of each the count that makes a bound.
    flops = max(made.flops, counted.flops)
    return _finished(
        about,
        target,
        fits=fits,
        memory=memory,
        flops=flops if fits else None,
        convolutions=counted.convolution_flops / max(1.0, counted.flops),
        nbytes=min(made.accessed_bytes, counted.traffic_bytes) if fits else None,
        accessed=made.accessed_bytes if fits else None,
        collectives=made.collectives,
        largest_batch=reckoned and reckoned * target.devices,
        searched=search,
        counted_by="the TPU's compiler" if target.kind == "tpu" else "XLA",
        compile_s=made.compile_s,
        problem=made.too_large and _first_line(made.too_large),
    )


def _counted(about: Subject, target: Target, counted: Needs, captures: _Captures) -> Choice:
    """A GPU, by the graph: two sizes of batch say what grows with it."""
    size = about.batch_size // target.devices
    twice = captures.of(target, 2 * about.batch_size)
    growing = max(1, needs(twice).peak_bytes - counted.peak_bytes)
    reckoned = largest_batch.guess(size, counted.peak_bytes - growing, growing, target.memory_bytes)
    exchanged = [Collective("all-reduce", 1, counted.averaged_bytes)] if target.devices > 1 else []
    rate = target.flops_per_s(about.precision)
    return _finished(
        about,
        target,
        fits=counted.peak_bytes <= target.memory_bytes,
        memory=Memory(
            limit=target.memory_bytes,
            peak=counted.peak_bytes,
            arguments=counted.state_bytes + counted.batch_bytes,
            temporaries=counted.peak_bytes - counted.state_bytes - counted.batch_bytes,
        ),
        flops=counted.flops,
        convolutions=counted.convolution_flops / max(1.0, counted.flops),
        nbytes=float(counted.traffic_bytes),
        accessed=None,
        collectives=tuple(exchanged),
        largest_batch=reckoned and reckoned * target.devices,
        searched=False,
        counted_by="the graph",
        problem=None if rate else f"the catalog has no rate of {target.name} for {about.precision}.",
    )


def _finished(about: Subject, target: Target, *, fits: bool, convolutions: float, **found: Any) -> Choice:
    """A choice with its times, hours and price, none of which it has if it doesn't fit.

    `convolutions` is their part of the arithmetic.
    """
    times = Roofline(None, None, None)
    if fits:
        here = target.kind == "cpu"
        dtype = torch.bfloat16 if about.precision.startswith("bf16") else torch.float32
        times = roofline(
            found["flops"],
            found["nbytes"],
            wire_bytes(found["collectives"], target.devices),
            flops_per_s=rates.flops_per_s(dtype) if here else target.flops_per_s(about.precision, convolutions),
            bytes_per_s=rates.bytes_per_s() if here else target.bytes_per_s,
            wire_bytes_per_s=target.wire_bytes_per_s,
        )
    speed = about.batch_size / times.step_s if times.step_s else None
    hours = about.rows * about.epochs / speed / 3600 if speed and about.rows else None
    usd = hours * target.usd_per_hour if hours is not None and target.usd_per_hour is not None else None
    return Choice(
        target=target,
        batch_size=about.batch_size,
        per_device=about.batch_size // target.devices,
        fits=fits,
        roofline=times,
        samples_per_second=speed,
        hours=hours,
        usd=usd,
        **found,
    )


def _first_line(text: str) -> str:
    found = next((line for line in text.splitlines() if "Used" in line or "exceeded" in line), text.splitlines()[0])
    return found.strip()[:200]
