"""Data parallelism with logical ranks: the same gradients, bit for bit, on any number of processes.

A process computes the batches of its logical ranks one after another, each with a forward and a backward pass:

    begin_batch             the buffers (statistics of batch norm) become those of logical rank 0
    set_gradients_aside     gradients of earlier batches of the accumulation window wait
    for each logical rank:  begin_leaf → forward and backward → end_leaf
    end_batch               the mean of all gradients is in `.grad`, added to those that waited

Each backward pass begins without gradients, so it gives those of one logical rank alone: a leaf of the tree
(`logical_ranks.py`). `end_leaf` adds it to the sums of the leaves before, as far as the tree allows.

With several processes, the last of a process's backward passes runs inside torch's `DistributedDataParallel`. Its
communication hook gets each bucket as soon as its gradients are there, completes this process's nodes with it, and begins
the exchange (`tree_exchange.py`), while the backward pass goes on. A sum of single elements doesn't depend on the buckets.
With one process, everything is in its memory already.

**Parameters without a gradient.** With strategy="ddp", each logical rank must give every parameter a gradient. Otherwise
an error says so, on any number of processes. With "ddp_find_unused_parameters_true", a missing gradient counts as zeros.
A parameter that no logical rank has used keeps the gradient None, so the optimizer skips it. `DistributedDataParallel`
counts a parameter as used if an earlier backward pass has used it, so this strategy works without it: it exchanges the
gradients after the last backward pass.

**Buffers.** The forward passes of logical rank 0 change the buffers. The other logical ranks begin with the same buffers,
and their changes are dropped (`leaf_buffers.py`). Buffers are sent before each batch, since hooks may have changed them,
and after it.

**Skipped batches.** A parameter of its own, the mark, tells all ranks if every batch of a window was skipped. `ddp.py`
explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from footplate.core.errors import ConfigError
from footplate.distributed.buckets import buckets, send_from_first
from footplate.distributed.ddp import DDP, _learns, _Step
from footplate.distributed.leaf_buffers import LeafBuffers
from footplate.distributed.logical_ranks import merges, ranks_of, tree_sum
from footplate.distributed.tree_exchange import TreeExchange


class LogicalDDP(DDP):
    """See the module's docstring.

    Args:
        total: the number of logical ranks.
        process: the rank of this process.
        processes: the number of processes.
        find_unused_parameters: see above.
    """

    own_gradients = False

    def __init__(self, total: int, process: int, processes: int, find_unused_parameters: bool = False) -> None:
        super().__init__(find_unused_parameters)
        self.total = total
        self.own = ranks_of(process, processes, total)
        self._merges = merges(self.own, total)
        self._alone = processes == 1
        self._exchange: TreeExchange | None = None
        self._step: _Step | None = None
        self._indices: dict[int, int] = {}
        # The gradients of a node for each parameter; the nodes of the leaves so far, as `merges` describes.
        self._stack: list[list[Tensor]] = []
        self._position = 0
        self._versions: list[int] = []
        # By position of the leaf: which parameters had a gradient.
        self._present: list[list[bool]] = []
        self._aside: list[Tensor | None] = []

    def prepare(self, module: nn.Module) -> None:
        if not self._alone:
            super().prepare(module)

    def training_step(self, module: Any) -> Callable[..., Any]:
        self._module = module
        self.release()
        self._leaf_buffers = LeafBuffers(module, has_first=self.own.start == 0)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"{type(module).__name__} has no parameter to train: all are frozen (requires_grad=False)."
            )
        self._use(_Step(module, marks=self.skips))
        return self._forward

    def _use(self, step: _Step) -> None:
        """Let `step` be trained, with the parameters that learn now."""
        self._step = step
        if not self._alone and (self._exchange is None or not self._exchange.is_current):
            device = next(step.parameters()).device
            self._exchange = TreeExchange(self.total, device)
        self._learning = [parameter for parameter in step.parameters() if parameter.requires_grad]
        self._frozen = [parameter for parameter in step.parameters() if not parameter.requires_grad]
        if not self._alone and self.skips:
            self._wrap(step)
            assert self._wrapped is not None
            self._indices = {id(parameter): index for index, parameter in enumerate(self._learning)}
            self._wrapped.broadcast_buffers = False
            # torch refuses annotations that are text, as all are here.
            self._wrapped.register_comm_hook(None, lambda state, bucket: self._on_bucket(bucket))

    def _forward(self, *args: Any) -> Any:
        last = self._position == len(self.own) - 1
        if last and self._wrapped is not None:
            return self._wrapped(*args)
        return self._module.training_step(*args)

    @property
    def _mark(self) -> nn.Parameter | None:
        return None if self._step is None else self._step.mark

    # A batch

    def begin_batch(self, syncs: bool) -> None:
        step = self._step
        assert step is not None
        if any(map(_learns, self._frozen)) or not all(map(_learns, self._learning)):
            self.release()
            self._use(step)
        self._stack, self._present = [], []
        self._versions = [parameter._version for parameter in self._learning]
        self.sync_buffers(self._module)
        self._leaf_buffers.begin()

    def set_gradients_aside(self, begins_window: bool) -> None:
        """Keep the gradients of the window's earlier batches, so that each leaf has its own."""
        if begins_window and self._mark is not None:
            self._mark.grad = None
        self._aside = [parameter.grad for parameter in self._learning]
        for parameter in self._learning:
            parameter.grad = None

    def begin_leaf(self, position: int) -> None:
        """Prepare for the forward pass of this process's logical rank at a position."""
        self._leaf_buffers.begin_leaf(position)
        self._position = position
        self._in_buckets = [False] * len(self._learning)

    def marked(self, loss: Tensor, counts: bool, begins_window: bool) -> Tensor:
        mark = self._mark
        if mark is None or not loss.requires_grad:
            return loss
        return loss + (mark if counts else mark * 0.0)

    def end_leaf(self) -> None:
        """Take the gradients of the backward pass that has just ended.

        Raises:
            ConfigError: a parameter has none, and the strategy doesn't allow that.
        """
        position = self._position
        last = position == len(self.own) - 1
        self._leaf_buffers.end_leaf(position)
        if last and self._wrapped is not None:
            assert self._exchange is not None
            # The hook has seen the buckets of this leaf. DDP gives them back averaged.
            self._exchange.check()
            self._note_present(self._in_buckets)
            return
        gradients = [parameter.grad for parameter in self._learning]
        self._note_present([gradient is not None for gradient in gradients])
        leaf = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._learning, gradients, strict=True)
        ]
        for parameter in self._learning:
            parameter.grad = None
        self._stack.append(leaf)
        for _ in range(self._merges[position]):
            right = self._stack.pop()
            torch._foreach_add_(self._stack[-1], right)  # pyright: ignore[reportPrivateImportUsage]

    def end_batch(self) -> None:
        """Leave the mean gradients of all logical ranks in `.grad`, and the buffers of logical rank 0 in the module.

        Raises:
            ConfigError: a forward pass has changed a parameter, which the next logical rank would have seen.
        """
        changed = [p for p, version in zip(self._learning, self._versions, strict=True) if p._version != version]
        if changed:
            raise ConfigError(
                f"logical_ranks={self.total}: training_step() changed the parameter {self._name_of(changed[0])} in place, "
                "so the next logical rank began with other weights. Change parameters in on_train_batch_end()."
            )
        if self._alone:
            (mean,) = self._stack
            # As in `TreeExchange`: a foreach division may round in another way on a GPU.
            gradients: list[Tensor | None] = [gradient.div_(self.total) for gradient in mean]
        elif self._wrapped is not None:
            gradients = [parameter.grad for parameter in self._learning]
        else:
            gradients = self._exchanged()
        if not self.skips:
            used = self._used()
            gradients = [gradient if is_used else None for gradient, is_used in zip(gradients, used, strict=True)]

        for parameter, gradient, earlier in zip(self._learning, gradients, self._aside, strict=True):
            parameter.grad = earlier if gradient is None else gradient if earlier is None else earlier.add_(gradient)
        self._stack, self._aside = [], []
        self._leaf_buffers.end()
        # Callbacks, such as one that averages weights and buffers, find the same on all processes.
        self.sync_buffers(self._module)

    # The bucket of the last leaf

    def _on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Complete this process's nodes with a bucket of its last leaf, and begin to exchange them."""
        assert self._exchange is not None
        buffer, parameters = bucket.buffer(), bucket.parameters()
        views = _views(buffer, parameters)
        indices = [self._indices[id(parameter)] for parameter in parameters]
        for index in indices:
            self._in_buckets[index] = True
        nodes = [[node[index] for index in indices] for node in self._stack]
        for _ in range(self._merges[-1]):
            torch._foreach_add_(views, nodes.pop())  # pyright: ignore[reportPrivateImportUsage]
        # As they are in the bucket: a parameter may have another memory format than its gradient.
        flat = [[_as_in_memory(part, view) for part, view in zip(node, views, strict=True)] for node in nodes]
        return self._exchange.begin(buffer, [*flat, [buffer]])

    def _exchanged(self) -> list[Tensor | None]:
        """Return the mean gradients, exchanged after the last backward pass."""
        exchange, indices = self._exchange, {id(parameter): index for index, parameter in enumerate(self._learning)}
        assert exchange is not None
        begun = []
        for parameters in buckets(self._learning):
            flat = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
            views = _views(flat, parameters)
            members = [indices[id(parameter)] for parameter in parameters]
            nodes = [
                [_as_in_memory(node[index], view) for index, view in zip(members, views, strict=True)]
                for node in self._stack
            ]
            begun.append((members, views, exchange.begin(flat, nodes)))

        mean: list[Tensor | None] = [None] * len(self._learning)
        for members, views, future in begun:
            future.wait()
            for index, view in zip(members, views, strict=True):
                mean[index] = view.clone()
        exchange.check()
        return mean

    # Helpers

    def _note_present(self, present: list[bool]) -> None:
        self._present.append(present)
        if self.skips and not all(present):
            missing = next(p for p, has in zip(self._learning, present, strict=True) if not has)
            raise ConfigError(
                f"logical_ranks={self.total}: the loss of logical rank {self.own[self._position]} doesn't depend on the "
                f"parameter {self._name_of(missing)}. Freeze it (requires_grad_(False)), or use "
                'strategy="ddp_find_unused_parameters_true", which looks for such parameters in every step.'
            )

    def _name_of(self, parameter: Tensor) -> str:
        return next((name for name, other in self._module.named_parameters() if other is parameter), "")

    def _used(self) -> list[bool]:
        """Return which parameters any logical rank has used in this batch."""
        present = torch.tensor(self._present, dtype=torch.int32)
        if self._exchange is not None:
            device = self._learning[0].device
            present = self._exchange.gather(present.to(device)).cpu()
        return present.any(dim=0).tolist()

    def mean_of_leaves(self, values: list[Tensor]) -> Tensor:
        """Return the mean of numbers over all logical ranks, in the order of the tree.

        Args:
            values: one-element tensors of one type and device, of this process's logical ranks.
        """
        rows = torch.stack([value.detach().reshape(1) for value in values])
        if self._exchange is not None:
            rows = self._exchange.gather(rows)
        leaves = {(rank, rank + 1): value for rank, value in enumerate(rows.reshape(-1))}
        return tree_sum(leaves, self.total, torch.add) / self.total

    # Others of the contract

    def sync_buffers(self, module: nn.Module) -> None:
        if not self._alone:
            with self.communicating():
                send_from_first(module.buffers())

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing is left to average: each batch ends with the mean gradients."""

    def communication_s(self) -> float | None:
        return (None if self.times is None else 0.0) if self._wrapped is None else super().communication_s()

    def release(self) -> None:
        self._step = None
        super().release()
        if self._exchange is not None:
            self._exchange.close()


def _views(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients in a bucket as DDP lays them out: in the memory format of their parameters."""
    views, start = [], 0
    for parameter in parameters:
        count = parameter.numel()
        if _is_dense(parameter):
            views.append(buffer.as_strided(parameter.shape, parameter.stride(), buffer.storage_offset() + start))
        else:
            views.append(buffer[start : start + count].view(parameter.shape))
        start += count
    return views


def _as_in_memory(gradient: Tensor, view: Tensor) -> Tensor:
    """Return the elements of a gradient in the order in which a view of a bucket has them in memory."""
    if gradient.stride() != view.stride():
        gradient = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def _is_dense(parameter: Tensor) -> bool:
    """Return True if the elements of a parameter fill its memory, in any order of dimensions."""
    return parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() == parameter.stride()
