"""Arithmetic, memory traffic and peak memory of a captured graph, counted without a compiler.

Plans use them for hardware without a compiler on this machine: GPUs, and eager training on CPUs. A training that has run
out of memory uses them to tell which batch fits.

    flops     of matrix products, convolutions and attention. All other operations count as free, as do products with the
              padding of a convolution and with the part that causal attention masks.
    traffic   the bytes that a step must move at least, if each chain of elementwise operations were free. Each product,
              reduction and gather reads its operands and writes its results. The step reads and writes its state.
    memory    the most bytes that are alive at once in an eager step, by the rules of `lifetimes.py`.
    kernels   the operations of an eager step, or those that remain if chains of elementwise ones are fused, each with its
              arithmetic and its bytes. On one device they run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from footplate.step.xla.capture import averaging_op  # noqa: F401  it declares torch.ops.footplate.average
from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.flops import convolution_flops_of, flops_of
from footplate.step.xla.capture.lifetimes import is_elementwise, is_view, lifetimes_of, nbytes_of, peak_of

AVERAGE = torch.ops.footplate.average.default


@dataclass(frozen=True)
class Needs:
    """The needs of one step on one device.

    Attributes:
        flops: floating-point operations; a multiplication with an addition counts as two.
        convolution_flops: the part of convolutions in `flops`.
        traffic_bytes: see the docstring of this file.
        state_bytes: parameters, buffers and the optimizer's state.
        batch_bytes: the batch.
        peak_bytes: the most that is alive at once, with state and batch.
        averaged_bytes: the data that each device exchanges: gradients, floating-point buffers, logs.
    """

    flops: float
    convolution_flops: float
    traffic_bytes: int
    state_bytes: int
    batch_bytes: int
    peak_bytes: int
    averaged_bytes: int


def needs(captured: Captured) -> Needs:
    """Count the needs of a captured step."""
    nodes, state = list(captured.graph.graph.nodes), len(captured.paths)
    inputs = [nbytes_of(node.meta["val"]) for node in nodes if node.op == "placeholder"]
    averages = [node for node in nodes if node.target is AVERAGE]
    lifetimes = lifetimes_of(nodes, parameters_of(captured))
    return Needs(
        flops=sum(map(flops_of, nodes)),
        convolution_flops=sum(map(convolution_flops_of, nodes)),
        traffic_bytes=_traffic(nodes),
        state_bytes=sum(inputs[:state]),
        batch_bytes=sum(inputs[state + captured.rates :]),
        peak_bytes=peak_of(lifetimes.each, lifetimes.operations),
        averaged_bytes=sum(nbytes_of(node.meta["val"]) for node in averages),
    )


def parameters_of(captured: Captured) -> dict[Node, str]:
    """Return the nodes that are the module's parameters, with their names."""
    nodes = captured.graph.graph.nodes
    return {node: str(path[1]) for node, path in zip(nodes, captured.paths, strict=False) if path[0] == "params"}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a device.

    Attributes:
        flops: its floating-point operations.
        nbytes: the bytes that it reads and writes.
    """

    flops: float
    nbytes: int


def kernels_of(nodes: Iterable[Node], least: int = 0, fused: bool = True) -> list[Kernel]:
    """List the kernels among nodes, without those of no arithmetic and no bytes.

    Args:
        nodes: nodes of a captured graph, in order.
        least: count only tensors of at least this many bytes. Smaller ones may stay in a cache.
        fused: leave out elementwise operations, as if compilers fused all of them with others. Otherwise each operation of
            the eager step is a kernel.
    """
    kernels = []
    for group in _kernel_groups(nodes, fused):
        inside = set(group)
        read = dict.fromkeys(used for node in group for used in node.all_input_nodes if used not in inside)
        written = (
            [node for node in group if any(user not in inside for user in node.users)] if len(group) > 1 else group
        )
        sizes = [nbytes_of(node.meta.get("val")) for node in (*read, *written)]
        kernel = Kernel(sum(map(flops_of, group)), sum(size for size in sizes if size >= least))
        if kernel.flops or kernel.nbytes:
            kernels.append(kernel)
    return kernels


def _kernel_groups(nodes: Iterable[Node], fused: bool) -> list[list[Node]]:
    """Put the nodes of each kernel together."""
    groups: list[list[Node]] = []
    for node in nodes:
        if node.op != "call_function" or is_view(node) or (fused and is_elementwise(node)):
            continue
        number = node.meta.get("eager_operation")
        if not fused and groups and number is not None and number == groups[-1][-1].meta.get("eager_operation"):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _traffic(nodes: list[Node]) -> int:
    total = sum(kernel.nbytes for kernel in kernels_of(nodes))
    for node in nodes:
        if node.op == "placeholder":
            total += nbytes_of(node.meta["val"])
        elif node.op == "output":
            total += sum(nbytes_of(used.meta["val"]) for used in node.all_input_nodes)
    return total
