"""Data parallelism in a single process: a copy of the module and a thread for each device.

Use it if you can't start processes: in a notebook that has used CUDA already, or on a host that allows no more. The process
reads whole batches, cuts each into rows, and steps its one optimizer. The devices share the forward and the backward pass:

    the process       batch, cut ┐                          ┌ loss, logs, zero_grad ┐          ┌ sum, clip, optimizer.step
    thread 0, module             ├──────────  training_step ┤                       ├ backward ┤
    thread 1, a copy             └ catch up ─ training_step ┘                       └ backward ┘

1. Each copy takes the module's parameters, buffers and plain values (`module_copies.py`).
2. All run `training_step` on their rows, which go from the first device to the others. Their logs are merged
   (`replica_logs.py`).
3. The process gets one loss: the copies' losses, weighted by rows, so that its gradient is that of the whole batch's mean.
   It is a leaf, detached from their graphs. Everything that is applied to it (a loss scale, the size of a window, hooks) is
   in its gradient.
4. Each thread runs the backward pass of its own loss, times that gradient.
5. The copies' gradients are added to the module's, in the order of copies, in flat buckets. They are sent when all backward
   passes have ended, so that the sum is the same in every run. Sending doesn't overlap with computing.

The module is trained as in one process on one device, and a checkpoint holds that. Its buffers are its own: running
statistics see its rows only. Each GPU's generator is seeded from (seed, batch, copy). The CPU has a single generator for
all threads. So on the CPU, and if two copies share a GPU, random draws depend on which thread comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core import rng
from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.distributed.base import Strategy
from footplate.distributed.batch_splitting import Piece, cut, joined
from footplate.distributed.buckets import buckets, moved
from footplate.distributed.device_threads import Threads
from footplate.distributed.loss_sum import LOSS_SUM
from footplate.distributed.module_copies import Copy
from footplate.distributed.replica_logs import together
from footplate.hardware.transfer import to_device


class Replicas(Strategy):
    """Data parallelism in one process; see the module's docstring.

    Args:
        devices: the module's own device first, then one for each copy.
    """

    name = "replicas"
    copies = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._threads: Threads | None = None
        self._copies: list[Copy] = []
        # Each parameter of the module, with its copies.
        self._buckets: list[list[list[Tensor]]] = []
        self._loss: Tensor | None = None
        # The loss of each copy, and its share.
        self._losses: dict[int, tuple[Tensor, float]] = {}

    def check(self, module: Any) -> None:
        name = type(module).__name__
        if not module.automatic_optimization:
            raise ConfigError(
                'strategy="replicas" runs the backward pass itself, which excludes automatic_optimization = False: '
                'use strategy="ddp".'
            )
        if overrides(module, "backward"):
            raise ConfigError(
                f'strategy="replicas" runs a backward pass on each device, so it would never call {name}.backward(): '
                'remove it, or use strategy="ddp".'
            )
        for path, part in module.named_modules():
            if getattr(part, "sparse", None) is True:
                raise ConfigError(
                    f'strategy="replicas" adds up dense gradients, and {path} ({type(part).__name__}) has sparse=True: '
                    "leave that out."
                )

    def prepare(self, module: nn.Module) -> None:
        if self._devices[0].type == "cuda":
            torch.cuda.set_device(self._devices[0])

    def training_step(self, module: Any) -> Callable[..., Any]:
        # Free their memory before new copies are made.
        self._copies = []
        self._copies = [Copy(module, device) for device in self._devices[1:]]
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets = [
            [[own, *(copy.counterpart[id(own)] for copy in self._copies)] for own in bucket]
            for bucket in buckets(learning)
        ]
        if self._threads is None:
            self._threads = Threads(self._devices)
        return functools.partial(self._forward, module, self._threads)

    def backward(self) -> None:
        loss, losses = self._loss, self._losses
        self._loss, self._losses = None, {}
        if loss is None or loss.grad is None or self._threads is None:
            return
        gradient = loss.grad
        self._threads.run(
            {
                index: functools.partial(
                    torch.autograd.backward, own, to_device(gradient * share, self._devices[index])
                )
                for index, (own, share) in losses.items()
            }
        )
        del losses
        if len(self._buckets) == 1:
            self._add_up(self._buckets)
        else:
            count = len(self._devices)
            self._threads.run({i: functools.partial(self._add_up, self._buckets[i::count]) for i in range(count)})

    def release(self) -> None:
        self._copies, self._buckets, self._loss, self._losses = [], [], None, {}
        if self._threads is not None:
            self._threads.end()
            self._threads = None

    def _forward(self, module: Any, threads: Threads, batch: Any, *arguments: Any) -> Any:
        pieces = cut(batch, len(self._devices))
        copies = self._copies[: len(pieces) - 1]
        threads.run({index: copy.catch_up for index, copy in enumerate(copies, 1)})
        run = _in_autocast(self._devices[0].type, functools.partial(self._train_on, module, arguments))
        with module.trainer.metrics.apart(threads.idents[: len(pieces)]) as calls:
            outputs = threads.run({index: functools.partial(run, index, piece) for index, piece in enumerate(pieces)})
        for copy in copies:
            _refuse_metrics(copy)
        rows = [piece.rows for piece in pieces]
        for call in together(calls, rows, self._devices[0]):
            module.trainer.metrics.record(call)
        return self._one_output([outputs[index] for index in range(len(pieces))], pieces)

    def _train_on(self, module: Any, arguments: tuple[Any, ...], index: int, piece: Piece) -> Any:
        """Run the training step of one copy, in its thread."""
        device, batch = self._devices[index], piece.batch
        if index:
            if device not in self._devices[:index]:
                trainer = module.trainer
                seed = rng.device_seeder(device)
                if seed is not None:
                    seed(rng.mix(trainer.seed, index) + trainer.progress.batches)
            module = self._copies[index - 1].module
        if device != self._devices[0]:
            batch = to_device(batch, device)
        return module.training_step(batch, *arguments)

    def _one_output(self, outputs: Sequence[Any], pieces: Sequence[Piece]) -> Any:
        """Join the outputs to that of one training step with the whole batch. Keeps the copies' losses for `backward`."""
        key = LOSS_SUM if any(isinstance(output, Mapping) and LOSS_SUM in output for output in outputs) else "loss"
        losses = [output.get(key) if isinstance(output, Mapping) else output for output in outputs]
        self._losses = {
            index: (loss, 1.0 if key == LOSS_SUM else piece.share)
            for index, (loss, piece) in enumerate(zip(losses, pieces, strict=True))
            if isinstance(loss, Tensor) and loss.requires_grad
        }
        output = joined(outputs, pieces, self._devices[0])
        self._loss = output.get(key) if isinstance(output, Mapping) else output
        if self._losses and isinstance(self._loss, Tensor):
            self._loss.requires_grad_()
        return output

    def _add_up(self, some: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        """Add the copies' gradients of some buckets to the module's, and clear them."""
        for bucket in some:
            for index in range(1, len(self._devices)):
                pairs = [(row[0], row[index]) for row in bucket if row[index].grad is not None]
                if pairs:
                    _add([own for own, _ in pairs], [theirs for _, theirs in pairs], self._devices[0])


@torch.no_grad()
def _add(own: Sequence[Tensor], theirs: Sequence[Tensor], device: torch.device) -> None:
    gradients: list[Tensor] = []
    for parameter in theirs:
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    sums, added = [], []
    for parameter, gradient in zip(own, moved(gradients, device), strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            sums.append(parameter.grad)
            added.append(gradient)
    if sums:
        torch._foreach_add_(sums, added)  # pyright: ignore[reportPrivateImportUsage]


def _in_autocast(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that another thread runs it under the autocast of this one."""
    if not torch.is_autocast_enabled(kind):
        return function
    dtype = torch.get_autocast_dtype(kind)

    def run(*args: Any) -> Any:
        with torch.autocast(kind, dtype=dtype):
            return function(*args)

    return run


def _refuse_metrics(copy: Copy) -> None:
    path = copy.updated_metric()
    if path is not None:
        raise ConfigError(
            f'strategy="replicas": training_step updates the torchmetrics object {path}. Each device has a copy of it that '
            'sees only its own rows. Log plain values there (validation may use it), or use strategy="ddp".'
        )
