"""What one rank needs for a step, in a given layout: arithmetic, kernels, memory, and what it sends.

    a copy on the meta device → cut for tensor parallelism → shortened to a few equal blocks → captured → counted

Two captures with different numbers of equal blocks give the needs of the whole model (`equal_blocks.py`), and two with
different numbers of rows give those of any batch size (`batch_rows.py`).

Under FSDP2 in a mixed precision, parameters are gathered in the 16-bit type, so the copy has parameters of that type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from footplate.distributed.activation_checkpointing import checkpoint_activations
from footplate.distributed.fsdp import repeated_blocks
from footplate.planning.batch_rows import FEW_ROWS, MANY_ROWS, GrowingStep
from footplate.planning.equal_blocks import FEWER, MORE, longest_list, shorten
from footplate.planning.layouts import Layout
from footplate.planning.rank_memory import Section, Sections, memory_of
from footplate.planning.subject import Subject, capture_prepared, prepared
from footplate.planning.tensor_cut import Exchanges, cut
from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.needs import Kernel, Needs, kernels_of, needs

# A tensor of this size is in no GPU's second-level cache: the largest is 126 MB, of a B200.
LARGER_THAN_CACHE = 2**27

# The captures that are kept: each may take 0.4 GB. Layouts that share one are tried one after the other.
CAPTURES = 8

Kernels = tuple[tuple[Kernel, int], ...]


@dataclass(frozen=True)
class RankStep:
    """The needs of a step of one rank.

    Attributes:
        flops: floating-point operations.
        convolution_flops: the part of convolutions in `flops`.
        traffic_bytes: the bytes that the step must move at least.
        peak_bytes: the most memory that is alive at once.
        state_bytes: the memory that lasts from step to step: state and batch.
        averaged_bytes: with "ddp", the gradients, statistics and logs that each device exchanges.
        block_bytes: the gathered weights of all blocks.
        root_bytes: the gathered weights that belong to no block.
        widening: the bytes of a master weight for each byte of a gathered one.
        units: the number of blocks, and the root.
        forward_wire: bytes that a rank sends for tensor parallelism while the next operation waits.
        backward_wire: bytes that it sends for tensor parallelism in the backward pass.
        kernels: pairs of a kernel of an eager step and the number of times that it runs.
        fused_kernels: the same for a compiled step, whose elementwise operations are fused.
    """

    flops: float
    convolution_flops: float
    traffic_bytes: float
    peak_bytes: int
    state_bytes: int
    averaged_bytes: float
    block_bytes: float
    root_bytes: float
    widening: float
    units: int
    forward_wire: float
    backward_wire: float
    kernels: Kernels
    fused_kernels: Kernels

    def kernels_s(self, flops_per_s: float, bytes_per_s: float, fused: bool) -> float:
        """Return the least time of all kernels, one after the other, in seconds."""
        kernels = self.fused_kernels if fused else self.kernels
        return sum(times * max(kernel.flops / flops_per_s, kernel.nbytes / bytes_per_s) for kernel, times in kernels)


@dataclass(frozen=True)
class _Sample:
    """A capture of the model, perhaps shortened."""

    captured: Captured
    counted: Needs
    blocks: tuple[tuple[str, ...], ...]
    exchanges: Exchanges
    widening: float


class _GrowingSample:
    """A capture that is known with any number of rows. See `GrowingStep`."""

    def __init__(self, few: _Sample, many: _Sample) -> None:
        self._few, self._many = few, many.exchanges
        self._step = GrowingStep(few.captured, many.captured)

    @contextmanager
    def with_rows(self, rows: int) -> Iterator[_Sample]:
        exchanges = self._few.exchanges.extended(self._many, (rows - FEW_ROWS) / (MANY_ROWS - FEW_ROWS))
        with self._step.with_rows(rows) as captured:
            yield replace(self._few, counted=needs(captured), exchanges=exchanges)


class RankSteps:
    """Counts the steps of a subject in any layout and batch size. Captures that layouts share are made once.

    Attributes:
        blocks_class: the class of the repeated blocks; None if there are none.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        module = prepared(subject)
        blocks = list(repeated_blocks(module))
        self.blocks_class = type(blocks[0]).__name__ if blocks else None
        self._list = longest_list(module)
        self._sample: Callable[..., _Sample] = lru_cache(CAPTURES)(self._make)
        self._growing: Callable[..., _GrowingSample | None] = lru_cache(CAPTURES)(self._make_growing)

    def of(self, layout: Layout, size: int, captured: bool = True) -> RankStep:
        """Count the step of one rank.

        Args:
            layout: how devices share the training.
            size: the number of rows of a rank's batch.
            captured: True to capture the step with this batch; False to follow it from two small batches if possible.

        Raises:
            CaptureError: the step can't be captured.
            ConfigError: the model can't be cut for tensor parallelism.
        """
        kind = "sharded" if layout.sharded else "averaged" if layout.devices > 1 else "alone"
        arguments = layout.tensor, layout.checkpoints, kind
        counts, blocks = ([None], None) if self._list is None else ([FEWER, MORE], self._list[1])
        if not captured and size > MANY_ROWS and size % FEW_ROWS == 0:
            growing = [self._growing(count, *arguments) for count in counts]
            with ExitStack() as stack:
                samples = [stack.enter_context(each.with_rows(size)) for each in growing if each is not None]
                if len(samples) == len(counts):
                    return _step(samples, blocks, layout)
        return _step([self._sample(count, size, *arguments) for count in counts], blocks, layout)

    def _make_growing(self, count: int | None, *arguments: Any) -> _GrowingSample | None:
        """Capture with few rows and with many; None if that fails, or if the two don't tell the step with more rows."""
        try:
            few, many = (self._sample(count, size, *arguments) for size in (FEW_ROWS, MANY_ROWS))
            return _GrowingSample(few, many)
        except Exception:
            # The model may not work with so few rows. If it never does, the capture with the asked rows says why.
            return None

    def _make(self, count: int | None, size: int, tensor: int, checkpoints: bool, kind: str) -> _Sample:
        subject = self._subject
        module = prepared(subject)
        if count is not None and self._list is not None:
            shorten(module, self._list[0], count)
        exchanges = cut(module, tensor) if tensor > 1 else Exchanges()
        blocks = list(repeated_blocks(module))
        if checkpoints:
            checkpoint_activations(blocks)
        widening = _gather_in_16_bits(module) if kind == "sharded" and subject.precision == "bf16-mixed" else 1.0

        names = {id(parameter): name for name, parameter in module.named_parameters()}
        of_blocks = tuple(tuple(names[id(parameter)] for parameter in block.parameters()) for block in blocks)
        captured = capture_prepared(subject, module, size, averages=kind == "averaged")
        return _Sample(captured, needs(captured), of_blocks, exchanges, widening)


def _gather_in_16_bits(module: nn.Module) -> float:
    """Give the parameters the type in which FSDP2 gathers them; returns the widening of the master weights."""
    for parameter in module.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)
    return 2.0


def _step(samples: Sequence[_Sample], count: int | None, layout: Layout) -> RankStep:
    """Combine samples with fewer and with more blocks into the step of `count` blocks."""
    steps = [_one(sample, layout) for sample in samples]
    memory = [memory_of(sample.captured, sample.blocks, layout, sample.widening) for sample in samples]
    fewer, more = steps[0], steps[-1]
    if count is None:
        peak = max(map(max, memory[0].values()))
        return RankStep(peak_bytes=peak, units=len(samples[0].blocks) + 1, **_values(fewer))

    added = count - FEWER
    values = {
        name: value + added * (_values(more)[name] - value)
        for name, value in _values(fewer).items()
        if name not in ("kernels", "fused_kernels", "widening")
    }
    kernels = _extended_kernels(fewer.kernels, more.kernels, added)
    fused_kernels = _extended_kernels(fewer.fused_kernels, more.fused_kernels, added)
    units = len(samples[0].blocks) - FEWER + count + 1
    peak = _extended_peak(memory[0], memory[1], added)
    return RankStep(
        peak_bytes=peak, units=units, widening=fewer.widening, kernels=kernels, fused_kernels=fused_kernels, **values
    )


def _extended_kernels(fewer: Kernels, more: Kernels, added: int) -> Kernels:
    """Extend the kernels by `added` blocks: those of `more` as often, and those of `fewer` less often by as much."""
    return (*((kernel, added) for kernel, _ in more), *((kernel, 1 - added) for kernel, _ in fewer))


@dataclass(frozen=True)
class _One:
    """The needs of one sample, as in `RankStep`."""

    flops: float
    convolution_flops: float
    traffic_bytes: float
    state_bytes: int
    averaged_bytes: float
    block_bytes: float
    root_bytes: float
    widening: float
    forward_wire: float
    backward_wire: float
    kernels: Kernels
    fused_kernels: Kernels


def _values(one: _One) -> dict[str, Any]:
    return dict(vars(one))


def _one(sample: _Sample, layout: Layout) -> _One:
    counted, captured = sample.counted, sample.captured
    nodes = list(captured.graph.graph.nodes)
    sizes = {
        str(path[1]): node.meta["val"].nbytes
        for node, path in zip(nodes, captured.paths, strict=False)
        if path[0] == "params"
    }
    blocks = sum(sizes[name] for names in sample.blocks for name in names)
    part = sample.widening / layout.shards if layout.sharded else 1.0
    state = counted.state_bytes * part

    # The optimizer reads and writes its part of the state once.
    step = [node for node in nodes if "optimizer" not in node.meta and node.op == "call_function"]
    optimizer = Kernel(0.0, int(2 * state))
    kernels, fused = ([*kernels_of(step, LARGER_THAN_CACHE, compiled), optimizer] for compiled in (False, True))
    return _One(
        flops=counted.flops,
        convolution_flops=counted.convolution_flops,
        traffic_bytes=counted.traffic_bytes - 2 * counted.state_bytes + 2 * state,
        state_bytes=int(state) + counted.batch_bytes,
        averaged_bytes=counted.averaged_bytes,
        block_bytes=blocks,
        root_bytes=sum(sizes.values()) - blocks,
        widening=sample.widening,
        forward_wire=sum(sample.exchanges.forward),
        backward_wire=sum(sample.exchanges.backward),
        kernels=tuple((kernel, 1) for kernel in kernels),
        fused_kernels=tuple((kernel, 1) for kernel in fused),
    )


def _extended_peak(fewer: Sections, more: Sections, added: int) -> int:
    """Return the peak with `added` blocks more than in `fewer`.

    The first two and the last two blocks have the same neighbours in both captures, and in the whole model. Between them
    memory grows or falls evenly, so the peak isn't there.
    """
    most = 0
    for (section, block), alive in fewer.items():
        same: list[Section] = [(section, block)]
        if section in ("forward", "backward"):
            same = [(section, block)] * (block < FEWER - 1) + [(section, block + 1)] * (block > 0)
        for other in same:
            if other in more:
                most = max(most, _extended_section(alive, more[other], added))
    return most


def _extended_section(fewer: Sequence[int], more: Sequence[int], added: int) -> int:
    """Return the peak of a section. Its operations differ in how they grow, so each is extended by itself.

    An optimizer has operations for each parameter, and more of them with more blocks. Then the peaks are extended.
    """
    if len(fewer) != len(more):
        fewer, more = [max(fewer)], [max(more)]
    return max(few + added * (many - few) for few, many in zip(fewer, more, strict=True))
