"""Layers whose tensors have their numbers in files: which tensors, and how each rank reads its part.

    remember(layer, "weight", stored)    before the layer is sharded
    fill(layers)                         after it: each rank reads the elements that it keeps

`footplate.load_pretrained` remembers. A strategy fills when the layers have memory. The record is an attribute of the
layer, so that it goes along when a module is copied or sent to other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

_RECORD = "_footplate_stored_weights"


@runtime_checkable
class Stored(Protocol):
    """A tensor in files.

    Attributes:
        shape: its shape.
        dtype: its type in the files.
        fingerprint: a number that differs if the files do.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def fingerprint(self) -> int: ...

    def read_into(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Read a box of the tensor, which begins at `offsets` and has the shape of `target`."""

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        ...


def remember(layer: nn.Module, key: str, stored: Stored) -> None:
    """Let a parameter or buffer of a layer get its numbers from files once it has memory."""
    vars(layer).setdefault(_RECORD, {})[key] = stored


def stored_of(layer: nn.Module) -> Mapping[str, Stored]:
    """The tensors of a layer that get their numbers from files, by their name in the layer."""
    return vars(layer).get(_RECORD, {})


def fingerprints_of(module: nn.Module) -> list[tuple[str, int]]:
    """The names of the tensors that get their numbers from files, and the fingerprints of these files."""
    return [
        (f"{name}.{key}", stored.fingerprint)
        for name, layer in module.named_modules()
        for key, stored in stored_of(layer).items()
    ]


def fill(layers: Iterable[nn.Module]) -> None:
    """Read the tensors of some layers that get their numbers from files. A rank reads only the elements that it keeps."""
    read: set[int] = set()
    for layer in layers:
        for tensor, stored in _taken(layer):
            if id(tensor) not in read:
                read.add(id(tensor))
                stored.read_into(*local_box(tensor))


def _taken(layer: nn.Module) -> Iterator[tuple[Tensor, Stored]]:
    """Forget the record of a layer, and yield what it has."""
    for key, stored in vars(layer).pop(_RECORD, {}).items():
        tensor = layer._parameters.get(key)
        tensor = layer._buffers.get(key) if tensor is None else tensor
        if tensor is not None:
            yield tensor, stored


def local_box(tensor: Any) -> tuple[Tensor, tuple[int, ...]]:
    """The elements of a tensor that this rank keeps, and the index in the whole tensor at which they begin."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach(), (0,) * tensor.dim()
    part = tensor.detach().to_local()
    (chunk,) = tensor.__create_chunk_list__()
    return part, tuple(chunk.offsets)


@torch.no_grad()
def part_like(stored: Stored, parameter: Any) -> Any:
    """Read the elements of a tensor that this rank keeps of a sharded parameter, as a `DTensor` sharded in the same way."""
    from torch.distributed.tensor import DTensor

    part, offsets = local_box(parameter)
    read = torch.empty_like(part, dtype=stored.dtype)
    stored.read_into(read, offsets)
    return DTensor.from_local(
        read, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


@torch.no_grad()
def copy_part(whole: Tensor, tensor: Any) -> None:
    """Copy the elements that this rank keeps of a sharded tensor from the whole one."""
    part, offsets = local_box(tensor)
    part.copy_(whole[tuple(slice(first, first + n) for first, n in zip(offsets, part.shape, strict=True))])
