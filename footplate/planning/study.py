"""`fp.plan`: predict whether a training fits, its highest speed and its least price on hardware that isn't here.

The order of events: names of hardware → the batch divided among devices → one capture for each size of a device's batch → a
check for missing operations, which names all of them → for each slice (and for `cpu`) a compilation, for GPUs an analysis
of the graph in each layout that makes sense → step times by roofline, hours, prices → the cheapest and the fastest. A
mistake is reported before the first compilation begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from footplate.core.errors import ConfigError
from footplate.planning import largest_batch
from footplate.planning.choices import Choice, Measured, Memory
from footplate.planning.counted_choice import counted_choice
from footplate.planning.hlo import wire_bytes
from footplate.planning.layouts import Strategy, check_strategy
from footplate.planning.program_client import Program, compiled_program
from footplate.planning.rank_step import RankSteps
from footplate.planning.report import Plan
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
from footplate.planning.timing import with_times
from footplate.step.xla.capture import Captured
from footplate.step.xla.capture.needs import needs


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
    strategy: Strategy = "auto",
    compile: bool = False,
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
        strategy: how devices share the training: "ddp", "fsdp", "model_parallel", an `FSDPStrategy` or a
            `ModelParallelStrategy`. "auto" tries them on GPUs, and takes the fastest of those that fit.
        compile: the steps on GPUs are compiled, which fuses elementwise operations. Otherwise each of these is a kernel.

    Raises:
        ConfigError: a name is unknown, the batch can't be divided evenly, or a number is out of range.
        CaptureError: the step can't be captured; the text names the line.
        MissingOperation: the step needs operations that the lowering lacks; the text names all of them.
        MissingExtra: JAX or libtpu isn't installed.
        PlanError: the compiler failed.

    Examples:
        >>> plan = fp.plan(model, train, on=["H100"], batch_size=8)
        >>> print(plan)  # memory, least time and price
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
        strategy=strategy,
        compile=compile,
    )
    return plan_for(subject, on, search, measure)


def plan_for(subject: Subject, on: Sequence[str], search: bool = False, measure: bool = False) -> Plan:
    """Make a plan, like `plan`, for a given subject."""
    if not on:
        raise ConfigError('on: expected names of hardware, such as "v5e-8,H100,cpu".')
    check_strategy(subject.strategy)
    targets = [target_of(name) for name in on]
    for target in targets:
        if subject.free_batch:
            _require_counted(subject, target)
        elif not (_is_counted(subject, target) and subject.batch_size < target.devices):
            per_device(subject, target.devices)

    # Missing operations are reported before the first compilation, which may take minutes.
    captures = _Captures(subject)
    compiling = [target for target in targets if not _is_counted(subject, target)]
    if compiling:
        _require_operations(captures.of(compiling[0], subject.batch_size))

    steps = RankSteps(subject) if len(compiling) < len(targets) else None
    choices = tuple(
        _compiled(subject, target, captures, search) if target in compiling else counted_choice(subject, target, steps)
        for target in targets
    )
    return Plan(subject, choices, _measured(subject, choices) if measure else None)


def _is_counted(subject: Subject, target: Target) -> bool:
    """Return True if a target is planned from the graph: GPUs, and slices whose devices share the state."""
    return target.kind == "gpu" or (target.kind == "tpu" and subject.strategy not in ("auto", "ddp"))


def _require_counted(subject: Subject, target: Target) -> None:
    """Check that the plan can choose a batch for a target.

    Raises:
        ConfigError: a compiler plans the target, for a batch that must be given.
    """
    if not _is_counted(subject, target):
        fsdp = ', or strategy="fsdp", which is counted from the graph' if target.kind == "tpu" else ""
        raise ConfigError(f"{target.name}: the compiler needs a batch. Give --batch-size{fsdp}.")


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


def _compiled(subject: Subject, target: Target, captures: _Captures, search: bool) -> Choice:
    """Predict for a slice, or for this machine, from the compiler's facts."""
    captured_step = captures.of(target, subject.batch_size)
    counted = needs(captured_step)
    program = compiled_program(serialize(captured_step), target)
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
    return with_times(
        subject,
        target,
        fits=fits,
        memory=memory,
        flops=flops if fits else None,
        convolutions=counted.convolution_flops / max(1.0, counted.flops),
        nbytes=nbytes if fits else None,
        accessed=program.accessed_bytes if fits else None,
        collectives=program.collectives,
        wire=wire_bytes(program.collectives, target.devices),
        largest_batch=largest and largest * target.devices,
        searched=search,
        counted_by="the TPU's compiler" if target.kind == "tpu" else "XLA",
        compile_s=program.compile_s,
        problem=program.too_large and _first_line(program.too_large),
    )


def _fits(program: Program, target: Target) -> bool:
    return program.too_large is None and program.peak_bytes <= target.memory_bytes


def _first_line(text: str) -> str:
    """Find the line of a compiler's message that has the sizes."""
    lines = text.splitlines()
    return next((line for line in lines if "Used" in line or "exceeded" in line), lines[0]).strip()[:200]
