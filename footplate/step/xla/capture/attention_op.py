"""Attention as one operation of the graph, so that it can be computed without the matrix of length × length.

During capture, `F.scaled_dot_product_attention` (which `nn.MultiheadAttention`, torchvision, timm and transformers
call) becomes `footplate::attention`. It returns the result and, for each query, the logarithm of the sum of its
exponentials. The backward pass (`footplate::attention_backward`) computes the probabilities again from these sums. Both
get the seed that dropout draws from. An added mask may learn itself (a relative position bias): its gradient is summed
into its own shape. The functions here define the operations in plain torch. `lowering/attention.py` computes them some
queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from footplate.step.xla.capture.attention_masks import simplified


def probabilities(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The softmax of the scores, and the logarithms of its sums.

    Returns:
        The probabilities (…, queries, keys), zeros for a query that may see no key, and the sums (…, queries).
    """
    scores = _wide(q) @ _wide(k).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    sums = torch.logsumexp(scores, -1)
    sums = torch.where(sums == -math.inf, math.inf, sums)
    return torch.exp(scores - sums[..., None]), sums


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _share(seed: Tensor | None, p: float, like: Tensor) -> Tensor | float:
    """The factors of dropout for the probabilities."""
    if seed is None:
        return 1.0
    generator = torch.Generator().manual_seed(int(seed))
    return (torch.rand(like.shape, generator=generator) >= p).to(like.dtype) / (1 - p)


@torch.library.custom_op("footplate::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, p: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q (…, queries, width) over k (…, keys, width) and v (…, keys, width of values).

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: truth values or numbers to be added, to be broadcast to (…, queries, keys).
        seed: the seed of dropout, or None for no dropout.
        p: the probability of dropout.
        causal: a query sees no later keys.
        scale: the factor of the scores.

    Returns:
        The result, in q's type, and the logarithms of the sums of exponentials, in at least single precision.
    """
    weights, sums = probabilities(q, k, mask, causal, scale)
    return (weights * _share(seed, p, weights) @ _wide(v)).to(q.dtype), sums


@torch.library.custom_op("footplate::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, result: Tensor,
    sums: Tensor, learns: bool, p: float, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and the mask, from the result's gradient and what `attention` got and returned.

    If the mask doesn't learn, its gradient has no elements.
    """
    weights, _ = probabilities(q, k, mask, causal, scale)
    share, gradient = _share(seed, p, weights), _wide(gradient)
    of_scores = weights * (gradient @ _wide(v).mT * share - (gradient * _wide(result)).sum(-1, keepdim=True))
    of_q, of_k, of_v = of_scores @ _wide(k) * scale, of_scores.mT @ _wide(q) * scale, (weights * share).mT @ gradient
    of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype) if learns and mask is not None else q.new_empty(0)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_mask


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: Any, p: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    sums = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=sums)


@attention_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    seed: Any,
    result: Any,
    sums: Any,
    learns: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_mask = mask.new_empty(mask.shape) if learns else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_mask


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, seed, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, mask, seed, *output)


def _differentiate(ctx: Any, gradient: Tensor, of_sums: Any) -> tuple[Any, ...]:
    learns = ctx.needs_input_grad[3]
    *of_qkv, of_mask = attention_backward(gradient, *ctx.saved_tensors, learns, *ctx.settings)
    return *of_qkv, of_mask if learns else None, None, None, None, None


attention.register_autograd(_differentiate, setup_context=_remember)


def _products(q: Any, k: Any, v: Any, of_width: int, of_values: int) -> int:
    """Floating-point operations, from shapes, of `of_width` products over q's width and `of_values` over v's width."""
    return 2 * math.prod(q[:-1]) * k[-2] * (of_width * q[-1] + of_values * v[-1])


@register_flop_formula(torch.ops.footplate.attention)
def _(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return _products(q, k, v, 1, 1)


@register_flop_formula(torch.ops.footplate.attention_backward)
def _(gradient: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return _products(q, k, v, 3, 2)


torchs_attention = F.scaled_dot_product_attention


@contextmanager
def attention_as_one() -> Iterator[None]:
    """Replace `F.scaled_dot_product_attention` by `attend` inside the `with` block.

    So the calls of `nn.MultiheadAttention`, which come from inside another function of torch, are captured too.
    """
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = torchs_attention


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention`, as the operation above."""
    # Torch refuses both together.
    if attn_mask is not None and is_causal:
        return torchs_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    attn_mask, is_causal = simplified(attn_mask, is_causal)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    seed = torch.randint(0, 2**31 - 1, (), device=q.device) if dropout_p else None
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return attention(q, k, v, attn_mask, seed, float(dropout_p), bool(is_causal), float(scale))[0]
