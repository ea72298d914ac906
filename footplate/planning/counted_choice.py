"""A choice that is counted from the graph: the layout, and perhaps the batch, that train fastest among those that fit.

    layouts     in rounds (`layouts.py`): a later round is slower, so it is tried only if nothing in an earlier one fits
    batch       with `free_batch`: 1, 2, 4, … rows for each group, as long as the samples per second grow by a percent

The search for a batch follows larger batches from small ones (`batch_rows.py`). What it finds is captured as it is. If that
needs something else than what was followed, all batches are captured.

FSDP2 sends while it computes. Its bytes have a roof of their own. What tensor parallelism sends in the forward pass is
added to the kernels, because the next kernel waits for it. In the backward pass kernels that don't wait can run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from footplate.core.errors import ConfigError
from footplate.planning import largest_batch
from footplate.planning.choices import Choice, Memory
from footplate.planning.hlo import Collective, wire_bytes
from footplate.planning.layouts import Layout, rounds
from footplate.planning.rank_step import RankStep, RankSteps
from footplate.planning.subject import Subject, per_device
from footplate.planning.targets import Target
from footplate.planning.timing import with_times

# A larger batch is worth its memory if it makes training faster by this factor.
WORTHWHILE = 1.01
MOST_ROWS = 2**10


def counted_choice(subject: Subject, target: Target, steps: RankSteps | None) -> Choice:
    """Predict for GPUs, or for a slice whose devices share the state, from the graph.

    Args:
        subject: the training.
        target: the hardware.
        steps: counts the subject's steps.

    Raises:
        ConfigError: no layout divides the batch, or the strategy that was asked for can't be used.
    """
    steps = steps or RankSteps(subject)
    search = _Search(subject, target, steps, captures=not subject.free_batch)
    choice = search.best_batch() if subject.free_batch else search.at(subject.batch_size)
    if not search.captures and not search.is_as_captured(choice):
        search = _Search(subject, target, steps)
        choice = search.best_batch()
    return replace(choice, rejected=tuple(f"{name}: {reason}" for name, reason in search.rejected.items()))


@dataclass
class _Search:
    """Tries layouts on a target.

    Attributes:
        captures: True to capture each batch; False to follow it from two small ones.
        rejected: layouts that were tried and aren't used, with the reason.
    """

    subject: Subject
    target: Target
    steps: RankSteps
    captures: bool = True
    rejected: dict[str, str] = field(default_factory=dict)
    _full: set[str] = field(default_factory=set)

    def best_batch(self) -> Choice:
        """Return the choice with the most samples per second."""
        best: Choice | None = None
        rows, most = 1, 0
        while rows <= MOST_ROWS:
            choice = self.at(None, rows)
            if not choice.fits:
                break
            most = choice.batch_size
            if best is not None and not _is_faster(choice, best):
                break
            best, rows = choice, 2 * rows
        if best is None:
            return self.at(None, 1)
        self.rejected.pop(str(best.layout), None)
        return replace(best, largest_batch=max(most, best.largest_batch or 0))

    def is_as_captured(self, choice: Choice) -> bool:
        """Return True if the step of a choice, captured with its own batch, needs what the search has followed."""
        assert choice.layout is not None
        followed = self.steps.of(choice.layout, choice.per_device, captured=False)
        captured = self.steps.of(choice.layout, choice.per_device)
        return (followed.peak_bytes, followed.flops, followed.traffic_bytes) == (
            captured.peak_bytes, captured.flops, captured.traffic_bytes,
        )  # fmt: skip

    def at(self, batch_size: int | None, rows: int = 1) -> Choice:
        """Return the fastest choice that fits; if none does, the one that needs the least memory.

        Args:
            batch_size: the global batch size; None for `rows` rows of each group.
            rows: see above.
        """
        smallest: Choice | None = None
        for layouts in self._rounds():
            choices = [choice for layout in layouts if (choice := self._try(layout, batch_size, rows)) is not None]
            fitting = [choice for choice in choices if choice.fits]
            if fitting:
                best = min(fitting, key=lambda choice: choice.roofline.step_s or 0.0)
                self.rejected.pop(str(best.layout), None)
                return self._with_largest(best)
            smallest = min(
                [*choices, *([smallest] if smallest else [])], key=lambda choice: choice.memory.peak or 0, default=None
            )
        if smallest is None:
            # Every layout was left out: the batch can't be divided.
            per_device(self.subject, self.target.devices)
            raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in self.rejected.items()))
        self.rejected.pop(str(smallest.layout), None)
        return smallest

    def _rounds(self) -> Iterator[list[Layout]]:
        target = self.target
        machine = target.machine_devices if target.kind == "gpu" else target.devices
        repeats = self.steps.blocks_class is not None
        for layouts in rounds(self.subject.strategy, target.devices, machine, repeats):
            # What didn't fit with fewer rows doesn't fit with more.
            left = [layout for layout in layouts if str(layout) not in self._full]
            if left:
                yield left

    def _try(self, layout: Layout, batch_size: int | None, rows: int) -> Choice | None:
        size, rest = divmod(batch_size, layout.data) if batch_size is not None else (rows, 0)
        if rest:
            self.rejected[str(layout)] = f"{layout.data} groups can't share a batch of {batch_size:,}"
            return None
        try:
            step = self.steps.of(layout, size, self.captures)
        except ConfigError as error:
            if layout.tensor == 1 or self.subject.strategy != "auto":
                raise
            self.rejected[str(layout)] = str(error).rstrip(".")
            return None

        choice = choice_of(self.subject, self.target, layout, size, step, self.steps.blocks_class)
        if not choice.fits:
            self._full.add(str(layout))
            self.rejected[str(layout)] = (
                f"needs {step.peak_bytes / 2**30:,.1f} GiB for a batch of {choice.batch_size:,}"
            )
        else:
            self.rejected[str(layout)] = f"{1e3 * (choice.roofline.step_s or 0.0):,.4g} ms a step"
        return choice

    def _with_largest(self, choice: Choice) -> Choice:
        """Compute the largest batch from two sizes."""
        assert choice.layout is not None
        assert choice.memory.peak is not None
        size, peak = choice.per_device, choice.memory.peak
        growing = max(1, self.steps.of(choice.layout, 2 * size, self.captures).peak_bytes - peak)
        largest = largest_batch.guess(size, peak - growing, growing, self.target.memory_bytes)
        return replace(choice, largest_batch=largest and largest * choice.layout.data)


def _is_faster(choice: Choice, best: Choice) -> bool:
    return (choice.samples_per_second or 0.0) > WORTHWHILE * (best.samples_per_second or 0.0)


def choice_of(
    subject: Subject, target: Target, layout: Layout, size: int, step: RankStep, blocks: str | None
) -> Choice:
    """Return the choice of one layout.

    Args:
        subject: the training.
        target: the hardware.
        layout: how its devices share the training.
        size: the rows of one group.
        step: the needs of one rank.
        blocks: the class of the repeated blocks.
    """
    exchanged = _collectives(layout, step)
    tensor_wire = step.forward_wire + step.backward_wire
    wire = sum(wire_bytes([collective], devices) for collective, devices in exchanged) + tensor_wire
    convolutions = step.convolution_flops / max(1.0, step.flops)
    rate = target.flops_per_s(subject.precision, convolutions)
    kernels_s = None
    if rate and target.bytes_per_s:
        waiting = step.forward_wire / target.wire_bytes_per_s if target.wire_bytes_per_s else 0.0
        fused = subject.compile or target.kind == "tpu"
        kernels_s = step.kernels_s(rate, target.bytes_per_s, fused) + waiting

    collectives = [collective for collective, _ in exchanged]
    if tensor_wire:
        # Half of what is sent in a ring for a sum over many ranks is the size of what is summed.
        summed = tensor_wire * layout.tensor / (2 * (layout.tensor - 1))
        collectives.append(Collective("all-reduce", step.units, int(summed)))
    return with_times(
        subject,
        target,
        batch_size=size * layout.data,
        groups=layout.data,
        fits=step.peak_bytes <= target.memory_bytes,
        memory=Memory(
            limit=target.memory_bytes,
            peak=step.peak_bytes,
            arguments=step.state_bytes,
            temporaries=step.peak_bytes - step.state_bytes,
        ),
        flops=step.flops,
        convolutions=convolutions,
        nbytes=float(step.traffic_bytes),
        accessed=None,
        collectives=tuple(collectives),
        wire=wire,
        kernels_s=kernels_s,
        largest_batch=None,
        searched=False,
        counted_by="the graph",
        problem=None if rate else f"the catalog has no rate of {target.name} for {subject.precision}.",
        layout=layout,
        strategy=layout.written(blocks),
    )


def _collectives(layout: Layout, step: RankStep) -> list[tuple[Collective, int]]:
    """List what a step exchanges for its state, and the number of devices that take part in each."""
    if not layout.sharded:
        return [(Collective("all-reduce", 1, int(step.averaged_bytes)), layout.devices)] if layout.devices > 1 else []
    exchanged: list[tuple[Collective, int]] = []
    weights = step.block_bytes + step.root_bytes
    # Gradients are averaged in the type of the master weights.
    part = int(weights * step.widening / layout.shards)
    if layout.shards > 1:
        gathered = weights + (step.block_bytes if layout.reshards else 0.0)
        count = step.units + (step.units - 1) * layout.reshards
        exchanged.append((Collective("all-gather", count, int(gathered)), layout.shards))
        exchanged.append((Collective("reduce-scatter", step.units, part), layout.shards))
    if layout.replicas > 1:
        exchanged.append((Collective("all-reduce", step.units, part), layout.replicas))
    return exchanged
