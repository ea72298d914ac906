"""A step that has run out of memory: what the device's memory held, and the batch that would fit.

    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. …
    cuda:0 has 79.1 GiB for this process. It held at most:
        1.2 GiB  parameters and buffers
        1.2 GiB  gradients
        2.5 GiB  the optimizer's state
        0.1 GiB  the batch (512 rows)
       73.1 GiB  the rest: mostly activations, which grow with the batch
    A step of 512 rows needs about 141.0 GiB, by an estimate from its operations. About 270 rows fit. …

The estimate captures the step twice, with a batch of the same size and of half the size, on tensors without memory
(`step/xla/capture/needs.py`). The difference is the memory that grows with the batch. There is no estimate if the step
can't be captured, or if the weights are sharded or copied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from footplate.hardware.transfer import batch_rows, movable

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)

GIB = 2**30
# The allocator can't use all memory: its blocks leave gaps. The estimate has been within a tenth of the measured peak.
USABLE = 0.9


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception says that the memory of a device, or of the host, is exhausted."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        all(word in text for word in words)
        for words in (
            ("CUDA", "out of memory"),
            ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",),
            ("DefaultCPUAllocator: can't allocate memory",),
            ("MPS backend out of memory",),
            ("RESOURCE_EXHAUSTED",),
        )
    )


def explain_memory(run: Run, error: BaseException) -> None:
    """Add a note to an exception that says that memory is exhausted. Nothing is added to any other exception."""
    if not is_out_of_memory(error) or run.accelerator.owns_weights or not run.config.enable_monitor:
        return
    held = Held.of(run)
    lines = held.lines()
    if held.rows > 1:
        try:
            size, growing = estimate(run)
        except Exception as other:
            # The user's code is called again, on tensors without memory, and may raise anything.
            log.debug("There is no estimate of the step's memory: %s: %s", type(other).__name__, other)
        else:
            lines += advice(held, run.config.accumulate_grad_batches, size, growing)
    error.add_note("\n".join(lines))


@dataclass(frozen=True)
class Held:
    """The bytes that a device's memory held.

    Attributes:
        device: the device.
        parameters: parameters and buffers.
        gradients: gradients.
        optimizers: the state of the optimizers.
        batch: the batch of the step.
        rows: the rows of the batch.
        most: the most that was allocated at once; None if torch doesn't count it on this device.
        limit: the bytes that this process can have; None if unknown.
    """

    device: str
    parameters: int
    gradients: int
    optimizers: int
    batch: int
    rows: int
    most: int | None = None
    limit: int | None = None

    @classmethod
    def of(cls, run: Run) -> Held:
        """Read what a run's device holds."""
        device = run.device
        parameters = list(run.module.parameters())
        batch = run.metrics.batch if run.in_step else None
        states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
        most, limit = _most_and_limit(device)
        return cls(
            str(device),
            _nbytes(device, [*parameters, *run.module.buffers()]),
            _nbytes(device, [parameter.grad for parameter in parameters]),
            _nbytes(device, (value for state in states for value in state.values())),
            _nbytes(device, movable(batch)),
            batch_rows(batch) if batch is not None else 0,
            most,
            limit,
        )

    def lines(self) -> list[str]:
        """Describe it, a line for each part."""
        parts = {
            "parameters and buffers": self.parameters,
            "gradients": self.gradients,
            "the optimizer's state": self.optimizers,
            f"the batch ({self.rows} rows)": self.batch,
        }
        if self.most is not None:
            rest = "the rest: mostly activations, which grow with the batch" if self.rows else "the rest"
            parts[rest] = max(0, self.most - sum(parts.values()))
        having = f"{self.device} has {self.limit / GIB:.1f} GiB for this process. It" if self.limit else self.device
        named = [f"  {nbytes / GIB:6.1f} GiB  {name}" for name, nbytes in parts.items() if nbytes]
        return [f"{having} held{' at most' if self.most else ''}:", *named]


def advice(held: Held, accumulates: int, size: int, growing: int) -> list[str]:
    """Tell which batch fits.

    Args:
        held: what the memory held.
        accumulates: the present `accumulate_grad_batches`.
        size: the bytes that a step needs by the estimate.
        growing: the part of them that grows with the batch.
    """
    lines = [f"A step of {held.rows} rows needs about {size / GIB:.1f} GiB, by an estimate from its operations."]
    if held.limit is None:
        return lines
    fitting = int((USABLE * held.limit - (size - growing)) / (growing / held.rows))
    if fitting < 1:
        lines[0] += " Not even one row fits."
        return lines
    if fitting >= held.rows:
        lines[0] += " That would fit: other tensors hold the memory, or it lies in pieces that are too small."
        return lines
    lines[0] += f" About {fitting} rows fit."
    parts = next(
        (parts for parts in range(2, held.rows + 1) if held.rows % parts == 0 and held.rows // parts <= fitting), 0
    )
    if parts:
        lines.append(
            f"Use batch_size={held.rows // parts} with accumulate_grad_batches={accumulates * parts}: "
            "as many rows make an optimizer step."
        )
    return lines


def estimate(run: Run) -> tuple[int, int]:
    """Estimate the bytes that a training step needs, and the part of them that grows with the batch.

    Raises:
        CaptureError: the step can't be captured.
        ValueError: the weights are sharded or copied, which the estimate doesn't know.
    """
    from footplate.step.optimizers import configure
    from footplate.step.xla.capture import capture_training
    from footplate.step.xla.capture.emptied import empty_copy, resized_leaf
    from footplate.step.xla.capture.needs import needs
    from footplate.step.xla.capture.torch_tracing import pytree

    if run.logical is not None or run.parallel.copies or run.parallel.sharded:
        raise ValueError("sharded or copied weights")
    batch, rows = run.metrics.batch, batch_rows(run.metrics.batch)
    # The same sizes, in a type that the capture knows.
    precision = "bf16-mixed" if run.precision.name == "16-mixed" else run.precision.name
    peaks = []
    for size in (rows, rows // 2):
        module = empty_copy(run.module, "meta")
        object.__setattr__(module, "_trainer", run.trainer)
        optimizers, _ = configure(module)
        captured = capture_training(
            module,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            pytree.tree_map(lambda leaf, size=size: resized_leaf(leaf, size, precision), batch),
            gradient_clip_val=run.config.gradient_clip_val,
            precision=precision,
        )
        peaks.append(needs(captured).peak_bytes)
    whole, half = peaks
    return whole, max(1, int((whole - half) * rows / (rows - rows // 2)))


def _most_and_limit(device: torch.device) -> tuple[int | None, int | None]:
    """Return the most bytes that torch had on a device at once, and the bytes that this process can have."""
    if device.type != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info(device)
    limit = free + torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_allocated(device), min(limit, int(_fraction(device) * total))


def _fraction(device: torch.device) -> float:
    """Return the share of the memory that `torch.cuda.set_per_process_memory_fraction` allows."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if ask is None else ask(device)


def _nbytes(device: torch.device, values: Iterable[Any]) -> int:
    """Count the bytes of tensors on a device. Tensors that share their memory count once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in _storages(device, values)}
    return sum(storages.values())


def _storages(device: torch.device, values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor) and value.device.type == device.type and value.layout == torch.strided:
            local = value._local_tensor if hasattr(value, "_local_tensor") else value  # pyright: ignore
            yield local.untyped_storage()
