"""Sharded tensors in a checkpoint: each rank writes its own parts, and any number of ranks can read them.

    state.safetensors          written by rank 0: the run state, with a `Sharded` in place of each sharded tensor
    shard-00000.safetensors    written by rank 0: its part of each sharded tensor, under the tensor's name
    shard-00001.safetensors    written by rank 1: …

The file's header gives the offset of each part in the whole tensor, in the form that `torch.distributed.checkpoint` uses
for safetensors files (`HuggingFaceStorageWriter`). Its reader can therefore read these files. Footplate doesn't use
torch's own format, because its metadata is a pickle, and loading a pickle may run code.

On each rank, `cut_out` takes the sharded tensors out of a live state. `put_together` assembles them again, one file after
the other, so that reading needs memory for the whole and one part. The result is a state like any other, which
`Strategy.parts` shards again for any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from footplate.checkpoint.format.statefile import Sharded
from footplate.core.errors import CheckpointError

# Keys of torch.distributed.checkpoint.
_SHARDING_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True)
class Shards:
    """A rank's parts of the sharded tensors.

    Attributes:
        parts: its part of each tensor, by the tensor's name; empty parts are left out.
        offsets: the index in the whole tensor at which each part begins, in each dimension.
    """

    parts: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, list[int]] = field(default_factory=dict)

    def notes(self) -> dict[str, str]:
        """The metadata for the header of the rank's file."""
        return {_SHARDING_INFO: json.dumps({name: {_OFFSETS: offsets} for name, offsets in self.offsets.items()})}


def file_name(rank: int) -> str:
    """Name of the file with a rank's parts."""
    return f"shard-{rank:05d}.safetensors"


def cut_out(state: Any) -> tuple[Any, Shards]:
    """Replace each sharded tensor in a state by a `Sharded`; return that state and this rank's parts."""
    shards = Shards()
    with torch.no_grad():
        return _Cutter(shards).cut(state, ""), shards


def put_together(
    state: Any, files: Iterable[tuple[dict[str, Tensor], dict[str, str]]], source: str, device: Any
) -> Any:
    """Replace each `Sharded` in a state by its whole tensor: the inverse of `cut_out`.

    Args:
        state: the state as it was read.
        files: the tensors and the metadata of each file of shards.
        source: the checkpoint's name, for error texts.
        device: the device for the tensors.

    Raises:
        CheckpointError: the parts don't make up the whole tensors.
    """
    wanted: dict[str, Sharded] = {}
    _collect(state, wanted)
    whole = {
        sharded.name: torch.empty(sharded.shape, dtype=sharded.dtype, device=device) for sharded in wanted.values()
    }

    # Replicas save the same part, which counts once.
    missing = {name: tensor.numel() for name, tensor in whole.items()}
    copied: set[tuple[str, tuple[int, ...]]] = set()
    for parts, notes in files:
        for name, offsets in offsets_of(notes, source).items():
            if name not in whole or (name, offsets) in copied:
                continue
            copied.add((name, offsets))
            missing[name] -= _copy_part(parts.get(name), offsets, whole[name], f"{source}: {name}")

    incomplete = [name for name, count in missing.items() if count]
    if incomplete:
        raise CheckpointError(f"{source} is damaged: its shards don't make up {incomplete[0]}. Nothing was loaded.")
    return _fill(state, whole)


class _Cutter:
    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._names: set[str] = set()
        self._seen: dict[Any, str] = {}

    def cut(self, value: Any, path: str) -> Any:
        from torch.distributed.tensor import DTensor

        if isinstance(value, DTensor):
            return Sharded(self._keep(value.detach(), path), value.dtype, tuple(value.shape))
        if isinstance(value, Mapping):
            return {key: self.cut(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.cut(item, f"{path}[{index}]") for index, item in enumerate(value))
        return value

    def _keep(self, tensor: Any, path: str) -> str:
        """Keep this rank's part and return its name. A tensor with several names is kept once."""
        part = tensor.to_local()
        identity = (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
        if part.numel() and identity in self._seen:
            return self._seen[identity]

        name, number = path, 1
        while name in self._names:
            number += 1
            name = f"{path}#{number}"
        self._names.add(name)
        if part.numel():
            self._seen[identity] = name
            (chunk,) = tensor.__create_chunk_list__()
            self._shards.parts[name], self._shards.offsets[name] = part, list(chunk.offsets)
        return name


def _collect(value: Any, wanted: dict[str, Sharded]) -> None:
    """Add every `Sharded` in a state to `wanted`, by its name."""
    if isinstance(value, Sharded):
        wanted[value.name] = value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _collect(item, wanted)


def _fill(value: Any, whole: dict[str, Tensor]) -> Any:
    if isinstance(value, Sharded):
        return whole[value.name]
    if isinstance(value, dict):
        return {key: _fill(item, whole) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(item, whole) for item in value)
    return value


def offsets_of(notes: dict[str, str], source: str) -> dict[str, tuple[int, ...]]:
    """The offsets of the parts in a file of shards, by name, from the file's metadata.

    Raises:
        CheckpointError: it has none.
    """
    try:
        entries = json.loads(notes[_SHARDING_INFO])
        return {name: tuple(map(int, entry[_OFFSETS])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is damaged: a file of shards lacks the offsets of its parts.") from error


def _copy_part(part: Tensor | None, offsets: tuple[int, ...], whole: Tensor, name: str) -> int:
    """Copy a part into the whole tensor; return the part's number of elements."""
    fits = (
        part is not None
        and part.dtype is whole.dtype
        and len(offsets) == part.ndim == whole.ndim
        and all(0 <= first <= first + n <= m for first, n, m in zip(offsets, part.shape, whole.shape, strict=True))
    )
    if part is None or not fits:
        raise CheckpointError(f"{name} is damaged: a shard doesn't fit into the tensor. Nothing was loaded.")

    box = tuple(slice(first, first + n) for first, n in zip(offsets, part.shape, strict=True))
    whole[box].copy_(part)
    return part.numel()
