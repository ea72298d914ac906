"""Floating-point operations of a captured graph. A multiplication with an addition counts as two.

Only matrix products, convolutions and attention count. All other operations count as free, as do products with the
padding of a convolution and with the part that causal attention masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from footplate.step.xla.capture import attention_op  # noqa: F401  it declares torch.ops.footplate.attention

_aten = torch.ops.aten
CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
ATTENTION = {torch.ops.footplate.attention.default, torch.ops.footplate.attention_backward.default}


def flops_of(node: Node) -> float:
    """Count the floating-point operations of one operation of a graph."""
    if node.target in CONVOLUTIONS:
        return convolution_flops_of(node)
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    flops = float(count(*args, **kwargs, out_val=node.meta["val"]))
    return flops / 2 if node.target in ATTENTION and node.args[-2] else flops


def convolution_flops_of(node: Node) -> float:
    """Count a convolution or its backward pass.

    torch's own formula counts products with padding too, and in the backward pass all channels for each group.
    """
    if node.target not in CONVOLUTIONS:
        return 0.0
    args: list[Any] = list(map_arg(node.args, lambda used: used.meta["val"]))
    if node.target is _aten.convolution.default:
        answer, times = node.meta["val"], 1
    else:
        answer, times = args.pop(0), sum(args[-1][:2])
    values, weights, _, strides, paddings, dilations, transposed = args[:7]
    fine, coarse = (answer, values) if transposed else (values, answer)

    flops = 2.0 * times * values.shape[0] * weights.shape[0] * weights.shape[1]
    for at, taps in enumerate(weights.shape[2:]):
        stride, padding, dilation = (setting[at % len(setting)] for setting in (strides, paddings, dilations))
        starts = [tap * dilation - padding for tap in range(taps)]
        flops *= sum(_inside(start, stride, fine.shape[2 + at], coarse.shape[2 + at]) for start in starts)
    return flops


def _inside(start: int, stride: int, size: int, steps: int) -> int:
    """Count the positions `start + n * stride`, for n below `steps`, that are within 0 and `size`."""
    first, end = max(0, -(start // stride)), -((start - size) // stride)
    return max(0, min(steps, end) - first)
