"""Sample arguments for each operation of the table, and the tolerance against torch.

A sample is the arguments of one call of the operation. Tensors are created from a fixed seed. Floating-point tensors are
tested in single and double precision, and some operations in bfloat16 too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  declares torch.ops.transformers

from footplate.step.xla.capture import (
    attention_op,  # noqa: F401  they declare torch.ops.footplate
    recurrence_op,  # noqa: F401  they declare torch.ops.footplate
)

aten = torch.ops.aten
Sample = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Makes the tensors of an operation's samples, of one floating-point type."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.dtype = dtype

    def n(self, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def u(self, *shape: int, low: float = 0.1, high: float = 0.9) -> torch.Tensor:
        """Uniform numbers between two bounds."""
        return (torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low).to(self.dtype)

    def c(self, *shape: int) -> torch.Tensor:
        """Normal complex numbers, in single precision if there are none of the type's precision."""
        pairs = self.n(*shape, 2)
        return torch.view_as_complex(pairs.float() if self.dtype == torch.bfloat16 else pairs)

    def i(self, *shape: int, low: int = -5, high: int = 6) -> torch.Tensor:
        """Whole numbers, int64."""
        return torch.randint(low, high, shape, generator=self.generator)

    def b(self, *shape: int) -> torch.Tensor:
        """Booleans."""
        return torch.randint(0, 2, shape, generator=self.generator).bool()

    def permuted(self, *shape: int) -> torch.Tensor:
        """Distinct numbers, so that orders and maxima have no ties."""
        count = math.prod(shape)
        return (torch.randperm(count, generator=self.generator).double() - count / 2).reshape(shape).to(self.dtype)


def call(*args: Any, **kwargs: Any) -> Sample:
    return args, kwargs


SAMPLES: dict[Any, list[Callable[[Draw], list[Sample]]]] = {}


def enter(operations: list[Any], make: Callable[[Draw], list[Sample]]) -> None:
    for operation in operations:
        SAMPLES.setdefault(operation, []).append(make)


# Pointwise

_ANYWHERE = (
    "exp exp2 expm1 neg abs sign sgn floor ceil trunc round erf erfc sin cos sinh cosh tanh asinh sigmoid relu silu"
)
enter([getattr(aten, name).default for name in [*_ANYWHERE.split(), "atan"]], lambda d: [call(d.n(3, 4)), call(d.n())])
enter(
    [aten.neg.default, aten.abs.default, aten.sign.default, aten.sgn.default, aten.relu.default],
    lambda d: [call(d.n(3)), call(d.i(4))],
)
enter(
    [aten.exp.default, aten.sin.default, aten.tanh.default, aten.sigmoid.default],
    lambda d: [call(d.n(3, 2)), call(d.i(4))],
)
enter([aten.round.default], lambda d: [call(torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.4], dtype=d.dtype))])
_INSIDE = "log log1p log2 log10 sqrt rsqrt reciprocal tan asin acos atanh"
enter([getattr(aten, name).default for name in _INSIDE.split()], lambda d: [call(d.u(3, 4))])
enter([aten.acosh.default], lambda d: [call(d.u(3, 4, low=1.1, high=5.0))])

_MIXED = [aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor]
enter(
    _MIXED,
    lambda d: [
        call(d.n(3, 4), d.n(4)),
        call(d.n(2, 1), d.i(3)),
        call(d.i(3), d.i(3), alpha=2),
        call(d.n(3), d.n(3), alpha=-0.5),
        call(d.n(3).bfloat16(), d.n(3).float()),
        call(d.n(3), torch.tensor(2.0, dtype=torch.float64)),
    ],
)
enter(
    [aten.mul.Tensor],
    lambda d: [
        call(d.n(3, 4), d.n(4)),
        call(d.i(3), d.n(3)),
        call(d.i(3), d.i(1)),
        call(d.b(4), d.b(4)),
        call(d.b(3), d.n(3)),
        call(d.n(3), 2.5),
        call(d.i(3), 2.5),
    ],
)
enter(
    [aten.div.Tensor],
    lambda d: [call(d.n(3, 4), d.u(4)), call(d.i(3), d.i(3, low=1)), call(d.n(3), 3), call(d.i(3), 4)],
)
enter(
    [aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar],
    lambda d: [call(d.n(3), 2), call(d.i(3), 2), call(d.i(3), 2.5), call(d.n(2), 1.5, 2)],
)
enter([aten.mul.Scalar], lambda d: [call(d.n(3), 2), call(d.i(3), 2), call(d.i(3), 2.5)])
enter([aten.div.Scalar], lambda d: [call(d.n(3), 2), call(d.i(3), 2)])
_MODES = (None, "floor", "trunc")
enter(
    [aten.div.Tensor_mode],
    lambda d: [
        *[call(d.n(9), d.u(9), rounding_mode=mode) for mode in _MODES],
        *[call(d.i(9), d.i(9, low=2), rounding_mode=mode) for mode in _MODES],
    ],
)
enter(
    [aten.div.Scalar_mode],
    lambda d: [
        *[call(d.n(9), 0.7, rounding_mode=mode) for mode in _MODES],
        *[call(d.i(9), -2, rounding_mode=mode) for mode in _MODES],
    ],
)
enter(
    [aten.pow.Tensor_Scalar],
    lambda d: [
        *[call(d.u(4), power) for power in (0, 0.5, 1, 2, 3, -1, -0.5, 2.3, 5)],
        call(d.n(4), 2),
        call(d.n(4), 3),
        call(d.i(4), 2),
        call(d.i(4), 2.0),
    ],
)
enter([aten.pow.Tensor_Tensor], lambda d: [call(d.u(3, 4), d.n(4)), call(d.i(4, low=1), d.i(4, low=0, high=4))])
enter(
    [aten.pow.Scalar],
    lambda d: [call(0.9, d.n(4)), call(2, d.u(4)), call(0.999, torch.tensor(3.0, dtype=torch.float64))],
)
enter([aten.maximum.default, aten.minimum.default], lambda d: [call(d.n(3, 4), d.n(4)), call(d.i(4), d.i(4))])
enter([aten.clamp_min.default, aten.clamp_max.default], lambda d: [call(d.n(4), 0.2), call(d.i(4), 1)])
enter([aten.fmod.Tensor, aten.remainder.Tensor], lambda d: [call(d.n(9) * 5, d.u(9)), call(d.i(9), d.i(9, low=2))])
enter([aten.fmod.Scalar, aten.remainder.Scalar], lambda d: [call(d.n(9), 0.7), call(d.i(9), 3), call(d.i(9), -3)])
enter([aten.atan2.default], lambda d: [call(d.n(9), d.n(9))])
enter([aten.lerp.Scalar], lambda d: [call(d.n(4), d.n(4), 0.1), call(d.n(4), d.n(4), 0.9)])
enter([aten.lerp.Tensor], lambda d: [call(d.n(4), d.n(4), d.u(4))])
enter(
    [aten.addcmul.default, aten.addcdiv.default],
    lambda d: [call(d.n(4), d.n(4), d.u(4)), call(d.n(4), d.n(4), d.u(4), value=-0.1)],
)
enter([aten.hardtanh.default], lambda d: [call(d.n(9)), call(d.n(9) * 6, 0, 6)])
enter([aten.leaky_relu.default], lambda d: [call(d.n(9)), call(d.n(9), 0.2)])
enter([aten.elu.default], lambda d: [call(d.n(9)), call(d.n(9), 1.67, 1.05)])
enter([aten.gelu.default], lambda d: [call(d.n(9)), call(d.n(9), approximate="tanh")])
enter(
    [aten.clamp.default],
    lambda d: [call(d.n(9), -0.5, 0.5), call(d.n(9), None, 0.1), call(d.i(9), 0), call(d.i(4), -1.5, 2.5)],
)
enter([aten.clamp.Tensor], lambda d: [call(d.n(3, 4), d.n(4), d.n(4) + 3), call(d.n(4), None, d.n(4))])
_TENSOR_COMPARISONS = [getattr(aten, name).Tensor for name in ["eq", "ne", "lt", "le", "gt", "ge"]]
enter(
    _TENSOR_COMPARISONS,
    lambda d: [call(d.i(9), d.i(9)), call(d.n(3, 4), d.n(4)), call(d.i(3), torch.tensor([0.5, 1, 2], dtype=d.dtype))],
)
_SCALAR_COMPARISONS = [getattr(aten, name).Scalar for name in ["eq", "ne", "lt", "le", "gt", "ge"]]
enter(_SCALAR_COMPARISONS, lambda d: [call(d.i(9), 2), call(d.i(9), 1.5), call(d.n(9), 0), call(d.b(4), 1)])
enter(
    [aten.isnan.default, aten.isinf.default],
    lambda d: [call(torch.tensor([1, float("nan"), float("inf"), -float("inf")], dtype=d.dtype))],
)
enter([aten.logical_not.default], lambda d: [call(d.b(4)), call(d.i(9)), call(d.n(3))])
enter(
    [aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default],
    lambda d: [call(d.b(4), d.b(4)), call(d.i(9), d.n(9))],
)
enter([aten.signbit.default], lambda d: [call(d.n(9)), call(d.i(9))])
enter([aten.bitwise_not.default], lambda d: [call(d.b(4)), call(d.i(4))])
_BITS = [aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor]
enter([operation.Tensor for operation in _BITS], lambda d: [call(d.b(3, 4), d.b(4)), call(d.i(4), d.i(4))])
enter([operation.Scalar for operation in _BITS], lambda d: [call(d.b(4), True), call(d.i(4), 3)])
enter([aten.where.self], lambda d: [call(d.b(3, 4), d.n(4), d.n(3, 1)), call(d.b(4), d.i(4), d.n(4))])
enter([aten.masked_fill.Scalar], lambda d: [call(d.n(3, 4), d.b(4), -1e9), call(d.i(4), d.b(4), 2)])
enter([aten.masked_fill.Tensor], lambda d: [call(d.n(3, 4), d.b(4), torch.tensor(2.0))])
enter(
    [aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default],
    lambda d: [call(d.n(2, 3))],
)
enter([torch.ops.prims.copy_strided.default], lambda d: [call(d.n(2, 3), [1, 2])])
enter(
    [aten._to_copy.default],
    lambda d: [
        call(d.n(4) * 3, dtype=torch.int64),
        call(d.b(4), dtype=torch.float32),
        call(d.n(4), dtype=torch.bfloat16),
        call(d.n(4), dtype=torch.bool),
    ],
)
enter([aten.copy.default], lambda d: [call(d.n(3, 4), d.n(4)), call(d.n(3), d.i(3))])
enter(
    [aten._foreach_add.List],
    lambda d: [call([d.n(3), d.n(2, 2)], [d.n(3), d.n(2, 2)]), call([d.n(3)], [d.n(3)], alpha=0.5)],
)
enter([aten._foreach_mul.Scalar], lambda d: [call([d.n(3), d.n(2)], 0.9)])
enter([aten._foreach_mul.Tensor], lambda d: [call([d.n(3), d.n(2)], torch.tensor(0.9, dtype=torch.float64))])
enter([aten._foreach_mul.List], lambda d: [call([d.n(3), d.n(2)], [d.n(3), d.n(2)])])
enter([aten._foreach_neg.default], lambda d: [call([d.n(3), d.n(2)])])

# Reductions

enter(
    [aten.sum.default, aten.mean.default, aten.prod.default, aten.max.default, aten.min.default],
    lambda d: [call(d.permuted(3, 4))],
)
enter([aten.sum.default], lambda d: [call(d.n(3, 4)), call(d.i(4)), call(d.b(9))])
enter(
    [aten.sum.dim_IntList],
    lambda d: [
        call(d.n(2, 3, 4), [0, -1]),
        call(d.n(2, 3), [1], True),
        call(d.b(3, 4), [0]),
        call(d.n(2, 3), []),
        call(d.i(2, 3), [0], dtype=torch.float32),
        call(d.n(), []),
    ],
)
enter([aten.mean.dim], lambda d: [call(d.n(2, 3, 4), [0, -1]), call(d.n(2, 3), [1], True), call(d.n(2, 3), None)])
enter(
    [aten.amax.default, aten.amin.default],
    lambda d: [call(d.n(2, 3, 4), [0, -1]), call(d.n(2, 3), [1], True), call(d.i(2, 3))],
)
enter([aten.prod.dim_int], lambda d: [call(d.u(3, 4), 1), call(d.i(3, 2), -1, True)])
enter([aten.any.default, aten.all.default], lambda d: [call(d.b(3, 4)), call(d.i(3))])
enter([aten.any.dim, aten.all.dim], lambda d: [call(d.b(3, 4), 1), call(d.i(3, 2), -1, True)])
enter([aten.any.dims, aten.all.dims], lambda d: [call(d.b(3, 4), [0, 1]), call(d.b(2, 3), [1], True)])
enter(
    [aten.argmax.default, aten.argmin.default],
    lambda d: [call(d.permuted(3, 4)), call(d.permuted(3, 4), 1), call(d.permuted(3, 4), -2, True)],
)
enter([aten.max.dim, aten.min.dim], lambda d: [call(d.permuted(3, 4), 1), call(d.permuted(3, 4), -2, True)])
enter(
    [aten.var.correction, aten.var_mean.correction],
    lambda d: [
        call(d.n(3, 4), [1]),
        call(d.n(3, 4), [0, 1], correction=0),
        call(d.n(3, 4), [1], correction=1, keepdim=True),
        call(d.n(5)),
    ],
)
enter(
    [aten.linalg_vector_norm.default],
    lambda d: [
        *[call(d.n(3, 4), order) for order in (0, 1, 2, 3.5, math.inf, -math.inf)],
        call(d.n(3, 4), 2, [1], True),
        call(d.n(2, 3), 2, [0, 1]),
    ],
)
enter([aten.cumsum.default], lambda d: [call(d.n(3, 4), 1), call(d.i(3, 4), 0), call(d.b(4), 0)])
enter([aten.cumprod.default], lambda d: [call(d.u(3, 4), 1), call(d.i(3, 4), 0)])
enter(
    [aten._softmax.default, aten._log_softmax.default],
    lambda d: [call(d.n(3, 4) * 9, -1, False), call(d.n(2, 3, 4), 1, False)],
)
enter(
    [aten.histc.default],
    lambda d: [
        call(d.i(9, low=0, high=7).to(d.dtype), 5, 0, 4),
        call(d.n(4, 5), 7),
        call(d.n(20), 4, -1, 0.5),
        call(d.n(1).expand(3), 4),
    ],
)
enter([aten.logsumexp.default], lambda d: [call(d.n(3, 4) * 9, [1]), call(d.n(3, 4), [0, 1], True)])
enter([aten.sort.default], lambda d: [call(d.permuted(3, 4)), call(d.permuted(3, 4), 0, True)])
enter(
    [aten.sort.stable],
    lambda d: [call(d.i(3, 9), stable=True, dim=1), call(d.i(3, 9), stable=True, dim=1, descending=True)],
)
enter([aten.topk.default], lambda d: [call(d.permuted(3, 5), 2), call(d.permuted(5, 3), 3, 0, False)])

# Shapes

enter(
    [aten.view.default, aten._unsafe_view.default, aten.reshape.default],
    lambda d: [call(d.n(3, 4), [2, 6]), call(d.n(3, 4), [-1]), call(d.n(1), [])],
)
enter([aten.unsqueeze.default], lambda d: [call(d.n(3, 4), 1), call(d.n(3), -1)])
enter([aten.squeeze.default], lambda d: [call(d.n(3, 1, 4, 1))])
enter([aten.squeeze.dim], lambda d: [call(d.n(3, 1), 1), call(d.n(3, 1), 0)])
enter([aten.squeeze.dims], lambda d: [call(d.n(3, 1, 1), [1, 2]), call(d.n(3, 1), [0])])
enter([aten.expand.default], lambda d: [call(d.n(3, 1), [2, 3, 4]), call(d.n(1, 3), [-1, 3])])
enter([aten.permute.default], lambda d: [call(d.n(2, 3, 4), [2, 0, 1]), call(d.n(2, 3), [-1, 0])])
enter([aten.transpose.int], lambda d: [call(d.n(2, 3, 4), 0, -1)])
enter([aten.t.default], lambda d: [call(d.n(2, 3)), call(d.n(3))])
enter(
    [aten.slice.Tensor],
    lambda d: [
        call(d.n(5, 6), 1, 1, 4),
        call(d.n(5, 6), 0, -3),
        call(d.n(9), 0, 0, 9223372036854775807, 2),
        call(d.n(5), -1, 2, 99),
    ],
)
enter(
    [aten.slice_scatter.default], lambda d: [call(d.n(5, 6), d.n(5, 3), 1, 1, 4), call(d.n(6), d.n(3), 0, 0, None, 2)]
)
enter([aten.select.int], lambda d: [call(d.n(3, 4), 1, -1), call(d.n(3, 4), 0, 2)])
enter([aten.select_scatter.default], lambda d: [call(d.n(3, 4), d.n(3), 1, -1)])
enter(
    [aten.cat.default],
    lambda d: [
        call([d.n(2, 3), d.n(1, 3)]),
        call([d.n(2, 3), d.n(2, 1)], -1),
        call([d.n(2), d.i(3)]),
        call([d.n(0), d.n(2, 2)]),
    ],
)
enter([aten.stack.default], lambda d: [call([d.n(2, 3), d.n(2, 3)], -1)])
enter([aten.split_with_sizes.default], lambda d: [call(d.n(6, 2), [1, 2, 3]), call(d.n(2, 4), [1, 3], -1)])
enter([aten.unbind.int], lambda d: [call(d.n(3, 2)), call(d.n(3, 2), -1)])
enter([aten.repeat.default], lambda d: [call(d.n(3), [2, 2]), call(d.n(2, 3), [1, 2])])
enter([aten.flip.default], lambda d: [call(d.n(3, 4), [0, -1])])
enter([aten.roll.default], lambda d: [call(d.n(3, 4), [1, -1], [0, 1]), call(d.n(3, 4), [5])])
enter(
    [aten.constant_pad_nd.default],
    lambda d: [call(d.n(2, 3), [1, 2], 0.5), call(d.n(2, 5, 5), [-1, 1, 0, -2]), call(d.i(3), [1, 1])],
)
enter([aten.diagonal.default], lambda d: [call(d.n(3, 4)), call(d.n(2, 3, 4), 1, -2, -1)])
enter([aten.tril.default, aten.triu.default], lambda d: [call(d.n(3, 4)), call(d.n(2, 4, 4), -1)])

enter(
    [aten.unfold.default],
    lambda d: [call(d.n(3, 8), 1, 3, 2), call(d.n(9, 2, 3), 0, 4, 5), call(d.n(5, 7), -2, 5, 1), call(d.n(), 0, 1, 1)],
)
enter(
    [aten.as_strided.default],
    lambda d: [
        call(d.n(4, 6), [2, 3], [6, 2], 1),
        call(d.n(4, 6).t(), [2, 3], [6, 2]),
        call(d.n(2, 3, 4).permute(2, 0, 1), [24], [1]),
    ],
)
enter(
    [aten.as_strided_scatter.default],
    lambda d: [
        call(d.n(24), d.n(2, 3), [2, 3], [6, 2], 1),
        call(d.n(2, 3, 4).permute(2, 0, 1), d.n(3, 4), [3, 4], [4, 1]),
    ],
)

# Attention


def _attended(d: Draw) -> list[tuple[Any, ...]]:
    q, k, v = d.n(2, 3, 5, 4), d.n(2, 3, 7, 4), d.n(2, 3, 7, 6)
    hides_all = torch.arange(7) < torch.arange(5)[:, None]  # the first query sees no key
    return [
        (q, k, v, None, None, 0.0, False, 0.5),
        (q, k, v, None, None, 0.0, True, 0.5),
        (q, k, v, hides_all, None, 0.0, False, 0.3),
        (q, k, v, d.n(2, 1, 1, 7), None, 0.0, False, 0.5),
        (d.n(3, 300, 4), d.n(3, 300, 4), d.n(3, 300, 4), d.b(3, 300, 300), None, 0.0, True, 0.5),
    ]


def _learning(d: Draw) -> list[tuple[Any, ...]]:
    """Trainable masks of every broadcast shape: per head, per row, per key only, and for more queries than one block."""
    q, k, v = d.n(2, 3, 5, 4), d.n(2, 3, 7, 4), d.n(2, 3, 7, 6)
    shapes = ((2, 3, 5, 7), (1, 3, 5, 7), (3, 5, 7), (5, 7), (5, 1), (2, 1, 1, 7), (7,), (1,))
    hidden = d.n(3, 5, 7).masked_fill(d.b(3, 5, 7), -math.inf)
    long = d.n(2, 2, 300, 4)
    return [
        *((q, k, v, mask, None, 0.0, False, 0.5) for mask in (*(d.n(*shape) for shape in shapes), hidden)),
        *((long, long, long, d.n(*shape), None, 0.0, True, 0.5) for shape in ((2, 300, 300), (2, 1, 1, 300))),
    ]


enter(
    [torch.ops.footplate.attention.default],
    lambda d: [call(*arguments) for arguments in (*_attended(d), *_learning(d))],
)
enter(
    [torch.ops.footplate.attention_backward.default],
    lambda d: [
        call(torch.randn_like(result), *arguments[:5], result, sums, learns, *arguments[5:])
        for arguments, learns in [
            *((arguments, False) for arguments in _attended(d)),
            *((arguments, True) for arguments in _learning(d)),
        ]
        for result, sums in [torch.ops.footplate.attention(*arguments)]
    ],
)

# Recurrent layers: 5 steps of 3 rows, 2 hidden values; of an LSTM, a state has 2 more


def _recurrent(d: Draw) -> list[tuple[Any, ...]]:
    cases = []
    for cell, gates, state in (("rnn_tanh", 2, 2), ("rnn_relu", 2, 2), ("gru", 6, 2), ("lstm", 8, 4)):
        cases.append((d.n(5, 3, gates), d.n(3, state), d.n(gates, 2), d.n(gates), cell))
    return [*cases, (*cases[2][:3], None, "gru")]


enter([torch.ops.footplate.recurrence.default], lambda d: [call(*arguments) for arguments in _recurrent(d)])
enter(
    [torch.ops.footplate.recurrence_backward.default],
    lambda d: [
        call(d.n(5, *first.shape), gates, d.n(*gates.shape), d.n(5, *first.shape), weight, cell)
        for gates, first, weight, _, cell in _recurrent(d)
    ],
)

# Linear algebra

enter([aten.mm.default], lambda d: [call(d.n(3, 4), d.n(4, 5)), call(d.i(2, 3), d.i(3, 2))])
enter([aten.bmm.default], lambda d: [call(d.n(2, 3, 4), d.n(2, 4, 5))])
enter([aten.mv.default], lambda d: [call(d.n(3, 4), d.n(4))])
enter([aten.dot.default], lambda d: [call(d.n(4), d.n(4))])
enter(
    [aten.addmm.default],
    lambda d: [call(d.n(5), d.n(3, 4), d.n(4, 5)), call(d.n(3, 5), d.n(3, 4), d.n(4, 5), beta=0.5, alpha=2)],
)
enter([aten.baddbmm.default], lambda d: [call(d.n(2, 3, 5), d.n(2, 3, 4), d.n(2, 4, 5), beta=0.5)])

# A matrix for each of four groups of rows; one group is empty.

_ENDS = torch.tensor([2, 2, 5, 9], dtype=torch.int32)
enter(
    [aten._grouped_mm.default],
    lambda d: [
        call(d.n(9, 8).float(), d.n(4, 8, 16).float(), _ENDS),
        call(d.n(8, 16).float(), d.n(16, 16).float(), torch.tensor([4, 4, 9, 16], dtype=torch.int32)),
        call(d.n(3, 4, 8).float(), d.n(3, 8, 4).float()),
        call(d.n(4, 8, 8).float(), d.n(8, 16).float(), torch.tensor([4, 4, 8, 16], dtype=torch.int32)),
    ],
)
enter([torch.ops.transformers.grouped_mm_fallback.default], lambda d: [call(d.n(9, 8), d.n(4, 8, 16), _ENDS)])
enter(
    [torch.ops.transformers.grouped_mm_fallback_backward.default],
    lambda d: [call(d.n(9, 8), d.n(4, 8, 16), _ENDS, d.n(9, 16))],
)

# Convolution and pooling

_CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], bool, tuple[Any, ...]]] = [
    ((2, 3, 8, 9), (4, 3, 3, 3), True, ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)),
    ((2, 4, 8, 8), (4, 1, 3, 3), False, ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)),
    ((2, 4, 9, 8), (6, 2, 3, 2), False, ([1, 2], [2, 1], [2, 1], False, [0, 0], 2)),
    ((2, 3, 11), (4, 3, 3), True, ([2], [1], [1], False, [0], 1)),
    ((2, 4, 5, 6), (4, 3, 3, 3), True, ([2, 2], [1, 1], [1, 1], True, [1, 1], 1)),
    ((2, 4, 5, 6), (4, 3, 3, 2), False, ([2, 1], [0, 1], [1, 2], True, [0, 0], 2)),
    # Few pixels; a kernel of more pixels than image or result; a result of more than the image.
    ((1, 3, 3, 4), (20, 3, 3, 3), True, ([2, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    ((1, 20, 2, 3), (20, 3, 3, 2), True, ([2, 1], [1, 0], [1, 2], True, [1, 0], 1)),
    ((3, 2, 2, 2), (4, 2, 3, 3), True, ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    ((3, 2, 2, 3), (2, 2, 5, 5), False, ([1, 1], [2, 2], [1, 1], False, [0, 0], 1)),
    ((3, 2, 7, 6), (2, 2, 3, 3), False, ([2, 3], [0, 0], [1, 1], False, [0, 0], 1)),
    ((3, 2, 7), (2, 2, 3), False, ([1], [4], [2], False, [0], 1)),
    # Depthwise: each channel separately.
    ((2, 4, 8, 7), (4, 1, 3, 2), True, ([2, 3], [1, 0], [1, 2], False, [0, 0], 4)),
    ((2, 4, 5, 4), (4, 1, 3, 2), True, ([2, 3], [1, 0], [1, 1], True, [1, 2], 4)),
    ((2, 4, 9), (8, 1, 3), False, ([1], [1], [1], False, [0], 4)),
    ((2, 2, 4, 5, 3), (3, 2, 2, 3, 1), True, ([1, 2, 1], [1, 1, 0], [1, 1, 1], False, [0, 0, 0], 1)),
]


def _channels(weight: tuple[int, ...], settings: tuple[Any, ...]) -> int:
    return weight[1] * settings[5] if settings[3] else weight[0]


enter(
    [aten.convolution.default],
    lambda d: [
        call(d.n(*x), d.n(*weight), d.n(_channels(weight, settings)) if bias else None, *settings)
        for x, weight, bias, settings in _CONVOLUTIONS
    ],
)


def _convolutions_backward(d: Draw) -> list[Sample]:
    calls = []
    for x, weight, bias, settings in _CONVOLUTIONS:
        x, weight = d.n(*x), d.n(*weight)
        y = torch.ops.aten.convolution(x, weight, None, *settings)
        calls.append(call(d.n(*y.shape), x, weight, [y.shape[1]], *settings, [True, True, bias]))
    return calls


enter([aten.convolution_backward.default], _convolutions_backward)

_POOLS: list[tuple[Any, ...]] = [([3, 3], [2, 2], [1, 1]), ([2, 2],), ([3, 2], [2, 3], [1, 0])]
enter(
    [aten.max_pool2d_with_indices.default],
    lambda d: [
        *[call(d.permuted(2, 3, 8, 9), *pool) for pool in _POOLS],
        call(d.permuted(2, 3, 8, 8), [3, 3], [2, 2], [1, 1], [1, 1], True),
        call(d.permuted(3, 7, 8), [2], [2], [1], [2], False),
        call(d.permuted(1, 1, 5, 5), [2, 2], [2, 2], [0, 0], [1, 1], True),
    ],
)


def _max_pools_backward(d: Draw) -> list[Sample]:
    calls = []
    for pool in (([3, 3], [2, 2], [1, 1], [1, 1], False), ([2, 2], [2, 2], [0, 0], [1, 1], True)):
        x = d.permuted(2, 3, 7, 8)
        y, places = aten.max_pool2d_with_indices(x, *pool)
        calls.append(call(d.n(*y.shape), x, *pool, places))
    return calls


enter([aten.max_pool2d_with_indices_backward.default], _max_pools_backward)
_AVERAGES: list[tuple[Any, ...]] = [
    ([3, 3], [2, 2], [1, 1], False, True, None),
    ([3, 3], [2, 2], [1, 1], False, False, None),
    ([2, 2], [2, 2], [0, 0], True, True, None),
    ([3, 3], [2, 2], [1, 1], True, True, None),
    ([2, 2], [2, 2], [0, 0], False, True, 3),
]
enter(
    [aten.avg_pool2d.default],
    lambda d: [*[call(d.n(2, 3, 7, 8), *pool) for pool in _AVERAGES], call(d.n(3, 6, 6), [2])],
)


def _average_pools_backward(d: Draw) -> list[Sample]:
    calls = []
    for pool in _AVERAGES:
        x = d.n(2, 3, 7, 8)
        calls.append(call(d.n(*aten.avg_pool2d(x, *pool).shape), x, *pool))
    return calls


enter([aten.avg_pool2d_backward.default], _average_pools_backward)

_VOLUMES: list[tuple[Any, ...]] = [([2, 3, 2], [2, 2, 1], [1, 0, 1]), ([3], [2], [1]), ([2, 2, 3], [2, 2, 2])]


def _volumes_backward(d: Draw) -> list[Sample]:
    calls = []
    for kernel, stride, *padding in _VOLUMES:
        x, settings = d.n(2, 3, 6, 7, 5), (kernel, stride, *(padding or [[0]]), True, False, None)
        calls.append(call(d.n(*aten.avg_pool3d(x, *settings).shape), x, *settings))
    return calls


def _volumes_of_maxima_backward(d: Draw) -> list[Sample]:
    calls = []
    for kernel, stride, *padding in _VOLUMES:
        x, settings = d.permuted(2, 3, 6, 7, 5), (kernel, stride, *(padding or [[0]]), [1], True)
        y, places = aten.max_pool3d_with_indices(x, *settings)
        calls.append(call(d.n(*y.shape), x, *settings, places))
    return calls


enter([aten.avg_pool3d.default], lambda d: [call(d.n(2, 3, 6, 7, 5), *pool) for pool in _VOLUMES])
enter([aten.avg_pool3d_backward.default], _volumes_backward)
enter([aten.max_pool3d_with_indices.default], lambda d: [call(d.permuted(2, 3, 6, 7, 5), *pool) for pool in _VOLUMES])
enter([aten.max_pool3d_with_indices_backward.default], _volumes_of_maxima_backward)
enter(
    [aten._adaptive_avg_pool3d.default], lambda d: [call(d.n(2, 3, 6, 7, 5), size) for size in ([1, 1, 1], [4, 3, 5])]
)
enter([aten._adaptive_avg_pool3d_backward.default], lambda d: [call(d.n(2, 3, 4, 3, 5), d.n(2, 3, 6, 7, 5))])
_MAXIMA = ([1, 1], [3, 4], [5, 8])
enter([aten.adaptive_max_pool2d.default], lambda d: [call(d.permuted(2, 3, 7, 8), size) for size in _MAXIMA])
enter(
    [aten.adaptive_max_pool2d_backward.default],
    lambda d: [
        call(d.n(2, 3, *size), x, places)
        for size in _MAXIMA
        for x in [d.permuted(2, 3, 7, 8)]
        for _, places in [aten.adaptive_max_pool2d(x, size)]
    ],
)

# Sampling

_GRIDS = [(0, padding, align) for padding in range(3) for align in (False, True)]
_GRIDS += [(kind, padding, padding == 1) for kind in (1, 2) for padding in range(3)]
enter(
    [aten.grid_sampler_2d.default],
    lambda d: [call(d.n(2, 3, 5, 6), d.n(2, 4, 3, 2), *settings) for settings in _GRIDS],
)
enter(
    [aten.grid_sampler_2d_backward.default],
    # Each kind, each padding and each alignment, some together: JAX differentiates what is tried above in all ways.
    lambda d: [
        call(d.n(2, 3, 4, 3), d.n(2, 3, 5, 6), d.n(2, 4, 3, 2), *settings, [True, True]) for settings in _GRIDS[1::2]
    ],
)
_SIZES = ([4, 9], [8, 3])
enter(
    [aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default],
    lambda d: (
        [call(d.n(2, 3, 6, 5), size, align) for size in _SIZES for align in (False, True)]
        + [call(d.n(2, 3, 6, 4), [4, 6], False, 0.7, 1.5)]
    ),
)
enter(
    [aten._upsample_bilinear2d_aa_backward.default, aten._upsample_bicubic2d_aa_backward.default],
    lambda d: [call(d.n(2, 3, *size), size, [2, 3, 6, 5], False) for size in _SIZES],
)
enter([aten.replication_pad1d_backward.default], lambda d: [call(d.n(2, 3, 8), d.n(2, 3, 5), [1, 2])])
enter([aten.replication_pad2d_backward.default], lambda d: [call(d.n(2, 3, 6, 8), d.n(2, 3, 5, 5), [1, 2, 0, 1])])
enter(
    [aten.replication_pad3d_backward.default],
    lambda d: [call(d.n(1, 2, 5, 6, 8), d.n(1, 2, 4, 5, 5), [1, 2, 0, 1, 1, 0])],
)
enter(
    [aten._adaptive_avg_pool2d.default],
    lambda d: [call(d.n(2, 3, 7, 8), [1, 1]), call(d.n(2, 3, 7, 8), [3, 4]), call(d.n(2, 3, 4), [3, 6])],
)
enter(
    [aten._adaptive_avg_pool2d_backward.default],
    lambda d: [call(d.n(2, 3, 1, 1), d.n(2, 3, 7, 8)), call(d.n(2, 3, 3, 4), d.n(2, 3, 7, 8))],
)

# Fourier transforms: dimensions, normalisation (0 to 2), and the direction or the form

enter(
    [aten._fft_c2c.default],
    lambda d: [
        call(d.c(3, 4, 5), [1, 2], 0, True),
        call(d.c(3, 4, 5), [2], 1, True),
        call(d.c(3, 4), [1, 0], 2, False),
        call(d.c(7), [0], 1, False),
        call(d.c(2, 3, 2, 3), [0, 1, 2, 3], 2, True),
        call(d.c(2, 3, 2, 3), [0, 1, 2, 3], 0, False),
    ],
)
enter(
    [aten._fft_r2c.default],
    lambda d: [
        call(d.n(3, 8), [1], 0, True),
        call(d.n(3, 7), [1], 1, True),
        call(d.n(3, 4, 6), [2, 1], 2, True),
        call(d.n(2, 3, 2, 3), [0, 1, 2, 3], 1, True),
        call(d.n(3, 4), [1, 0], 2, False),
    ],
)
enter(
    [aten._fft_c2r.default],
    lambda d: [
        call(d.c(3, 5), [1], 0, 8),
        call(d.c(3, 5), [1], 1, 9),
        call(d.c(3, 4, 4), [1, 2], 2, 6),
        call(d.c(3, 4, 4), [2, 1], 0, 7),
    ],
)

# Complex numbers. Each operation of `takes_complex` has a sample with some.

enter([aten.view_as_real.default], lambda d: [call(d.c(3, 4)), call(d.c())])
enter([aten.view_as_complex.default], lambda d: [call(d.n(3, 4, 2)), call(d.n(2))])
enter([aten.complex.default, aten.polar.default], lambda d: [call(d.n(3, 4), d.n(3, 4)), call(d.n(3, 4), d.n(4))])
enter(
    [
        getattr(aten, name).default
        for name in ["_conj", "_conj_physical", "neg", "abs", "sgn", "alias", "clone", "detach"]
    ],
    lambda d: [call(d.c(3, 4))],
)
enter([aten.add.Tensor, aten.sub.Tensor], lambda d: [call(d.c(3, 4), d.c(4), alpha=2), call(d.n(3, 4), d.c(4))])
enter([aten.mul.Tensor, aten.div.Tensor], lambda d: [call(d.c(3, 4), d.c(4)), call(d.c(3, 4), d.n(4))])
enter([aten.mul.Scalar, aten.div.Scalar], lambda d: [call(d.c(3, 4), 2.5), call(d.c(3), 1 + 2j)])
enter([aten.mm.default], lambda d: [call(d.c(3, 4), d.c(4, 5))])
enter([aten.bmm.default], lambda d: [call(d.c(2, 3, 4), d.c(2, 4, 5))])
enter([aten.sum.dim_IntList], lambda d: [call(d.c(3, 4), [0], True)])
enter([aten.where.self], lambda d: [call(d.b(3, 4), d.c(3, 4), d.c(4))])
enter([aten._to_copy.default], lambda d: [call(d.n(3), dtype=d.c().dtype)])
enter([aten.view.default, aten._unsafe_view.default], lambda d: [call(d.c(3, 4), [4, 3])])
enter([aten.unsqueeze.default], lambda d: [call(d.c(3), 0)])
enter([aten.squeeze.dims], lambda d: [call(d.c(3, 1), [1])])
enter([aten.expand.default], lambda d: [call(d.c(3, 1), [3, 4])])
enter([aten.permute.default], lambda d: [call(d.c(3, 4), [1, 0])])
enter([aten.transpose.int], lambda d: [call(d.c(3, 4), 0, 1)])
enter([aten.slice.Tensor], lambda d: [call(d.c(5), 0, 1, 4)])
enter([aten.slice_scatter.default], lambda d: [call(d.c(5), d.c(3), 0, 1, 4)])
enter([aten.select.int], lambda d: [call(d.c(5, 2), 0, -1)])
enter([aten.cat.default], lambda d: [call([d.c(3), d.c(2)])])
enter([aten.constant_pad_nd.default], lambda d: [call(d.c(3), [1, 2])])
enter([aten.full.default], lambda d: [call([3], 1 + 2j, dtype=d.c().dtype)])
enter([aten.full_like.default], lambda d: [call(d.c(3), 1.5)])
enter([aten.zeros.default], lambda d: [call([3], dtype=d.c().dtype)])
enter([aten.copy.default], lambda d: [call(d.c(3), d.c(3)), call(d.c(3), d.n(3))])
enter([aten.scalar_tensor.default], lambda d: [call(1 + 2j, dtype=d.c().dtype)])

# Normalisation

enter(
    [aten._native_batch_norm_legit_functional.default],
    lambda d: [
        call(d.n(4, 3, 5, 5), d.n(3), d.n(3), d.n(3), d.u(3), True, 0.1, 1e-5),
        call(d.n(6, 3), None, None, d.n(3), d.u(3), True, 0.1, 1e-3),
    ],
)
enter([aten._native_batch_norm_legit.no_stats], lambda d: [call(d.n(4, 3, 5), d.n(3), d.n(3), True, 0.1, 1e-5)])
enter(
    [aten._native_batch_norm_legit_no_training.default],
    lambda d: [call(d.n(4, 3, 5), d.n(3), d.n(3), d.n(3), d.u(3), 0.1, 1e-5)],
)
enter(
    [aten.native_layer_norm.default],
    lambda d: [call(d.n(2, 3, 4), [4], d.n(4), d.n(4), 1e-5), call(d.n(2, 3, 4), [3, 4], None, None, 1e-5)],
)
enter(
    [aten._weight_norm_interface_backward.default],
    lambda d: [
        call(d.n(4, 3, 2), v := d.n(4, 3, 2), d.n(*shape), v.norm(dim=over, keepdim=True), dim)
        for dim, shape, over in ((0, (4, 1, 1), (1, 2)), (2, (1, 1, 2), (0, 1)))
    ],
)
enter(
    [aten.native_group_norm.default],
    lambda d: [
        call(d.n(2, 6, 4, 4), d.n(6), d.n(6), 2, 6, 16, 3, 1e-5),
        call(d.n(2, 4, 5), None, None, 2, 4, 5, 2, 1e-5),
    ],
)

# Indexing

enter(
    [aten.embedding.default],
    lambda d: [call(d.n(9, 4), d.i(2, 3, low=0, high=9)), call(d.n(9, 4), d.i(5, low=0, high=9).int(), 0)],
)
enter(
    [aten.index_select.default],
    lambda d: [call(d.n(4, 5), 1, d.i(3, low=0, high=5)), call(d.n(4, 5), -2, d.i(6, low=0, high=4))],
)
enter(
    [aten.embedding_dense_backward.default],
    lambda d: [
        call(d.n(2, 3, 4), d.i(2, 3, low=0, high=5), 5, -1, False),
        call(d.n(9, 4), d.i(9, low=0, high=3), 5, 0, True),
    ],
)
enter(
    [aten.gather.default],
    lambda d: [
        call(d.n(3, 4), 1, d.i(3, 2, low=0, high=4)),
        call(d.n(3, 4), 0, d.i(2, 4, low=0, high=3)),
        call(d.n(3, 4, 2), -1, d.i(2, 3, 5, low=0, high=2)),
    ],
)
enter(
    [aten.scatter.value],
    lambda d: [call(d.n(3, 4), 1, d.i(3, 1, low=0, high=4), -1.0), call(d.n(3, 4), 0, d.i(2, 3, low=0, high=3), 2)],
)
enter([aten.scatter.src], lambda d: [call(d.n(3, 4), 1, torch.tensor([[0, 2], [1, 3], [3, 0]]), d.n(3, 4))])
enter(
    [aten.scatter_add.default],
    lambda d: [
        call(d.n(3, 4), 1, d.i(3, 6, low=0, high=4), d.n(3, 6)),
        call(d.n(3, 4), 0, d.i(2, 3, low=0, high=3), d.n(3, 4)),
    ],
)
enter(
    [aten.scatter_reduce.two],
    lambda d: [
        call(d.n(3, 4), 1, d.i(3, 6, low=0, high=4), d.n(3, 6), reduce, include_self=include)
        for reduce in ("sum", "mean", "prod", "amax", "amin")
        for include in (True, False)
    ],
)
enter(
    [aten.masked_scatter.default], lambda d: [call(d.n(3, 4), d.b(3, 4), d.n(12)), call(d.n(3, 4), d.b(4), d.n(4, 3))]
)
enter([aten.masked_scatter_backward.default], lambda d: [call(d.n(3, 4), d.b(3, 4), [5, 3])])
enter(
    [aten.searchsorted.Tensor],
    lambda d: [
        call(torch.arange(4, dtype=d.dtype), d.i(3, 5, low=-1, high=6).to(d.dtype)),
        call(d.n(3, 6).sort().values, d.n(3, 2), right=True),
        call(x := d.n(6), d.n(4), sorter=x.argsort(), side="right"),
    ],
)
enter(
    [aten.bucketize.Tensor],
    lambda d: [
        call(d.i(3, 5, low=-1, high=6).to(d.dtype), torch.arange(4, dtype=d.dtype), right=right)
        for right in (False, True)
    ],
)
_INDICES = [
    lambda d: [d.i(5, low=0, high=4)],
    lambda d: [None, d.i(2, 3, low=-5, high=5)],
    lambda d: [d.i(3, low=0, high=4), d.i(3, low=0, high=5)],
    lambda d: [d.i(3, 1, low=0, high=4), None, d.i(2, low=0, high=3)],
]
enter([aten.index.Tensor, aten._unsafe_index.Tensor], lambda d: [call(d.n(4, 5, 3), make(d)) for make in _INDICES])
enter(
    [aten.index_put.default, aten._unsafe_index_put.default],
    lambda d: [
        call(d.n(4, 5), [d.i(6, low=0, high=4)], d.n(6, 5), True),
        call(d.n(4, 5), [None, torch.tensor([3, 1])], d.n(4, 2)),
        call(d.n(4, 5), [torch.tensor([1, 2])], torch.tensor(0.0, dtype=d.dtype)),
        call(d.n(4, 5), [torch.tensor([-1, 0]), torch.tensor([0, -2])], d.n(2), True),
    ],
)

enter(
    [aten.index_put.default, aten._unsafe_index_put.default],
    lambda d: [
        call(d.n(3, 4), [d.b(3, 4)], d.n()),
        call(d.n(3, 4), [d.b(3)], d.n(4)),
        call(d.n(3, 4), [None, d.b(4)], d.n(1), True),
    ],
)

# Creation

enter(
    [aten.full.default],
    lambda d: [call([2, 3], 1.5, dtype=d.dtype), call([], 2, dtype=torch.int64), call([2], True, dtype=torch.bool)],
)
enter([aten.full_like.default], lambda d: [call(d.n(2, 3), 7), call(d.n(2), 1, dtype=torch.int64)])
enter([aten.zeros.default, aten.ones.default], lambda d: [call([2, 3], dtype=d.dtype)])
enter([aten.zeros_like.default, aten.ones_like.default], lambda d: [call(d.n(2, 3)), call(d.n(2), dtype=torch.int64)])
enter([aten.new_zeros.default, aten.new_ones.default], lambda d: [call(d.n(2, 3), [4])])
enter([aten.scalar_tensor.default], lambda d: [call(1.5, dtype=d.dtype), call(3, dtype=torch.int64)])
enter(
    [aten.arange.start_step],
    lambda d: [call(0, 7, dtype=torch.int64), call(2, 9, 3, dtype=torch.int64), call(0, 1, 0.25, dtype=d.dtype)],
)

# No values to compare: only the shape and the type.

UNDEFINED: dict[Any, Callable[[Draw], list[Sample]]] = {
    aten.empty.memory_format: lambda d: [call([2, 3], dtype=d.dtype)],
    aten.empty_like.default: lambda d: [call(d.n(2, 3))],
    aten.new_empty_strided.default: lambda d: [call(x, [2, 3], [1, 2]) for x in (d.n(2, 3), d.c(2, 3))],
    aten.new_empty.default: lambda d: [call(d.n(2, 3), [4])],
    aten.empty_strided.default: lambda d: [call([2, 3], [3, 1], dtype=d.dtype)],
    aten.empty_permuted.default: lambda d: [call([2, 3], [1, 0], dtype=d.dtype)],
}

# Random operations have a test of their moments: (arguments, expected mean, expected standard deviation)

_THIRD = (1 / 12) ** 0.5
RANDOM: dict[Any, tuple[Sample, float, float]] = {
    aten.bernoulli.p: (call(torch.zeros(100, 100), 0.3), 0.3, 0.21**0.5),
    aten.bernoulli.default: (call(torch.full((100, 100), 0.3)), 0.3, 0.21**0.5),
    aten.rand.default: (call([100, 100]), 0.5, _THIRD),
    aten.rand_like.default: (call(torch.zeros(100, 100)), 0.5, _THIRD),
    aten.uniform.default: (call(torch.zeros(100, 100), -1.0, 3.0), 1.0, 4 * _THIRD),
    aten.normal_functional.default: (call(torch.zeros(100, 100), -1.0, 3.0), -1.0, 3.0),
    aten.normal.Tensor_float: (call(torch.full((100, 100), 2.0), 3.0), 2.0, 3.0),
    aten.normal.float_Tensor: (call(2.0, torch.full((100, 100), 3.0)), 2.0, 3.0),
    aten.normal.Tensor_Tensor: (call(torch.full((100, 100), 2.0), torch.full((100, 100), 3.0)), 2.0, 3.0),
    aten.exponential.default: (call(torch.zeros(100, 100), 4.0), 0.25, 0.25),
    aten.randn.default: (call([100, 100]), 0.0, 1.0),
    aten.randn_like.default: (call(torch.zeros(100, 100)), 0.0, 1.0),
    aten.randint.default: (call(10, [100, 100]), 4.5, (99 / 12) ** 0.5),
    aten.randint.low: (call(5, 15, [100, 100]), 9.5, (99 / 12) ** 0.5),
    aten.randperm.default: (call(10000), 4999.5, (99999999 / 12) ** 0.5),
}
