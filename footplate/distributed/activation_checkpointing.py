"""Activation checkpointing: layers whose activations are computed again in the backward pass, instead of kept.

    "full"      a layer keeps its input only, and its forward pass runs a second time in the backward pass
    "op"        it also keeps the outputs of matrix products and attention, and only the other operations run again
    2           every second layer does as with "full", and the others keep all activations

Matrix products and attention take most of a layer's time. The norms and activations between them take little time, but as
much memory. Draws (dropout) are repeated, so the numbers stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# The names of ATen's operations that multiply matrices, convolve or attend.
COSTLY = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
})  # fmt: skip


def checkpoint_activations(layers: Sequence[nn.Module], mode: Literal["full", "op"] | int = "full") -> None:
    """Let layers keep no activations, or fewer. A layer that does so already stays as it is.

    Args:
        layers: the layers, in the order of the model.
        mode: see above. Of every n layers, the last one is chosen.
    """
    every = mode if isinstance(mode, int) else 1
    for layer in layers[every - 1 :: every]:
        forward = layer.forward
        if not (isinstance(forward, functools.partial) and forward.func is _forward):
            own = vars(layer).get("forward")
            layer.forward = functools.partial(_forward, layer, own, mode == "op")  # type: ignore[method-assign]


def _forward(layer: nn.Module, own: Any, keeps_costly: bool, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's forward pass: its class's, or its own.

    This is a function, and not a closure, so that a module can still be pickled and copied.
    """
    forward = functools.partial(type(layer).forward, layer) if own is None else own
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if keeps_costly:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _contexts() -> Any:
    """The contexts of a forward pass and of its repetition, in which the outputs of costly operations are kept."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().partition("::")[2].partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
