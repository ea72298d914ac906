"""Batch, layer, group and weight normalisation. Half precision is computed in single precision, as in torch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from footplate.step.xla.lowering.table import Context, aten, lowers, wide


def _over_channels(x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions over which a channel's statistics are computed, and the shape that broadcasts over channels."""
    return (0, *range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)


def _scaled(y: Any, weight: Any, bias: Any, shape: tuple[int, ...]) -> Any:
    if weight is not None:
        y = y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Return the result, the batch's mean and inverse deviation, and the new running mean and variance."""
    over, channel = _over_channels(x)
    values = wide(x)
    if training:
        now = jnp.mean(values, over)
        spread = jnp.mean(jnp.square(values - now.reshape(channel)), over)
        if mean is not None:
            count = x.size // x.shape[1]
            mean = mean + momentum * (now.astype(mean.dtype) - mean)
            variance = variance + momentum * ((spread * (count / max(count - 1, 1))).astype(variance.dtype) - variance)
    else:
        now, spread = wide(mean), wide(variance)
    inverse = lax.rsqrt(spread + eps)
    y = _scaled((values - now.reshape(channel)) * inverse.reshape(channel), weight, bias, channel)
    return y.astype(x.dtype), now, inverse, mean, variance


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm(context: Context, *args: Any) -> Any:
    return _batch_norm(*args)


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_alone(
    context: Context, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps)[:3]


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_evaluating(
    context: Context, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> Any:
    y = _batch_norm(x, weight, bias, mean, variance, False, momentum, eps)[0]
    return y, jnp.zeros((0,), x.dtype), jnp.zeros((0,), x.dtype)


@lowers(aten.native_layer_norm.default)
def layer_norm(context: Context, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    over = tuple(range(x.ndim - len(shape), x.ndim))
    values = wide(x)
    mean = jnp.mean(values, over, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(values - mean), over, keepdims=True) + eps)
    y = _scaled((values - mean) * inverse, weight, bias, tuple(shape))
    return y.astype(x.dtype), mean, inverse


@lowers(aten.native_group_norm.default)
def group_norm(
    context: Context, x: Any, weight: Any, bias: Any, batch: int, channels: int, pixels: int, groups: int, eps: float
) -> Any:
    values = wide(x).reshape(batch, groups, -1)
    mean = jnp.mean(values, -1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(values - mean), -1, keepdims=True) + eps)
    y = _scaled(((values - mean) * inverse).reshape(x.shape), weight, bias, _over_channels(x)[1])
    return y.astype(x.dtype), mean[..., 0], inverse[..., 0]


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(context: Context, gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> Any:
    """Gradients of v · g / norms, where norms are those of v over all dimensions except `dim`."""
    over = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    along = jnp.sum(gradient * v, over, keepdims=True) / norms
    return (gradient - v * along / norms) * g / norms, along
