"""The subject of a plan: a module, an example of its batches, and the length of its training.

The plan doesn't change the user's module. It captures a copy whose tensors are on torch's meta device, where they have a
shape but no memory. Some modules ask their trainer in `configure_optimizers` for the number of steps; a stand-in for the
trainer answers that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.planning.layouts import Strategy
from footplate.step.optimizers import configure
from footplate.step.precision import Precision
from footplate.step.xla.capture import Captured, CaptureError, capture_training
from footplate.step.xla.capture.emptied import empty_copy, resized_leaf
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.training.status import TrainerFn

PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed"}
NAMES = ("32-true", "bf16-mixed", "bf16-true")


@dataclass(frozen=True)
class Subject:
    """A training to plan.

    Attributes:
        name: the name in tables.
        module: a `footplate.Module` or a `LightningModule`; its weights aren't used.
        batch: an example batch: a tree of tensors whose first dimension is the batch.
        batch_size: the global batch size, of all devices together.
        precision: one of `NAMES`.
        rows: the number of rows of the data set; None if unknown.
        epochs: the number of epochs.
        gradient_clip_val: as for the `Trainer`.
        assumed: sentences that state the assumptions.
        strategy: how devices share the training: one of `layouts.STRATEGIES`, or a strategy with its options.
        compile: True if GPUs run a compiled step, whose elementwise operations are fused.
        free_batch: True if the plan chooses the batch size of each target, and `batch_size` is only an example.
    """

    name: str
    module: Any
    batch: Any
    batch_size: int
    precision: str = "32-true"
    rows: int | None = None
    epochs: int = 1
    gradient_clip_val: float | None = None
    assumed: tuple[str, ...] = ()
    strategy: Strategy = "auto"
    compile: bool = False
    free_batch: bool = False

    @property
    def steps(self) -> int:
        """The number of steps of the whole training; with unknown rows, of one step per epoch."""
        return max(1, -(-(self.rows or self.batch_size) // self.batch_size)) * self.epochs


def require_sizes(batch_size: int | None, rows: int | None, epochs: int | None) -> None:
    """Check the range of the numbers of samples and epochs.

    Raises:
        ConfigError: a number is out of range.
    """
    limits = ("batch_size", batch_size, 2**31), ("dataset_rows", rows, 10**15), ("epochs", epochs, 10**9)
    for name, value, most in limits:
        if value is not None and not (isinstance(value, int) and 1 <= value <= most):
            raise ConfigError(f"{name}={str(value)[:40]}: expected a whole number from 1 to {most:,}.")


def precision_of(name: str) -> str:
    """Translate a precision to its full name, one of `NAMES`.

    Raises:
        ConfigError: a plan doesn't know this precision.
    """
    full_name = PRECISIONS.get(name, name)
    if full_name not in NAMES:
        raise ConfigError(f'precision="{name}": expected one of {", ".join((*PRECISIONS, *NAMES))}.')
    return full_name


def per_device(subject: Subject, devices: int) -> int:
    """Compute the batch size of one device.

    Raises:
        ConfigError: the batch can't be divided evenly.
    """
    size, rest = divmod(subject.batch_size, devices)
    if rest:
        near = sorted({max(1, size) * devices, (size + 1) * devices})
        raise ConfigError(
            f"batch_size={subject.batch_size} can't be divided evenly by {devices} devices. It is the global batch size, "
            f"of all devices together; take {' or '.join(map(str, near))}."
        )
    return size


def captured(subject: Subject, size: int, averages: bool) -> Captured:
    """Capture the training step of one device.

    Args:
        subject: the training.
        size: the batch size of one device.
        averages: True if the step averages gradients with other devices.

    Raises:
        CaptureError: the step can't be captured.
        ConfigError: the module has no optimizer, or several.
    """
    return capture_prepared(subject, prepared(subject), size, averages)


def capture_prepared(subject: Subject, module: Any, size: int, averages: bool) -> Captured:
    """Capture the training step of one device, for a module that `prepared` has made. See `captured`."""
    optimizers, _ = configure(module)
    if len(optimizers) != 1:
        raise ConfigError(
            f"{subject.name}: a plan needs one optimizer; configure_optimizers() returned {len(optimizers)}."
        )
    batch = pytree.tree_map(lambda leaf: resized_leaf(leaf, size, subject.precision), subject.batch)
    clip, precision = subject.gradient_clip_val, subject.precision
    return capture_training(
        module, optimizers[0], batch, gradient_clip_val=clip, averages=averages, precision=precision
    )


def prepared(subject: Subject) -> Any:
    """Copy the module without weights, and prepare it like a trainer: call its hooks, and set its precision."""
    module = empty_copy(subject.module, "meta")
    object.__setattr__(module, "_trainer", _Trainer(subject))
    if overrides(module, "setup"):
        module.setup(stage=TrainerFn.FITTING)
    if overrides(module, "configure_model"):
        module.configure_model()
    Precision.parse(subject.precision).convert_module(module)
    return module


def batch_size_of(batch: Any) -> int:
    """Count the samples of an example batch.

    Raises:
        ConfigError: the first dimensions of its tensors differ.
    """
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise ConfigError(f"batch: the first dimensions of its tensors are {sorted(sizes)}; expected them to be equal.")
    return sizes.pop()


def example_of(data: Any) -> Any:
    """Take an example batch: `data` itself, or the first batch of a loader, a list of batches, or a data module.

    Raises:
        ConfigError: `data` has no batch.
    """
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup(stage=TrainerFn.FITTING)
        data = data.train_dataloader()

    # A list of dicts, tuples or lists is a list of batches, as for `fit`.
    if isinstance(data, list) and data and all(isinstance(item, (dict, tuple, list)) for item in data):
        return data[0]
    if isinstance(data, (Tensor, dict, tuple, list)):
        return data
    if not isinstance(data, Iterable):
        raise ConfigError(f"data: expected a batch, a loader or a data module, got a {type(data).__name__}.")
    for batch in data:
        return batch
    raise ConfigError("data: the training loader is empty.")


class _Trainer:
    """Stands in for the trainer, with the attributes that a plan knows."""

    def __init__(self, subject: Subject) -> None:
        self.estimated_stepping_batches = subject.steps
        self.max_epochs = subject.epochs
        self.max_steps = -1
        self.num_training_batches = -(-subject.steps // subject.epochs)
        self.accumulate_grad_batches = 1
        self.current_epoch = self.global_step = 0
        self.loggers: list[Any] = []
        self.logger = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(f"the module asks its trainer for {name}, which a plan doesn't know.")
