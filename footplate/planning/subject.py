"""The training that is planned for: a module, an example of its batches, and how long it is to train.

Nothing of the user's is changed or filled with numbers: what is captured is a copy of the module whose tensors lie on
torch's meta device, where they have a shape and no memory. A trainer that trains nothing stands in for the real one, for
those modules that ask it in `configure_optimizers` how many steps there will be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.step.optimizers import configure
from footplate.step.precision import Precision
from footplate.step.xla.capture import Captured, CaptureError, capture_training
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.training.status import TrainerFn

PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed"}
NAMES = ("32-true", "bf16-mixed", "bf16-true")


@dataclass(frozen=True)
class Subject:
    """What is planned.

    Attributes:
        name: for people.
        module: a `footplate.Module` or a `LightningModule`; its weights aren't used.
        batch: an example: a tree of tensors, the first dimension of each being the batch's.
        batch_size: of the global batch: of all devices together.
        precision: one of `NAMES`.
        rows: of the data set; None if nobody said.
        epochs: how often it is gone through.
        gradient_clip_val: as the `Trainer`'s.
        assumed: sentences about what was not said and is assumed.
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

    @property
    def steps(self) -> int:
        """Of the whole training, as far as it is known."""
        return max(1, -(-(self.rows or self.batch_size) // self.batch_size)) * self.epochs


def require_sizes(batch_size: int | None, rows: int | None, epochs: int | None) -> None:
    """See that numbers that somebody gave can be numbers of samples and epochs.

    Raises:
        ConfigError: one of them can't.
    """
    limits = ("batch_size", batch_size, 2**31), ("dataset_rows", rows, 10**15), ("epochs", epochs, 10**9)
    for name, value, most in limits:
        if value is not None and not (isinstance(value, int) and 1 <= value <= most):
            raise ConfigError(f"{name}={str(value)[:40]}: expected a whole number from 1 to {most:,}.")


def precision_of(name: str) -> str:
    """A precision by any of its names.

    Raises:
        ConfigError: one that can't be planned.
    """
    found = PRECISIONS.get(name, name)
    if found not in NAMES:
        raise ConfigError(f'precision="{name}": a plan knows {", ".join((*PRECISIONS, *NAMES))}.')
    return found


def per_device(subject: Subject, devices: int) -> int:
    """The part of the batch that one device has.

    Raises:
        ConfigError: the batch can't be shared out evenly.
    """
    size, rest = divmod(subject.batch_size, devices)
    if rest:
        near = sorted({max(1, size) * devices, (size + 1) * devices})
        raise ConfigError(
            f"batch_size={subject.batch_size} can't be shared by {devices} devices evenly. It is the global batch, of all "
            f"devices together; take {' or '.join(map(str, near))}."
        )
    return size


def captured(subject: Subject, size: int, averages: bool) -> Captured:
    """The training step of one device.

    Args:
        subject: what is planned.
        size: of the batch of one device.
        averages: whether there are other devices, to average gradients with.

    Raises:
        CaptureError: the step can't be captured.
        ConfigError: the module has no optimizer, or several.
    """
    module = prepared(subject)
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
    """The module as a trainer would begin with it, without weights: its hooks called, its precision set."""
    module = empty_copy(subject.module, "meta")
    object.__setattr__(module, "_trainer", _Trainer(subject))
    if overrides(module, "setup"):
        module.setup(stage=TrainerFn.FITTING)
    if overrides(module, "configure_model"):
        module.configure_model()
    Precision.parse(subject.precision).convert_module(module)
    return module


def empty_copy(module: Any, device: str) -> Any:
    """A copy of a module whose parameters and buffers are new and unfilled; those that are shared in it stay shared.

    Args:
        module: what is copied.
        device: where they lie; on "meta" they have shapes and no memory.
    """
    kept: dict[int, Any] = {}
    for parameter in module.parameters():
        kept[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    for buffer in module.buffers():
        kept[id(buffer)] = torch.empty_like(buffer, device=device)
    return copy.deepcopy(module, kept)


def batch_size_of(batch: Any) -> int:
    """How many samples an example batch has.

    Raises:
        ConfigError: its tensors don't agree.
    """
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise ConfigError(f"batch: its tensors' first dimensions are {sorted(sizes)}; expected one number of samples.")
    return sizes.pop()


def example_of(data: Any) -> Any:
    """An example batch: a batch itself, or the first one of a loader, a list of batches, or a data module.

    Raises:
        ConfigError: there is no batch in it.
    """
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup(stage=TrainerFn.FITTING)
        data = data.train_dataloader()
    if isinstance(data, list) and data and all(isinstance(item, (dict, tuple, list)) for item in data):
        return data[0]  # batches, one after the other, as `fit` takes them
    if isinstance(data, (Tensor, dict, tuple, list)):
        return data
    if not isinstance(data, Iterable):
        raise ConfigError(f"data: expected a batch, a loader or a data module, got a {type(data).__name__}.")
    for batch in data:
        return batch
    raise ConfigError("data: the training loader is empty.")


def resized_leaf(leaf: Any, size: int, precision: str) -> Any:
    """A leaf of a batch for so many samples, without memory."""
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = torch.bfloat16 if precision == "bf16-true" and leaf.is_floating_point() else leaf.dtype
    return torch.empty((size, *leaf.shape[1:]) if leaf.dim() else (), dtype=dtype, device="meta")


class _Trainer:
    """What a plan knows of the trainer there will be."""

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
        raise CaptureError(f"the module asks its trainer for {name}, which isn't known before there is one.")
