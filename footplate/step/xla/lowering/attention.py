"""Attention some queries at a time: memory grows with the length, not with its square.

A block of queries meets all keys, its probabilities are used, and the next block takes their place. The backward pass
computes them once more, from the scores and the sums that the forward pass kept, and adds up what each block gives to
keys and values. The gradient of a mask that learns is summed, block by block, over what the mask is broadcast over.
`capture/attention_op.py` defines the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from footplate.step.xla.capture import attention_op as _declared  # noqa: F401  declares the operations
from footplate.step.xla.lowering.table import Context, lowers, wide

BLOCK = 256
"""Queries at a time; no more than that are one block."""


class Blocks:
    """The queries of one attention, in blocks: (blocks, …, rows, …), the last one filled up with zeros."""

    def __init__(self, queries: int) -> None:
        self.queries, self.rows = queries, min(queries, BLOCK)
        self.count = -(-queries // self.rows)

    def cut(self, x: Any, dim: int) -> Any:
        """An array in blocks along a dimension, counted from the end."""
        missing = self.count * self.rows - self.queries
        x = jnp.pad(x, [(0, missing if at == x.ndim + dim else 0) for at in range(x.ndim)])
        at = x.ndim + dim
        return jnp.moveaxis(x.reshape(*x.shape[:at], self.count, self.rows, *x.shape[at + 1 :]), at, 0)

    def joined(self, blocks: Any, dim: int) -> Any:
        """What `cut` has cut, without what it has filled up."""
        at = blocks.ndim - 1 + dim
        x = jnp.moveaxis(blocks, 0, at)
        x = x.reshape(*x.shape[:at], self.count * self.rows, *x.shape[at + 2 :])
        return lax.slice_in_dim(x, 0, self.queries, axis=at)

    def run(self, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
        """`step` over the blocks, with the number of the block first among what it is given."""
        return lax.scan(step, carry, (jnp.arange(self.count), *xs))


def _product(formula: str, a: Any, b: Any) -> Any:
    """A product of matrices that is summed in at least single precision."""
    sums = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(formula, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=sums)


def _cut_mask(blocks: Blocks, mask: Any) -> tuple[Any, Any]:
    """A mask's blocks, where it differs between queries, and the mask where it doesn't."""
    if mask is None or mask.ndim < 2 or mask.shape[-2] == 1:
        return None, mask
    return blocks.cut(mask, -2), None


def _scores(q: Any, k: Any, mask: Any, first: Any, causal: bool, scale: float) -> Any:
    """The scores of a block, in at least single precision: minus infinity where a query doesn't see a key."""
    scores = _product("...qe,...ke->...qk", q, k) * scale
    if causal:
        rows, keys = jnp.arange(q.shape[-2])[:, None] + first, jnp.arange(k.shape[-2])
        scores = jnp.where(keys <= rows, scores, -jnp.inf)
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask


def _summed(of_scores: Any, mask: Any) -> Any:
    """The gradient of a block's scores, in the shape of the mask that was added to them."""
    shape = (1,) * (of_scores.ndim - mask.ndim) + mask.shape
    over = tuple(dim for dim, size in enumerate(shape) if size == 1)
    return jnp.sum(of_scores, over, keepdims=True).reshape(mask.shape)


def _share(seed: Any, p: float, number: Any, like: Any) -> Any:
    """What dropout multiplies a block's probabilities with."""
    if seed is None:
        return 1.0
    key = jax.random.fold_in(jax.random.key(seed), number)
    return jax.random.bernoulli(key, 1 - p, like.shape).astype(like.dtype) / (1 - p)


@lowers(torch.ops.footplate.attention.default)
def attention(
    context: Context, q: Any, k: Any, v: Any, mask: Any, seed: Any, p: float, causal: bool, scale: float
) -> Any:
    blocks = Blocks(q.shape[-2])
    masks, whole = _cut_mask(blocks, mask)

    def step(carry: None, given: Any) -> tuple[None, Any]:
        number, block, mask = given
        scores = _scores(block, k, whole if mask is None else mask, number * blocks.rows, causal, scale)
        sums = jax.nn.logsumexp(scores, axis=-1)
        sums = jnp.where(sums == -jnp.inf, jnp.inf, sums)
        weights = jnp.exp(scores - sums[..., None])
        weights = weights * _share(seed, p, number, weights)
        return None, (_product("...qk,...ke->...qe", weights.astype(v.dtype), v).astype(q.dtype), sums)

    _, (results, sums) = blocks.run(step, None, (blocks.cut(q, -2), masks))
    return blocks.joined(results, -2), blocks.joined(sums, -1)


@lowers(torch.ops.footplate.attention_backward.default)
def attention_backward(
    context: Context, gradient: Any, q: Any, k: Any, v: Any, mask: Any, seed: Any, result: Any, sums: Any,
    learns: bool, p: float, causal: bool, scale: float,
) -> Any:  # fmt: skip
    blocks = Blocks(q.shape[-2])
    masks, whole = _cut_mask(blocks, mask)
    along = jnp.sum(wide(gradient) * wide(result), -1)

    def step(carry: Any, given: Any) -> tuple[Any, Any]:
        of_k, of_v, of_whole = carry
        number, block, of_result, sums, along, mask = given
        scores = _scores(block, k, whole if mask is None else mask, number * blocks.rows, causal, scale)
        weights = jnp.exp(scores - sums[..., None])
        share = _share(seed, p, number, weights)
        of_weights = _product("...qe,...ke->...qk", of_result, v) * share
        of_scores = weights * (of_weights - along[..., None])
        of_mask = _summed(of_scores, whole if mask is None else mask) if learns else None
        of_scores = (of_scores * scale).astype(q.dtype)
        of_k += _product("...qk,...qe->...ke", of_scores, block)
        of_v += _product("...qk,...qe->...ke", (weights * share).astype(v.dtype), of_result)
        of_q = _product("...qk,...ke->...qe", of_scores, k).astype(q.dtype)
        if learns and mask is None:
            of_whole, of_mask = of_whole + of_mask, None
        return (of_k, of_v, of_whole), (of_q, of_mask)

    cut = (blocks.cut(q, -2), blocks.cut(gradient, -2), blocks.cut(sums, -1), blocks.cut(along, -1), masks)
    begin = jnp.zeros_like(wide(whole)) if learns and masks is None else jnp.zeros(0, q.dtype)
    zeros = (jnp.zeros_like(wide(k)), jnp.zeros_like(wide(v)), begin)
    (of_k, of_v, of_mask), (of_q, of_masks) = blocks.run(step, zeros, cut)
    if of_masks is not None:
        of_mask = blocks.joined(of_masks, -2)
    return blocks.joined(of_q, -2), of_k, of_v, of_mask
