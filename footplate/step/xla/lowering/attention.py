"""Attention in blocks of queries: memory grows with the length, not with its square.

The forward pass computes the scores and probabilities of one block of queries with all keys, uses the probabilities, and
frees them before the next block. The backward pass computes the scores again and, with the sums that the forward pass
kept, the probabilities. It adds up each block's contributions to the gradients of keys and values. The gradient of a
mask that is trained is summed over the dimensions in which the mask is broadcast, block by block.

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
"""The queries in a block. A sequence of at most this many queries is one block."""


class Blocks:
    """The queries of an attention, in blocks: (blocks, …, rows, …). The last block is padded with zeros."""

    def __init__(self, queries: int) -> None:
        self.queries, self.rows = queries, min(queries, BLOCK)
        self.count = -(-queries // self.rows)

    def cut(self, x: Any, dim: int) -> Any:
        """Cut an array into blocks along a dimension, counted from the end."""
        missing = self.count * self.rows - self.queries
        x = jnp.pad(x, [(0, missing if at == x.ndim + dim else 0) for at in range(x.ndim)])
        at = x.ndim + dim
        return jnp.moveaxis(x.reshape(*x.shape[:at], self.count, self.rows, *x.shape[at + 1 :]), at, 0)

    def joined(self, blocks: Any, dim: int) -> Any:
        """Join the blocks of `cut` again, without the padding."""
        at = blocks.ndim - 1 + dim
        x = jnp.moveaxis(blocks, 0, at)
        x = x.reshape(*x.shape[:at], self.count * self.rows, *x.shape[at + 2 :])
        return lax.slice_in_dim(x, 0, self.queries, axis=at)

    def run(self, step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
        """Scan `step` over the blocks. The first element of its input is the number of the block."""
        return lax.scan(step, carry, (jnp.arange(self.count), *xs))


def _product(formula: str, a: Any, b: Any) -> Any:
    """Multiply matrices; sums are computed in at least single precision."""
    sums = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(formula, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=sums)


def _cut_mask(blocks: Blocks, mask: Any) -> tuple[Any, Any]:
    """Return (blocks, None) for a mask that differs between queries, else (None, the mask)."""
    if mask is None or mask.ndim < 2 or mask.shape[-2] == 1:
        return None, mask
    return blocks.cut(mask, -2), None


def _scores(q: Any, k: Any, mask: Any, first: Any, causal: bool, scale: float) -> Any:
    """Scores of a block, in at least single precision; minus infinity where a query must not see a key."""
    scores = _product("...qe,...ke->...qk", q, k) * scale
    if causal:
        rows, keys = jnp.arange(q.shape[-2])[:, None] + first, jnp.arange(k.shape[-2])
        scores = jnp.where(keys <= rows, scores, -jnp.inf)
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask


def _summed(of_scores: Any, mask: Any) -> Any:
    """Sum the gradient of a block's scores to the shape of the mask that was added to them."""
    shape = (1,) * (of_scores.ndim - mask.ndim) + mask.shape
    over = tuple(dim for dim, size in enumerate(shape) if size == 1)
    return jnp.sum(of_scores, over, keepdims=True).reshape(mask.shape)


def _share(seed: Any, p: float, number: Any, like: Any) -> Any:
    """Dropout's factor for each probability of a block."""
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

    def step(carry: None, inputs: Any) -> tuple[None, Any]:
        number, block, mask = inputs
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

    def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
        of_k, of_v, of_whole = carry
        number, block, of_result, sums, along, mask = inputs
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
