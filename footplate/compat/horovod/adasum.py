"""Adasum: a combination of gradients that adds orthogonal gradients and averages equal ones.

Two gradients a, b become  (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b . With 2ᵏ ranks, neighbours are combined in pairs, then
the pairs, and so on. (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def combined(tensors: Sequence[Tensor]) -> Tensor:
    """Combine the ranks' tensors, whose number is a power of two.

    >>> combined([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])])
    tensor([2., 4.])
    >>> combined([torch.tensor([2.0, 4.0]), torch.tensor([2.0, 4.0])])
    tensor([2., 4.])
    """
    level = list(tensors)
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _pair(a: Tensor, b: Tensor) -> Tensor:
    wide_a, wide_b = a.double(), b.double()
    dot, norm_a, norm_b = (wide_a * wide_b).sum(), wide_a.square().sum(), wide_b.square().sum()
    half = torch.full_like(dot, 0.5)
    share_a = 1 - torch.where(norm_a > 0, half * dot / norm_a, torch.zeros_like(dot))
    share_b = 1 - torch.where(norm_b > 0, half * dot / norm_b, torch.zeros_like(dot))
    return (share_a * wide_a + share_b * wide_b).to(a.dtype)
