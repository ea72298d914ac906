"""Checkpoints: a run state, whole or not at all.

A checkpoint is a directory, `epoch=3-step=940.ckpt/`, with two files:

    state.safetensors    the run state: plain values and tensors (see `statefile.py`)
    meta.json            its marker, written last: what it is, the state's size and checksum

and, where a model is sharded over several ranks, a file of each rank with what it has (see `shards.py`).

Saving, in order: (1) at the end of a step the tensors are copied into host memory that is kept from save to save;
training goes on. (2) A thread writes it (see `writer.py`) where it shall lie, on a disk or in an object store (see
`storage/`), so that it is there whole or not at all. (3) Only then are older checkpoints deleted. A second save waits
until the first is written. Killed at any moment, what is left is the old checkpoint, or the new one, and perhaps some
litter, which the next run sweeps away.

No code of a file is ever run in loading it.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from footplate.checkpoint.format import shards, statefile
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.checkpoint.storage.base import META, STATE, SUFFIX, note_time
from footplate.core.errors import CheckpointError, ConfigError, did_you_mean

__all__ = ["LAST", "META", "STATE", "SUFFIX", "load", "load_module", "newest", "read_meta", "save"]

LAST = f"last{SUFFIX}"


def save(state: dict[str, Any], path: str | Place, meta: dict[str, Any]) -> None:
    """Write a checkpoint and return when it is whole.

    Raises:
        CheckpointError: it can't be written (a full disk, a service that can't be reached), or holds a value that can't be
            kept. What was at `path` before is still there.
    """
    place = to_place(path)
    store_of(place).write(place, statefile.freeze(state), meta)


def load(path: str | Place, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint's state without running any code of it; a Lightning `.ckpt` file can be read too.

    Args:
        path: the checkpoint: a path or a URI.
        map_location: the device that tensors come to; anything but a device or its name means the CPU.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or needs code to be run.
    """
    place = to_place(path)
    store = store_of(place)
    kind = store.kind(place)
    if kind is None:
        raise CheckpointError(f"There is no checkpoint at {place}.{_neighbours(place)}")
    if kind == "directory":
        files = read_meta(place)["files"]
        device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
        place = store.resolve(place)
        (state,) = _read(place, STATE, files[STATE], lambda *file: statefile.read(*file, device=device))
        if len(files) > 1:
            parts = (_read(place, name, files[name], statefile.read_tensors) for name in files if name != STATE)
            state = shards.put_together(state, parts, str(place), device)
    else:
        state = _load_pickle(place, map_location)
    if not isinstance(state, dict) or "state_dict" not in state:
        raise CheckpointError(f'{place} is no checkpoint: it has no "state_dict".')
    return state


def _read(place: Place, name: str, expected: dict[str, Any], reader: Callable[..., tuple[Any, ...]]) -> Any:
    """What `reader` finds in a file of a checkpoint, whose checksum is what the marker says."""
    with store_of(place).open(place, name) as opened:
        *content, read = reader(opened, expected["bytes"], str(place / name))
    if read.crc32 != expected.get("crc32"):
        raise CheckpointError(
            f"{place} is damaged: the checksum of {name} is not the one it was written with. "
            f"Nothing of it was loaded.{_neighbours(place)}"
        )
    return content


def read_meta(path: str | Place) -> dict[str, Any]:
    """What a complete checkpoint says of itself.

    Raises:
        CheckpointError: it is incomplete.
    """
    meta, fault = examine(path)
    if fault:
        raise CheckpointError(f"{fault}{_neighbours(to_place(path))}")
    return meta


def examine(path: str | Place) -> tuple[dict[str, Any], str]:
    """What a checkpoint says of itself, and what is wrong with it; nothing, if it is complete."""
    place = to_place(path)
    store = store_of(place)
    place = store.resolve(place)
    try:
        meta = json.loads(store.read_marker(place) or b"")
        expected = {name: int(meta["files"][name]["bytes"]) for name in (STATE, *meta["files"])}
        created = float(meta["created"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, f"{path} is not a complete checkpoint: it has no readable {META}."
    for name, nbytes in expected.items():
        found = store.size(place, name) or 0
        if found != nbytes:
            return meta, f"{path} is damaged: {name} has {found} bytes instead of {nbytes}."
    note_time(created)
    return meta, ""


def identity(path: str | Place) -> str:
    """A few words that are others where another checkpoint lies.

    Raises:
        CheckpointError: it is incomplete.
    """
    place = to_place(path)
    store = store_of(place)
    if store.kind(place) == "file":
        return f"one of {store.size(store.resolve(place), '')} bytes"
    meta = read_meta(place)
    sums = " ".join(f"{name} {meta['files'][name].get('crc32')}" for name in sorted(meta["files"]))
    return f"one of step {meta.get('global_step')} ({zlib.crc32(sums.encode()):08x})"


def is_complete(path: str | Place) -> bool:
    """Whether a checkpoint can be loaded."""
    return not examine(path)[1]


def exists(path: str | Place) -> bool:
    """Whether there is a checkpoint, whole or not."""
    place = to_place(path)
    return store_of(place).kind(place) is not None


def find(directory: str | Place) -> list[Place]:
    """What there is below a directory that may be a checkpoint, by name; no links."""
    place = to_place(directory)
    return store_of(place).find(place)


def newest(
    directories: Iterable[str | Place], wanted: Callable[[dict[str, Any]], bool] = lambda meta: True
) -> Place | None:
    """The complete checkpoint that was written last in some directories, of those whose `meta` is wanted; or None."""
    found: list[tuple[float, str, Place]] = []
    for directory in directories:
        for path in find(directory):
            meta, fault = examine(path)
            if not fault and wanted(meta):
                found.append((meta["created"], str(path), path))
    return max(found)[2] if found else None


def prepare(directory: str | Place) -> None:
    """Make a directory for checkpoints, and remove what killed writes have left in it.

    Raises:
        ConfigError: it can't be written to.
    """
    place = to_place(directory)
    store_of(place).prepare(place)
    store_of(place).sweep(place)


def sweep(directory: str | Place) -> None:
    """Remove what killed writes have left in a directory, and finish a replacement that was cut short."""
    place = to_place(directory)
    store_of(place).sweep(place)


def delete(path: str | Place) -> None:
    """Delete a checkpoint: its marker first, so that it is never half there."""
    place = to_place(path)
    store_of(place).delete(place)


def point(link: str | Place, target: str | Place) -> None:
    """Make `link` (such as `last.ckpt`) stand for the checkpoint `target`, atomically."""
    place = to_place(link)
    store_of(place).point(place, to_place(target))


def unpoint(link: str | Place) -> None:
    """Remove a link that `point` has made, and nothing else."""
    place = to_place(link)
    store_of(place).unpoint(place)


def load_module(cls: type, path: str | Place, map_location: Any, strict: bool | None, arguments: dict[str, Any]) -> Any:
    """See `footplate.Module.load_from_checkpoint`."""
    from footplate.checkpoint.run_state import load_weights

    state = load(path, map_location)
    module = _make(cls, state, path, arguments)
    module.on_load_checkpoint(state)
    strict = bool(getattr(module, "strict_loading", True)) if strict is None else strict
    load_weights(module, state["state_dict"], str(path), strict, state.get("module"))
    return module.to(map_location) if map_location not in (None, "cpu") else module


def load_datamodule(cls: type, path: str | Place, arguments: dict[str, Any]) -> Any:
    """See `footplate.DataModule.load_from_checkpoint`."""
    state = load(path)
    made = _make(cls, state, path, arguments, "datamodule_")
    kept = state.get("datamodule") or state.get(cls.__qualname__)  # Lightning's key is the class
    if kept:
        made.load_state_dict(kept)
    return made


def _make(cls: type, state: dict[str, Any], path: str | Place, arguments: dict[str, Any], prefix: str = "") -> Any:
    """An object of a class, by the hyper-parameters in a state and the arguments that are given over them."""
    import inspect

    from footplate.core.hparams import arguments_from

    parameters = inspect.signature(cls.__init__).parameters
    variable = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL  # *args and **kwargs are no names
    names = [name for name, parameter in parameters.items() if parameter.kind not in variable]
    given = arguments_from(state, names[1:], arguments, prefix)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in arguments:
            if name not in parameters and name not in (state.get(f"{prefix}hyper_parameters") or {}):
                raise ConfigError(f"{cls.__name__} takes no {name}. {did_you_mean(name, list(parameters)[1:])}")
        given = {name: value for name, value in given.items() if name in parameters}
    needed = [
        name
        for name, p in list(parameters.items())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in given
    ]
    if needed:
        raise CheckpointError(
            f"{path} does not hold the argument{'s' if len(needed) > 1 else ''} {', '.join(needed)} of {cls.__name__}: "
            f"pass {'them' if len(needed) > 1 else 'it'}, as in {cls.__name__}.load_from_checkpoint(path, {needed[0]}=…)."
        )
    return cls(**given)


def _load_pickle(path: Place, map_location: Any) -> Any:
    store = store_of(path)
    try:
        with store.open(store.resolve(path), "") as file:
            content = file if isinstance(path, Path) else io.BytesIO(file.read())
            return torch.load(content, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds {foreign.group(1)}, and to load that would run code" if foreign else "it is damaged"
        raise CheckpointError(f"{path} can't be read: {why}. Nothing of it was loaded.{_neighbours(path)}") from error


def _neighbours(path: Place) -> str:
    names = [
        other.name for other in store_of(path).find(path.parent, deep=False) if other != path and is_complete(other)
    ]
    return f" {did_you_mean(path.name, names)}" if names else ""
