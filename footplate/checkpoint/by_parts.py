"""Reading a checkpoint part by part: its weights and optimizer states stay in the files, until a rank knows its shards.

    state = load_by_parts(path, rank, ranks)    a `StoredTensor` stands for each large tensor
    strategy.weight_parts(state, module)        each rank reads the elements that it keeps

So no rank needs memory for the whole state. The checksum of every byte is compared, as `load` does: each rank reads the
state's file, and every `ranks`-th file of shards, through a small buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from footplate.checkpoint import loading
from footplate.checkpoint.format import statefile
from footplate.checkpoint.format.statefile import Sharded
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.checkpoint.storage.base import STATE
from footplate.checkpoint.stored_tensor import StoredTensor, check_complete, tensors_of, tensors_of_shards
from footplate.core.errors import CheckpointError

# Strategies shard these parts of a state.
_SHARDED = {"state_dict": "state_dict.", "optimizer_states": "optimizer_states["}
_LARGE_NBYTES = 1 << 20


def load_by_parts(path: str | Place, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Load a checkpoint's state, in which `StoredTensor`s stand for weights and states of optimizers.

    A torch file is loaded whole, and so are other tensors.

    Args:
        path: the checkpoint: a path or a URI.
        rank: this rank. It compares the checksums of its share of the files.
        ranks: how many ranks load the checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
    """
    place = to_place(path)
    store = store_of(place)
    if store.kind(place) != "directory":
        return loading.load(path)
    files = loading.read_meta(place)["files"]
    place = store.resolve(place)
    instead = {
        name: tensor
        for name, tensor in tensors_of(place, STATE).items()
        if name.startswith(tuple(_SHARDED.values())) and tensor.nbytes >= _LARGE_NBYTES
    }
    (state,) = loading.read_file(place, STATE, files[STATE], lambda *file: statefile.read(*file, instead=instead))
    if not isinstance(state, dict) or "state_dict" not in state:
        raise CheckpointError(f'{place} is no checkpoint: it has no "state_dict".')

    names = [name for name in files if name != STATE]
    if not names:
        return state
    sharded = tensors_of_shards(place, names)
    for name in names[rank::ranks]:
        _verify(place, name, files[name])
    return {key: _with_stored(value, sharded, str(place), key not in _SHARDED) for key, value in state.items()}


def _verify(place: Place, name: str, expected: dict[str, Any]) -> None:
    """Compare the checksum of a file of shards, without keeping its tensors."""
    instead = dict.fromkeys(tensors_of(place, name))
    loading.read_file(place, name, expected, lambda *file: statefile.read_tensors(*file, instead=instead))


def _with_stored(value: Any, stored: Mapping[str, StoredTensor], source: str, read: bool) -> Any:
    """Replace each `Sharded` in a state by its `StoredTensor`, or by the tensor that is read from it."""
    if isinstance(value, Sharded):
        tensor = check_complete(stored.get(value.name), value, source)
        return tensor.whole() if read else tensor
    if isinstance(value, dict):
        return {key: _with_stored(item, stored, source, read) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_stored(item, stored, source, read) for item in value)
    return value
