"""Gradients that are reduced while the backward pass still runs.

Parameters are put into buckets, the last ones first, as their gradients are ready in about that order. A bucket is closed
when it has 25 MB, the first one at 1 MB, so that the transfers begin early. A hook on each parameter counts its gradients;
with the last one of a bucket, the bucket's gradients are copied into one flat tensor, and its reduction is submitted.
`synchronize` submits what is left (a parameter without a gradient on this rank counts as zero, since others may have one),
waits, and copies the results into the gradients.

The flat tensor is of the type in which gradients travel, so that compression to float16 is that copy. A compressor of the
user's own may look at a gradient as a whole, and a sparse gradient is gathered, not summed: such ones travel by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from footplate.compat.horovod.compression import Compression
from footplate.compat.horovod.errors import MisuseError
from footplate.compat.horovod.negotiation import Signature
from footplate.compat.horovod.operations import Request
from footplate.compat.horovod.submit import Average, ReduceOp, synchronize
from footplate.compat.horovod.verbs import allreduce_async, allreduce_async_, sparse_allreduce_async
from footplate.compat.horovod.world import ProcessSet, context
from footplate.distributed.buckets import BUCKET_BYTES

FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: the arguments of `DistributedOptimizer`."""

    op: ReduceOp
    compression: Any
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def factors(self) -> tuple[float, float]:
        """What gradients are multiplied by before and after they are summed."""
        return 1.0 / self.predivide, self.predivide

    @property
    def fuses(self) -> bool:
        """Whether gradients can travel together."""
        return self.compression in (Compression.none, Compression.fp16) and self.op != ReduceOp.Adasum


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        name: of its operation.
        parameters: with their names.
        missing: how many of them have no gradient yet, in this step.
        signature, flat, views: what travels, made when it is first needed.
        finish: waits for it and puts it in place; None until it is submitted.
    """

    name: str
    parameters: list[tuple[str, nn.Parameter]]
    missing: int = 0
    signature: Signature | None = None
    flat: Tensor | None = None
    views: list[Tensor] = field(default_factory=list)
    finish: Callable[[], None] | None = None


class GradientReducer:
    """The hooks, buckets and counters of one `DistributedOptimizer`.

    Args:
        named: the parameters with their names, in the order of the model.
        groups: parameters that are to travel together, group by group; None to choose by size.
        how: the reduction.
        passes: backward passes before gradients are reduced.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        groups: Sequence[Sequence[nn.Parameter]] | None,
        how: Reduction,
        passes: int,
    ) -> None:
        self.how = how
        self.passes = passes
        self.begun = False  # whether there are gradients that have not been reduced
        self._names = {parameter: name for name, parameter in named}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._left: dict[nn.Parameter, int] = {}
        training = [parameter for _, parameter in named if parameter.requires_grad]
        if groups is None:
            self.adopt(training)
            return
        grouped = [[one for one in group if one.requires_grad] for group in groups]
        rest = set(training) - {one for group in grouped for one in group}
        for group in [*grouped, *([one] for one in training if one in rest)]:
            self._add(group)

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of these too; in buckets by size."""
        for bucket in by_size(parameters) if self.how.fuses else ([one] for one in reversed(list(parameters))):
            self._add(bucket)

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether its gradients are reduced."""
        return parameter in self._bucket_of

    def synchronize(self) -> None:
        """Reduce all gradients of this step and wait for them."""
        for bucket in list(self._buckets):
            if bucket.finish is None:
                self._submit(bucket)
        for bucket in self._buckets:
            assert bucket.finish is not None
            bucket.finish()
        self.forget()

    def forget(self) -> None:
        """Begin a new step."""
        self.begun = False
        for bucket in self._buckets:
            bucket.finish, bucket.missing = None, len(bucket.parameters)
        self._left = dict.fromkeys(self._left, self.passes)

    def _add(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        named = [(self._names.setdefault(one, f"unnamed.{len(self._names)}"), one) for one in parameters]
        bucket = _Bucket(f"gradients.{named[0][0]}", named, missing=len(named))
        self._buckets.append(bucket)
        me = weakref.ref(self)
        for parameter in parameters:
            if parameter not in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(lambda one: _call(me, one))
            self._bucket_of[parameter] = bucket
            self._left[parameter] = self.passes

    def ready(self, parameter: nn.Parameter) -> None:
        """A backward pass has added to this parameter's gradient."""
        left = self._left[parameter] - 1
        if left < 0:
            raise MisuseError(
                f"The gradient of {self._names[parameter]} was computed more than backward_passes_per_step={self.passes} "
                "times before step(). Call step() after each such number of backward passes, or raise the number."
            )
        self._left[parameter] = left
        self.begun = True
        if left == 0:
            bucket = self._bucket_of[parameter]
            if parameter.grad is not None and parameter.grad.is_sparse and not self.how.sparse_as_dense:
                bucket = self._alone(parameter, bucket)
            bucket.missing -= 1
            if bucket.missing == 0:
                self._submit(bucket)

    def _alone(self, parameter: nn.Parameter, bucket: _Bucket) -> _Bucket:
        """Give a parameter with sparse gradients a bucket of its own, from now on."""
        if len(bucket.parameters) == 1:
            return bucket
        bucket.parameters = [(name, one) for name, one in bucket.parameters if one is not parameter]
        bucket.signature = None
        bucket.missing -= 1
        left = self._left[parameter]
        self._add([parameter])
        self._left[parameter] = left
        if bucket.missing == 0:
            self._submit(bucket)
        return self._bucket_of[parameter]

    def _submit(self, bucket: _Bucket) -> None:
        gradients = [_gradient(parameter) for _, parameter in bucket.parameters]
        alone = len(gradients) == 1
        if alone and gradients[0].is_sparse and not self.how.sparse_as_dense:
            bucket.finish = self._submit_sparse(bucket, gradients[0])
        elif self.how.fuses:
            bucket.finish = self._submit_flat(bucket, gradients)
        else:
            bucket.finish = self._submit_compressed(bucket, gradients)

    def _submit_flat(self, bucket: _Bucket, gradients: list[Tensor]) -> Callable[[], None]:
        dense = [one.to_dense() if one.is_sparse else one for one in gradients]
        if bucket.signature is None:
            self._shape(bucket, dense)
        assert bucket.flat is not None
        assert bucket.signature is not None
        torch._foreach_copy_(bucket.views, dense)  # pyright: ignore[reportPrivateImportUsage]
        request = Request(bucket.signature, [bucket.flat], in_place=True)
        engine = context().engine
        handle = engine.submit(request, bucket.name, (), lambda outputs: None)

        def finish() -> None:
            engine.finish(handle)
            torch._foreach_copy_(dense, bucket.views)  # pyright: ignore[reportPrivateImportUsage]
            for gradient, reduced in zip(gradients, dense, strict=True):
                if gradient is not reduced:
                    _replace(gradient, reduced.to_sparse(gradient.sparse_dim()))

        return finish

    def _shape(self, bucket: _Bucket, gradients: list[Tensor]) -> None:
        """What a bucket sends."""
        like = gradients[0]
        dtype = torch.float16 if self.how.compression is Compression.fp16 and like.is_floating_point() else like.dtype
        bucket.flat = torch.empty(sum(one.numel() for one in gradients), dtype=dtype, device=like.device)
        parts = bucket.flat.split([one.numel() for one in gradients])
        bucket.views = [part.view(one.shape) for part, one in zip(parts, gradients, strict=True)]
        prescale, postscale = self.how.factors
        bucket.signature = Signature(
            "allreduce",
            (str(dtype).removeprefix("torch."),),
            (tuple(bucket.flat.shape),),
            (bucket.flat.itemsize,),
            bucket.flat.device.type,
            op=str(self.how.op),
            prescale=prescale,
            postscale=postscale,
            process_set=self.how.process_set.process_set_id or 0,
            parts=", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in bucket.parameters),
        )

    def _submit_compressed(self, bucket: _Bucket, gradients: list[Tensor]) -> Callable[[], None]:
        waits = []
        prescale, postscale = self.how.factors
        for (name, _), gradient in zip(bucket.parameters, gradients, strict=True):
            travelling, ctx = self.how.compression.compress(gradient)
            submit = allreduce_async_ if travelling is not gradient else allreduce_async
            given = {"prescale_factor": prescale, "postscale_factor": postscale, "process_set": self.how.process_set}
            waits.append((gradient, submit(travelling, name=f"gradients.{name}", op=self.how.op, **given), ctx))

        def finish() -> None:
            for gradient, handle, ctx in waits:
                gradient.copy_(self.how.compression.decompress(synchronize(handle), ctx))

        return finish

    def _submit_sparse(self, bucket: _Bucket, gradient: Tensor) -> Callable[[], None]:
        op = Average if self.how.op == Average else ReduceOp.Sum
        wait = sparse_allreduce_async(gradient, bucket.name, op, self.how.process_set)
        return lambda: _replace(gradient, wait())


def by_size(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in buckets, the last ones first; those of a bucket have one type and device."""
    buckets: list[list[nn.Parameter]] = []
    nbytes = limit = 0
    for parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device)
        if not buckets or nbytes >= limit or kind != (buckets[-1][0].dtype, buckets[-1][0].device):
            limit = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            buckets.append([])
            nbytes = 0
        buckets[-1].append(parameter)
        nbytes += parameter.nbytes
    return buckets


def _call(me: weakref.ref[Any], parameter: nn.Parameter) -> None:
    reducer = me()
    if reducer is not None:  # an optimizer that is no more leaves its hooks behind
        reducer.ready(parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; zero if it has none, as other ranks may have one."""
    if parameter.grad is None:
        gradient = torch.zeros_like(parameter)
        if parameter.requires_grad:
            parameter.grad = gradient
        return gradient
    return parameter.grad


def _replace(gradient: Tensor, reduced: Tensor) -> None:
    """Put a sparse tensor into another one's place."""
    gradient.zero_().add_(reduced)
