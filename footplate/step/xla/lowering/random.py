"""Random operations with JAX's keys, without a generator.

Each operation of a graph has its own key, made from the step's key and the number of its draw. The same key gives the
same numbers on any hardware and after any resume. They differ from those of torch's own generator.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from footplate.step.xla.lowering.table import Context, aten, lowers


@lowers(aten.native_dropout.default)
def dropout(context: Context, x: Any, p: float, train: bool | None = True) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(context.key(), 1 - p, x.shape)
    return jnp.where(kept, x * (1 / (1 - p) if p < 1 else 0), 0).astype(x.dtype), kept


@lowers(aten.bernoulli.p)
def bernoulli(context: Context, x: Any, p: float = 0.5, **_: Any) -> Any:
    return jax.random.bernoulli(context.key(), p, x.shape)


@lowers(aten.bernoulli.default)
def bernoulli_of(context: Context, x: Any, **_: Any) -> Any:
    return jax.random.bernoulli(context.key(), x)


@lowers(aten.rand.default, aten.rand_like.default)
def uniform(context: Context, *_: Any, **__: Any) -> Any:
    return jax.random.uniform(context.key(), context.shape, context.dtype)


@lowers(aten.uniform.default)
def uniform_between(context: Context, x: Any, low: float = 0.0, high: float = 1.0, **_: Any) -> Any:
    return jax.random.uniform(context.key(), context.shape, context.dtype, low, high)


@lowers(aten.randn.default, aten.randn_like.default)
def normal(context: Context, *_: Any, **__: Any) -> Any:
    return jax.random.normal(context.key(), context.shape, context.dtype)


@lowers(aten.normal_functional.default)
def normal_around(context: Context, x: Any, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
    return mean + std * jax.random.normal(context.key(), context.shape, context.dtype)


@lowers(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal_around_each(context: Context, mean: Any, std: Any = 1.0, **_: Any) -> Any:
    return mean + std * jax.random.normal(context.key(), context.shape, context.dtype)


@lowers(aten.exponential.default)
def exponential(context: Context, x: Any, rate: float = 1.0, **_: Any) -> Any:
    return jax.random.exponential(context.key(), context.shape, context.dtype) / rate


@lowers(aten.randint.low)
def integers(context: Context, low: int, high: int, size: Any, **_: Any) -> Any:
    return jax.random.randint(context.key(), context.shape, low, high, context.dtype)


@lowers(aten.randint.default)
def integers_below(context: Context, high: int, size: Any, **_: Any) -> Any:
    return jax.random.randint(context.key(), context.shape, 0, high, context.dtype)


@lowers(aten.randperm.default)
def permutation(context: Context, n: int, **_: Any) -> Any:
    return jax.random.permutation(context.key(), n)
