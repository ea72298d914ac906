"""Reduces gradients during the backward pass.

1. Parameters are put into buckets, the last parameters first, because their gradients are ready in about that order. A
   bucket is closed at 25 MB, the first one at 1 MB, so that transfers begin early.
2. A hook on each parameter counts its gradients. After the last gradient of a bucket, the bucket's gradients are copied
   into one flat tensor, and the reduction of this tensor is submitted.
3. `synchronize` submits the remaining buckets, waits, and copies the results into the gradients. A parameter without a
   gradient on this rank counts as zero, because other ranks may have a gradient.

The flat tensor has the type in which gradients are sent, so the copy also compresses to float16. A compressor of the user's
may need whole gradients, and sparse gradients are gathered instead of summed: these gradients are reduced one by one.
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
    """The reduction of gradients: arguments of `DistributedOptimizer`."""

    op: ReduceOp
    compression: Any
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def factors(self) -> tuple[float, float]:
        """The factors of gradients before and after the sum."""
        return 1.0 / self.predivide, self.predivide

    @property
    def fuses(self) -> bool:
        """True if several gradients can be reduced as one tensor."""
        return self.compression in (Compression.none, Compression.fp16) and self.op != ReduceOp.Adasum


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        name: the name of the bucket's operation.
        parameters: the parameters with their names.
        missing: the number of parameters without a gradient in this step so far.
        signature: the signature of the flat tensor; made when it is first needed, as the next two.
        flat: the flat tensor that is reduced.
        views: the parts of `flat` in the shapes of the gradients.
        finish: waits for the result and copies it into the gradients; None until the bucket is submitted.
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
        groups: groups of parameters that are reduced together; None chooses by size.
        reduction: how gradients are reduced.
        passes: the number of backward passes before gradients are reduced.

    Attributes:
        begun: True if there are gradients that have not been reduced.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        groups: Sequence[Sequence[nn.Parameter]] | None,
        reduction: Reduction,
        passes: int,
    ) -> None:
        self.reduction = reduction
        self.passes = passes
        self.begun = False
        self._names = {parameter: name for name, parameter in named}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._left: dict[nn.Parameter, int] = {}
        trained = [parameter for _, parameter in named if parameter.requires_grad]
        if groups is None:
            self.adopt(trained)
            return

        # A parameter outside the given groups is reduced by itself.
        grouped = [[parameter for parameter in group if parameter.requires_grad] for group in groups]
        rest = set(trained) - {parameter for group in grouped for parameter in group}
        for group in [*grouped, *([parameter] for parameter in trained if parameter in rest)]:
            self._add(group)

    def adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of these parameters too, in buckets by size."""
        one_by_one = ([parameter] for parameter in reversed(list(parameters)))
        for bucket in by_size(parameters) if self.reduction.fuses else one_by_one:
            self._add(bucket)

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return True if the gradients of a parameter are reduced."""
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
        named = [
            (self._names.setdefault(parameter, f"unnamed.{len(self._names)}"), parameter) for parameter in parameters
        ]
        bucket = _Bucket(f"gradients.{named[0][0]}", named, missing=len(named))
        self._buckets.append(bucket)
        # The hooks must not keep the reducer of a deleted optimizer alive.
        reducer = weakref.ref(self)
        for parameter in parameters:
            if parameter not in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(lambda ready: _call(reducer, ready))
            self._bucket_of[parameter] = bucket
            self._left[parameter] = self.passes

    def ready(self, parameter: nn.Parameter) -> None:
        """Count a gradient that a backward pass has added to this parameter."""
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
            if parameter.grad is not None and parameter.grad.is_sparse and not self.reduction.sparse_as_dense:
                bucket = self._alone(parameter, bucket)
            bucket.missing -= 1
            if bucket.missing == 0:
                self._submit(bucket)

    def _alone(self, parameter: nn.Parameter, bucket: _Bucket) -> _Bucket:
        """Move a parameter with sparse gradients into a bucket of its own."""
        if len(bucket.parameters) == 1:
            return bucket
        bucket.parameters = [(name, other) for name, other in bucket.parameters if other is not parameter]
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
        if alone and gradients[0].is_sparse and not self.reduction.sparse_as_dense:
            bucket.finish = self._submit_sparse(bucket, gradients[0])
        elif self.reduction.fuses:
            bucket.finish = self._submit_flat(bucket, gradients)
        else:
            bucket.finish = self._submit_compressed(bucket, gradients)

    def _submit_flat(self, bucket: _Bucket, gradients: list[Tensor]) -> Callable[[], None]:
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        if bucket.signature is None:
            self._make_flat(bucket, dense)
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

    def _make_flat(self, bucket: _Bucket, gradients: list[Tensor]) -> None:
        """Make the flat tensor of a bucket and its signature."""
        like = gradients[0]
        dtype = (
            torch.float16 if self.reduction.compression is Compression.fp16 and like.is_floating_point() else like.dtype
        )
        bucket.flat = torch.empty(sum(gradient.numel() for gradient in gradients), dtype=dtype, device=like.device)
        parts = bucket.flat.split([gradient.numel() for gradient in gradients])
        bucket.views = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
        prescale, postscale = self.reduction.factors
        bucket.signature = Signature(
            "allreduce",
            (str(dtype).removeprefix("torch."),),
            (tuple(bucket.flat.shape),),
            (bucket.flat.itemsize,),
            bucket.flat.device.type,
            op=str(self.reduction.op),
            prescale=prescale,
            postscale=postscale,
            process_set=self.reduction.process_set.process_set_id or 0,
            parts=", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in bucket.parameters),
        )

    def _submit_compressed(self, bucket: _Bucket, gradients: list[Tensor]) -> Callable[[], None]:
        waits = []
        prescale, postscale = self.reduction.factors
        for (name, _), gradient in zip(bucket.parameters, gradients, strict=True):
            compressed, ctx = self.reduction.compression.compress(gradient)
            submit = allreduce_async_ if compressed is not gradient else allreduce_async
            handle = submit(
                compressed,
                name=f"gradients.{name}",
                op=self.reduction.op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=self.reduction.process_set,
            )
            waits.append((gradient, handle, ctx))

        def finish() -> None:
            for gradient, handle, ctx in waits:
                gradient.copy_(self.reduction.compression.decompress(synchronize(handle), ctx))

        return finish

    def _submit_sparse(self, bucket: _Bucket, gradient: Tensor) -> Callable[[], None]:
        op = Average if self.reduction.op == Average else ReduceOp.Sum
        wait = sparse_allreduce_async(gradient, bucket.name, op, self.reduction.process_set)
        return lambda: _replace(gradient, wait())


def by_size(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets, the last parameters first. A bucket's parameters have one type and device."""
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


def _call(reference: weakref.ref[Any], parameter: nn.Parameter) -> None:
    """Count a gradient, unless the optimizer of this hook was deleted."""
    reducer = reference()
    if reducer is not None:
        reducer.ready(parameter)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; zeros if it has none, because other ranks may have a gradient."""
    if parameter.grad is None:
        gradient = torch.zeros_like(parameter)
        if parameter.requires_grad:
            parameter.grad = gradient
        return gradient
    return parameter.grad


def _replace(gradient: Tensor, reduced: Tensor) -> None:
    """Overwrite a sparse gradient."""
    gradient.zero_().add_(reduced)
