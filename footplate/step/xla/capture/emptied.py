"""Modules and batches that have shapes and no memory, to capture a step without the user's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def empty_copy(module: Any, device: str) -> Any:
    """Copy a module with new, uninitialised parameters and buffers. Shared tensors stay shared.

    Args:
        module: the module to copy.
        device: the device of the new tensors; on "meta" they have no memory.
    """
    # deepcopy takes the copies of tensors from this dictionary, and doesn't copy their values.
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        copies[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    for buffer in module.buffers():
        copies[id(buffer)] = torch.empty_like(buffer, device=device)
    return copy.deepcopy(module, copies)


def resized_leaf(leaf: Any, size: int, precision: str) -> Any:
    """Resize a leaf of a batch to `size` samples, on the meta device."""
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = torch.bfloat16 if precision == "bf16-true" and leaf.is_floating_point() else leaf.dtype
    return torch.empty((size, *leaf.shape[1:]) if leaf.dim() else (), dtype=dtype, device="meta")
