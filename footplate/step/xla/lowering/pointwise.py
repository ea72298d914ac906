"""Operations on each element: arithmetic, functions of one number, comparisons, choices, types."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from footplate.step.xla.lowering.table import Context, aten, cast, comparing, elementwise, is_array, lowers


def _scaled(b: Any, alpha: Any) -> Any:
    return b if not is_array(alpha) and alpha == 1 else b * alpha


def _plus(a: Any, b: Any, alpha: Any = 1) -> Any:
    return a + _scaled(b, alpha)


def _minus(a: Any, b: Any, alpha: Any = 1) -> Any:
    return a - _scaled(b, alpha)


def _times(a: Any, b: Any) -> Any:
    both = is_array(a) and is_array(b) and a.dtype == b.dtype == bool
    return jnp.logical_and(a, b) if both else a * b


def _power(a: Any, b: Any) -> Any:
    """Small whole exponents as products, whose derivatives and roundings are torch's."""
    if is_array(b):
        return jnp.power(a, b)
    if b == 0.5 and jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.sqrt(a)
    if float(b).is_integer() and abs(b) <= 3 and (b >= 0 or jnp.issubdtype(a.dtype, jnp.floating)):
        return lax.integer_pow(a, int(b))
    return jnp.power(a, b)


elementwise(_plus, aten.add.Tensor, aten.add.Scalar)
elementwise(_minus, aten.sub.Tensor, aten.sub.Scalar)
elementwise(lambda a, b, alpha=1: b - _scaled(a, alpha), aten.rsub.Tensor, aten.rsub.Scalar)
elementwise(_times, aten.mul.Tensor, aten.mul.Scalar)
elementwise(operator.truediv, aten.div.Tensor, aten.div.Scalar)
elementwise(_power, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
elementwise(lambda a, b: jnp.power(jnp.asarray(a, b.dtype), b), aten.pow.Scalar)
elementwise(jnp.maximum, aten.maximum.default, aten.clamp_min.default)
elementwise(jnp.minimum, aten.minimum.default, aten.clamp_max.default)
elementwise(jnp.fmod, aten.fmod.Tensor, aten.fmod.Scalar)
elementwise(jnp.remainder, aten.remainder.Tensor, aten.remainder.Scalar)
elementwise(jnp.arctan2, aten.atan2.default)
elementwise(lambda start, end, weight: start + weight * (end - start), aten.lerp.Scalar, aten.lerp.Tensor)
elementwise(lambda x, a, b, value=1: x + value * a * b, aten.addcmul.default)
elementwise(lambda x, a, b, value=1: x + value * a / b, aten.addcdiv.default)

elementwise(jnp.exp, aten.exp.default)
elementwise(jnp.exp2, aten.exp2.default)
elementwise(jnp.expm1, aten.expm1.default)
elementwise(jnp.log, aten.log.default)
elementwise(jnp.log1p, aten.log1p.default)
elementwise(jnp.log2, aten.log2.default)
elementwise(jnp.log10, aten.log10.default)
elementwise(jnp.sqrt, aten.sqrt.default)
elementwise(lax.rsqrt, aten.rsqrt.default)
elementwise(jnp.reciprocal, aten.reciprocal.default)
elementwise(jnp.negative, aten.neg.default)
elementwise(jnp.sign, aten.sign.default, aten.sgn.default)
elementwise(jnp.floor, aten.floor.default)
elementwise(jnp.ceil, aten.ceil.default)
elementwise(jnp.trunc, aten.trunc.default)
elementwise(jnp.round, aten.round.default)
elementwise(lax.erf, aten.erf.default)
elementwise(lax.erfc, aten.erfc.default)
elementwise(jnp.sin, aten.sin.default)
elementwise(jnp.cos, aten.cos.default)
elementwise(jnp.tan, aten.tan.default)
elementwise(jnp.arcsin, aten.asin.default)
elementwise(jnp.arccos, aten.acos.default)
elementwise(jnp.arctan, aten.atan.default)
elementwise(jnp.sinh, aten.sinh.default)
elementwise(jnp.cosh, aten.cosh.default)
elementwise(jnp.tanh, aten.tanh.default)
elementwise(jnp.arcsinh, aten.asinh.default)
elementwise(jnp.arccosh, aten.acosh.default)
elementwise(jnp.arctanh, aten.atanh.default)

elementwise(jax.nn.sigmoid, aten.sigmoid.default)
elementwise(lambda x: jnp.maximum(x, 0), aten.relu.default)
elementwise(lambda x, low=-1.0, high=1.0: jnp.clip(x, low, high), aten.hardtanh.default)
elementwise(lambda x, slope=0.01: jnp.where(x > 0, x, x * slope), aten.leaky_relu.default)
elementwise(jax.nn.silu, aten.silu.default)


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale))


elementwise(_elu, aten.elu.default)


@lowers(aten.abs.default)
def absolute(context: Context, x: Any) -> Any:
    """Not in the type of the result: that of complex numbers is real."""
    return jnp.abs(x)


@lowers(aten.gelu.default)
def gelu(context: Context, x: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(context: Context, x: Any, low: Any = None, high: Any = None) -> Any:
    x = cast(x, context.dtype)
    if low is not None:
        x = jnp.maximum(x, cast(low, context.dtype))
    return x if high is None else jnp.minimum(x, cast(high, context.dtype))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_rounding(context: Context, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    a, b = cast(a, context.dtype), cast(b, context.dtype)
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return (
        jnp.trunc(a / b)
        if jnp.issubdtype(context.dtype, jnp.floating)
        else lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, a.dtype)))
    )


comparing(operator.eq, aten.eq.Tensor, aten.eq.Scalar)
comparing(operator.ne, aten.ne.Tensor, aten.ne.Scalar)
comparing(operator.lt, aten.lt.Tensor, aten.lt.Scalar)
comparing(operator.le, aten.le.Tensor, aten.le.Scalar)
comparing(operator.gt, aten.gt.Tensor, aten.gt.Scalar)
comparing(operator.ge, aten.ge.Tensor, aten.ge.Scalar)
comparing(jnp.isnan, aten.isnan.default)
comparing(jnp.isinf, aten.isinf.default)
comparing(jnp.logical_not, aten.logical_not.default)
comparing(jnp.logical_and, aten.logical_and.default)
comparing(jnp.logical_or, aten.logical_or.default)
comparing(jnp.logical_xor, aten.logical_xor.default)
comparing(jnp.signbit, aten.signbit.default)
elementwise(jnp.bitwise_not, aten.bitwise_not.default)
elementwise(jnp.bitwise_and, aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)
elementwise(jnp.bitwise_or, aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)
elementwise(jnp.bitwise_xor, aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)


@lowers(aten.where.self)
def where(context: Context, condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition, cast(a, context.dtype), cast(b, context.dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(context: Context, x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, cast(jnp.asarray(value), context.dtype), x)


@lowers(aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
def same(context: Context, x: Any, *_: Any, **__: Any) -> Any:
    return x


@lowers(aten._to_copy.default)
def convert(context: Context, x: Any, **_: Any) -> Any:
    return x.astype(context.dtype)


@lowers(torch.ops.prims.copy_strided.default)
def with_strides(context: Context, x: Any, strides: Any) -> Any:
    return x


@lowers(aten.copy.default)
def copied(context: Context, x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(source.astype(context.dtype), context.shape)


# During capture, torch's optimizers work on lists of tensors.


@lowers(aten._foreach_add.List)
def add_each(context: Context, several: Any, others: Any, alpha: Any = 1) -> Any:
    return [(a + _scaled(b, alpha)).astype(a.dtype) for a, b in zip(several, others, strict=True)]


@lowers(aten._foreach_mul.Scalar, aten._foreach_mul.Tensor)
def multiply_each(context: Context, several: Any, factor: Any) -> Any:
    return [(a * cast(factor, a.dtype)).astype(a.dtype) for a in several]


@lowers(aten._foreach_mul.List)
def multiply_pairs(context: Context, several: Any, others: Any) -> Any:
    return [a * b for a, b in zip(several, others, strict=True)]


@lowers(aten._foreach_neg.default)
def negate_each(context: Context, several: Any) -> Any:
    return [-a for a in several]
