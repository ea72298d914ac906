"""Sharded tensors in a checkpoint: each rank writes the parts that it has, and any number of ranks can read them.

    state.safetensors          written by rank 0: the run state, where a `Sharded` stands for each sharded tensor
    shard-00000.safetensors    written by rank 0: its part of each of these, under the tensor's name
    shard-00001.safetensors    written by rank 1: …

Where a part begins in its whole stands in the file's header, as `torch.distributed.checkpoint` writes it into safetensors
files (`HuggingFaceStorageWriter`), whose reader therefore reads these. Its own format isn't used: its metadata is a pickle,
and loading a pickle may run code.

`cut_out` takes the sharded tensors out of a live state on each rank; `put_together` makes them whole, one file after the
other, so that what is read needs room for the whole and one part of it. From there on it is a state like any other, which
`Strategy.parts` cuts anew for however many ranks there are.
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

_NOTE, _BEGINS = "DCP_SHARDING_INFO", "saved_offsets"  # of torch.distributed.checkpoint


@dataclass(frozen=True)
class Shards:
    """What a rank has of sharded tensors.

    Attributes:
        parts: its part of each, by the tensor's name; none where it is empty.
        begins: at which index of the whole a part begins, in each dimension.
    """

    parts: dict[str, Tensor] = field(default_factory=dict)
    begins: dict[str, list[int]] = field(default_factory=dict)

    def notes(self) -> dict[str, str]:
        """What the header of its file says of it."""
        return {_NOTE: json.dumps({name: {_BEGINS: begins} for name, begins in self.begins.items()})}


def file_name(rank: int) -> str:
    """The file that a rank's parts are in."""
    return f"shard-{rank:05d}.safetensors"


def cut_out(state: Any) -> tuple[Any, Shards]:
    """A state with a `Sharded` in the place of each sharded tensor, and what this rank has of those."""
    shards = Shards()
    with torch.no_grad():
        return _Cutter(shards).cut(state, ""), shards


def put_together(
    state: Any, files: Iterable[tuple[dict[str, Tensor], dict[str, str]]], source: str, device: Any
) -> Any:
    """The counterpart of `cut_out`: a state with whole tensors.

    Args:
        state: as it was read.
        files: the tensors and the metadata of each file of shards.
        source: the checkpoint's name, for messages.
        device: where tensors come to.

    Raises:
        CheckpointError: the parts don't make up the wholes.
    """
    wanted: dict[str, Sharded] = {}
    _find(state, wanted)
    whole = {one.name: torch.empty(one.shape, dtype=one.dtype, device=device) for one in wanted.values()}
    missing = {name: tensor.numel() for name, tensor in whole.items()}
    placed: set[tuple[str, tuple[int, ...]]] = set()
    for parts, notes in files:
        for name, begins in _begins(notes, source).items():
            if name not in whole or (name, begins) in placed:
                continue
            placed.add((name, begins))
            missing[name] -= _place(parts.get(name), begins, whole[name], f"{source}: {name}")
    lacking = [name for name, count in missing.items() if count]
    if lacking:
        raise CheckpointError(f"{source} is damaged: its shards don't make up {lacking[0]}. Nothing of it was loaded.")
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
        """Keep this rank's part, and give the name; several names of one tensor are one."""
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
            self._shards.parts[name], self._shards.begins[name] = part, list(chunk.offsets)
        return name


def _find(value: Any, found: dict[str, Sharded]) -> None:
    if isinstance(value, Sharded):
        found[value.name] = value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _find(item, found)


def _fill(value: Any, whole: dict[str, Tensor]) -> Any:
    if isinstance(value, Sharded):
        return whole[value.name]
    if isinstance(value, dict):
        return {key: _fill(item, whole) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(item, whole) for item in value)
    return value


def _begins(notes: dict[str, str], source: str) -> dict[str, tuple[int, ...]]:
    try:
        return {name: tuple(map(int, one[_BEGINS])) for name, one in json.loads(notes[_NOTE]).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is damaged: a file of shards doesn't say where they belong.") from error


def _place(part: Tensor | None, begins: tuple[int, ...], whole: Tensor, what: str) -> int:
    """Copy a part to its place; returns how many numbers it has."""
    fits = (
        part is not None
        and part.dtype is whole.dtype
        and len(begins) == part.ndim == whole.ndim
        and all(0 <= first <= first + n <= m for first, n, m in zip(begins, part.shape, whole.shape, strict=True))
    )
    if part is None or not fits:
        raise CheckpointError(f"{what} is damaged: a shard doesn't fit into it. Nothing of it was loaded.")
    box = tuple(slice(first, first + n) for first, n in zip(begins, part.shape, strict=True))
    whole[box].copy_(part)
    return part.numel()
