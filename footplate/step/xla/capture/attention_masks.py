"""Attention masks that hold no data, recognised during capture so that attention costs what it costs in eager torch.

Libraries pass `is_causal=True` in eager torch, and build a mask of queries × keys when they notice a capture
(transformers does). Such a mask is computed from constants alone, so its value is known:

    all True, or all 0            no mask
    True below the diagonal       `is_causal=True`
    anything else, or data        the mask as it is

Each layer of a model may make its own mask, by the same operations. Their value is computed once.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from footplate.step.xla.capture import torch_tracing
from footplate.step.xla.capture.lifetimes import nbytes_of

# Bytes of an intermediate value. If one is larger, the mask stays as it is.
LARGEST = 2**30
_VERDICT = "mask_is"
# What masks are, by the operations that make them: the latest ones.
_KNOWN: dict[str, str] = {}
_MOST_KNOWN = 64


def simplified(mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """An equivalent mask and flag, without the mask if possible.

    Args:
        mask: a traced tensor (…, queries, keys): truth values, or numbers to be added to the scores.
        causal: a query sees no later keys; there is no mask then.
    """
    if mask is None or not torch_tracing.is_traced(mask) or mask.ndim < 2:
        return mask, causal
    node = torch_tracing.node_of(mask)
    if _VERDICT not in node.meta:
        node.meta[_VERDICT] = _verdict(node)
    return {"nothing": (None, False), "causal": (None, True)}.get(node.meta[_VERDICT], (mask, causal))


def _verdict(node: Node) -> str:
    sources = _sources(node)
    if sources is None:
        return "data"
    key = _operations(sources)
    if key not in _KNOWN:
        _KNOWN[key] = _computed(node, sources)
        if len(_KNOWN) > _MOST_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
    return _KNOWN[key]


def _operations(sources: list[Node]) -> str:
    """The operations that make a value, the last one, as text. Equal texts are equal values.

    An operation without a type in its arguments has torch's default type, so each line has the type of the result.
    """
    numbers = {source: f"%{number}" for number, source in enumerate(sources)}
    lines: list[str] = []
    for source in sources:
        arguments = map_arg((source.args, source.kwargs), lambda used: numbers[used])
        lines.append(f"{source.target} {arguments} {source.meta['val'].dtype}")
    return "\n".join(lines)


def _computed(node: Node, sources: list[Node]) -> str:
    """What a mask is, from its value."""
    with torch_tracing.without_modes():
        value = _value(node, sources)
        seen = value if value.dtype == torch.bool else _seen(value)
        if seen is None:
            return "numbers"
        if bool(seen.all()):
            return "nothing"
        causal = torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
        return "causal" if bool((seen == causal).all()) else "other"


def _seen(numbers: Tensor) -> Tensor | None:
    """The positions at which numbers that are added to scores leave a key visible; None if they do more than hide."""
    if not numbers.is_floating_point():
        return None
    seen, hidden = numbers == 0, numbers <= torch.finfo(numbers.dtype).min
    return seen if bool((seen | hidden).all()) else None


def _sources(node: Node) -> list[Node] | None:
    """All nodes that a value is computed from, in graph order; None if one is an input, a draw or too large."""
    sources, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        value = current.meta.get("val")
        if current.op != "call_function" or not isinstance(value, Tensor) or nbytes_of(value) > LARGEST:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return None
        for source in current.all_input_nodes:
            if source not in sources:
                sources.add(source)
                waiting.append(source)
    return [other for other in node.graph.nodes if other in sources]


def _value(node: Node, sources: list[Node]) -> Tensor:
    uses = Counter(used for source in sources for used in source.all_input_nodes)
    values: dict[Node, Tensor] = {}
    for source in sources:
        args, kwargs = map_arg((source.args, source.kwargs), lambda used: values[used])
        values[source] = source.target(*args, **kwargs)  # type: ignore[operator]
        for used in source.all_input_nodes:
            uses[used] -= 1
            if not uses[used]:
                del values[used]
    return values[node]
