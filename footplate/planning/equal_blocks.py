"""Equal blocks: a model of eighty equal blocks is captured with three and with four of them.

What a step needs is linear in the number of equal blocks, for each part of the step: the first blocks, the last ones, and
what lies around them. So the difference of the two captures is one more block, and eighty blocks cost what seven do.

Two blocks are equal if their layers have the same classes, the same attributes, and tensors of the same shapes and types.
An attribute that is the block's own number, such as the `layer_idx` of transformers, may differ. Any other difference
makes the blocks unequal, and then the whole model is captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn

# The two captures. With three blocks, the first and the last two have the neighbours that they have among eighty.
FEWER, MORE = 3, 4

_PRIVATE = set(vars(nn.Module())) - {"training"}


def longest_list(module: nn.Module) -> tuple[str, int] | None:
    """Find the name and the length of the longest list of equal blocks; None if none has more than `MORE`."""
    lists = [
        (len(layer), name)
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.ModuleList, nn.Sequential)) and len(layer) > MORE and _all_equal(list(layer))
    ]
    if not lists:
        return None
    length, name = max(lists)
    return name, length


def shorten(module: nn.Module, name: str, count: int) -> None:
    """Leave the first `count` blocks of a list."""
    blocks: Any = module.get_submodule(name)
    del blocks[count:]


def _all_equal(blocks: list[nn.Module]) -> bool:
    has_parameters = any(True for _ in blocks[0].parameters())
    numbered = enumerate(blocks)
    return has_parameters and all(_equal(*first, *second) for first, second in pairwise(numbered))


def _equal(number: int, block: nn.Module, other_number: int, other: nn.Module) -> bool:
    layers, others = list(block.named_modules()), list(other.named_modules())
    return len(layers) == len(others) and all(
        name == other_name
        and type(layer) is type(other_layer)
        and list(_tensors(layer)) == list(_tensors(other_layer))
        and _same_attributes(number, layer, other_number, other_layer)
        for (name, layer), (other_name, other_layer) in zip(layers, others, strict=True)
    )


def _tensors(layer: nn.Module) -> Iterator[tuple[Any, ...]]:
    for kind in (layer._parameters, layer._buffers):
        for name, tensor in kind.items():
            yield name, tensor is None or (tensor.shape, tensor.dtype, tensor.requires_grad)


def _same_attributes(number: int, layer: nn.Module, other_number: int, other: nn.Module) -> bool:
    mine = {name: value for name, value in vars(layer).items() if name not in _PRIVATE}
    theirs = {name: value for name, value in vars(other).items() if name not in _PRIVATE}
    return mine.keys() == theirs.keys() and all(
        _same(value, theirs[name]) or (type(value) is int and (value, theirs[name]) == (number, other_number))
        for name, value in mine.items()
    )


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        # An array has no single truth value. It counts as different, so that the model is captured whole.
        return False
