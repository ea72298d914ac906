"""`fp.plan`: predict whether a training fits, its highest speed and its least price on hardware that isn't here.

The order of events: names of hardware → the batch divided among devices → one capture for each size of a device's batch → a
check for missing operations, which names all of them → for each slice (and for `cpu`) a compilation, for each GPU an
analysis of the graph → step times by roofline, hours, prices → the cheapest and the fastest. A mistake is reported before
the first compilation begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from footplate.core.errors import ConfigError
from footplate.hardware import cpu_rates
from footplate.planning import largest_batch
from footplate.planning.choices import Choice, Measured, Memory
from footplate.planning.hlo import Collective, wire_bytes
from footplate.planning.program_client import Program, compiled_program
from footplate.planning.report import Plan
from footplate.planning.roofline import Roofline, roofline
from footplate.planning.serialized_step import serialize
from footplate.planning.subject import (
    Subject,
    batch_size_of,
    captured,
    example_of,
    per_device,
    precision_of,
    require_sizes,
)
from footplate.planning.targets import Target, target_of
from footplate.step.xla.capture import Captured
from footplate.step.xla.capture.needs import Needs, needs


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
    """Predict the needs, the speed and the price of a training on hardware that isn't here.

    For TPU slices the TPU's own compiler compiles the step, and for `"cpu"` XLA does. For GPUs, memory and arithmetic are
    counted from the graph of the step. A plan holds no weights and trains nothing. Times are rooflines: the least time of a
    step at peak rates.

    Args:
        model: a `footplate.Module` or `LightningModule`. You may make it under `torch.device("meta")`.
        data: a batch, a loader or a data module. Only the shapes of a batch are used.
        on: names of hardware, such as `["v5e-8", "H100", "cpu"]`.
        batch_size: the global batch size, of all devices together; by default that of `data`.
        precision: "32", "bf16" (mixed) or "bf16-true".
        dataset_rows: the number of samples in an epoch, for hours and price.
        epochs: the number of epochs.
        gradient_clip_val: as for the `Trainer`.
        search: also find the largest batch by compiling, with at most five more compilations for each slice.
        measure: run some steps on this CPU and compare; `on` must name "cpu".

    Raises:
        ConfigError: a name is unknown, the batch can't be divided evenly, or a number is out of range.
        CaptureError: the step can't be captured; the text names the line.
        MissingOperation: the step needs operations that the lowering lacks; the text names all of them.
        MissingExtra: JAX or libtpu isn't installed.
        PlanError: the compiler failed.
    """
    require_sizes(batch_size, dataset_rows, epochs)
    batch = example_of(data)
    subject = Subject(
        name=type(model).__name__,
        module=model,
        batch=batch,
        batch_size=batch_size or batch_size_of(batch),
        precision=precision_of(precision),
        rows=dataset_rows,
        epochs=epochs,
        gradient_clip_val=gradient_clip_val,
    )
    return plan_for(subject, on, search, measure)


def plan_for(subject: Subject, on: Sequence[str], search: bool = False, measure: bool = False) -> Plan:
    """Make a plan, like `plan`, for a given subject."""
    if not on:
        raise ConfigError('on: expected names of hardware, such as "v5e-8,H100,cpu".')
    targets = [target_of(name) for name in on]
    for target in targets:
        per_device(subject, target.devices)

    # Missing operations are reported before the first compilation, which may take minutes.
    captures = _Captures(subject)
    compiling = [target for target in targets if target.kind != "gpu"]
    if compiling:
        _require_operations(captures.of(compiling[0], subject.batch_size))

    choices = tuple(_choice(subject, target, captures, search) for target in targets)
    return Plan(subject, choices, _measured(subject, choices) if measure else None)


def _measured(subject: Subject, choices: Sequence[Choice]) -> Measured:
    from footplate.planning.measure import measure

    on_cpu = [choice for choice in choices if choice.target.kind == "cpu"]
    if not on_cpu:
        raise ConfigError('measure=True runs steps on this machine. Add "cpu" to on.')
    return measure(subject, on_cpu[0])


class _Captures:
    """Captures the step of a subject once for each size of a device's batch."""

    def __init__(self, subject: Subject) -> None:
        self._capture = cache(lambda size, averages: captured(subject, size, averages))

    def of(self, target: Target, batch_size: int) -> Captured:
        """Capture the step for a target and a global batch size."""
        # A slice of one device gets a slice's program too. Its average over one device costs nothing.
        averages = target.kind == "tpu" or target.devices > 1
        return self._capture(batch_size // target.devices, averages)


def _require_operations(captured: Captured) -> None:
    from footplate.core.optional import require

    require("jax", "plan", "A plan for TPUs and XLA")
    from footplate.step.xla.lowering.interpret import require_ops

    require_ops(captured.name, captured.graph)


def _choice(subject: Subject, target: Target, captures: _Captures, search: bool) -> Choice:
    captured_step = captures.of(target, subject.batch_size)
    counted = needs(captured_step)
    if target.kind == "gpu":
        return _counted_choice(subject, target, counted, captures)
    program = compiled_program(serialize(captured_step), target)
    return _compiled_choice(subject, target, counted, program, captures, search)


def _compiled_choice(
    subject: Subject, target: Target, counted: Needs, program: Program, captures: _Captures, search: bool
) -> Choice:
    """Predict for a slice, or for this machine, from the compiler's facts."""
    size = subject.batch_size // target.devices
    fits = _fits(program, target)

    growing = counted.batch_bytes + program.temporaries_bytes
    if program.too_large is not None:
        growing = counted.peak_bytes - counted.state_bytes
    largest = largest_batch.guess(size, counted.state_bytes + program.code_bytes, max(1, growing), target.memory_bytes)
    if search:

        def size_fits(per_device: int) -> bool:
            step = serialize(captures.of(target, per_device * target.devices))
            return _fits(compiled_program(step, target), target)

        largest = largest_batch.largest(size_fits, largest or 1)

    memory = Memory(
        limit=target.memory_bytes,
        peak=program.peak_bytes or None,
        arguments=program.arguments_bytes or None,
        temporaries=program.temporaries_bytes or None,
        outputs=program.outputs_bytes if fits else None,
        code=program.code_bytes if fits else None,
    )

    # A compiler counts the arithmetic of a loop's body once, and that of a library's product not at all. It may count bytes
    # far too often: for a gather, the whole operand for each index. The larger count of arithmetic and the smaller count of
    # bytes are the bounds.
    flops = max(program.flops, counted.flops)
    nbytes = min(program.accessed_bytes, counted.traffic_bytes)
    return _with_times(
        subject,
        target,
        fits=fits,
        memory=memory,
        flops=flops if fits else None,
        convolutions=counted.convolution_flops / max(1.0, counted.flops),
        nbytes=nbytes if fits else None,
        accessed=program.accessed_bytes if fits else None,
        collectives=program.collectives,
        largest_batch=largest and largest * target.devices,
        searched=search,
        counted_by="the TPU's compiler" if target.kind == "tpu" else "XLA",
        compile_s=program.compile_s,
        problem=program.too_large and _first_line(program.too_large),
    )


def _fits(program: Program, target: Target) -> bool:
    return program.too_large is None and program.peak_bytes <= target.memory_bytes


def _counted_choice(subject: Subject, target: Target, counted: Needs, captures: _Captures) -> Choice:
    """Predict for a GPU, from the graph. A second capture with twice the batch shows what grows with the batch."""
    size = subject.batch_size // target.devices
    twice = captures.of(target, 2 * subject.batch_size)
    growing = max(1, needs(twice).peak_bytes - counted.peak_bytes)
    largest = largest_batch.guess(size, counted.peak_bytes - growing, growing, target.memory_bytes)

    exchanged = [Collective("all-reduce", 1, counted.averaged_bytes)] if target.devices > 1 else []
    rate = target.flops_per_s(subject.precision)
    return _with_times(
        subject,
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
        largest_batch=largest and largest * target.devices,
        searched=False,
        counted_by="the graph",
        problem=None if rate else f"the catalog has no rate of {target.name} for {subject.precision}.",
    )


def _with_times(subject: Subject, target: Target, *, fits: bool, convolutions: float, **facts: Any) -> Choice:
    """Add times, hours and price to the facts of a choice. A choice that doesn't fit has none of these.

    `convolutions` is the part of convolutions in the arithmetic.
    """
    times = Roofline(None, None, None)
    if fits:
        on_cpu = target.kind == "cpu"
        dtype = torch.bfloat16 if subject.precision.startswith("bf16") else torch.float32
        times = roofline(
            facts["flops"],
            facts["nbytes"],
            wire_bytes(facts["collectives"], target.devices),
            flops_per_s=cpu_rates.flops_per_s(dtype) if on_cpu else target.flops_per_s(subject.precision, convolutions),
            bytes_per_s=cpu_rates.bytes_per_s() if on_cpu else target.bytes_per_s,
            wire_bytes_per_s=target.wire_bytes_per_s,
        )

    speed = subject.batch_size / times.step_s if times.step_s else None
    hours = subject.rows * subject.epochs / speed / 3600 if speed and subject.rows else None
    usd = hours * target.usd_per_hour if hours is not None and target.usd_per_hour is not None else None

    return Choice(
        target=target,
        batch_size=subject.batch_size,
        per_device=subject.batch_size // target.devices,
        fits=fits,
        roofline=times,
        samples_per_second=speed,
        hours=hours,
        usd=usd,
        **facts,
    )


def _first_line(text: str) -> str:
    """Find the line of a compiler's message that has the sizes."""
    lines = text.splitlines()
    return next((line for line in lines if "Used" in line or "exceeded" in line), lines[0]).strip()[:200]
