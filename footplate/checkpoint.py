"""Checkpoints: a run state on disk, whole or not at all.

A checkpoint is a directory, `epoch=3-step=940.ckpt/`, with two files:

    state.safetensors    the run state: plain values and tensors (see `statefile.py`)
    meta.json            written last: what it is, each file's size and checksum; without it there is no checkpoint

Saving, in order: (1) at the end of a step the tensors are copied into host memory that is kept from save to save;
training goes on. (2) A thread writes `.tmp-…` beside the target, syncs it to the disk, and (3) renames it. (4) Only then
are older checkpoints deleted. A second save waits until the first is written. Killed at any moment, what is left is the
old checkpoint, or the new one, and perhaps a `.tmp-…`, which the next run sweeps away.

No code of a file is ever run in loading it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from footplate import statefile
from footplate.errors import CheckpointError, ConfigError, did_you_mean
from footplate.statefile import Frozen, Snapshot

log = logging.getLogger(__name__)

STATE, META = "state.safetensors", "meta.json"
SUFFIX = ".ckpt"
LAST = f"last{SUFFIX}"
_TEMPORARY, _REPLACED = ".tmp-", ".old-"


def save(state: dict[str, Any], path: Path, meta: dict[str, Any]) -> None:
    """Write a checkpoint and return when it is on the disk.

    Raises:
        CheckpointError: it can't be written (a full disk, a directory that may not be written to), or holds a value that
            can't be kept. What was at `path` before is still there.
    """
    _write(statefile.freeze(state), Path(path), meta)


def load(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint's state without running any code of it; a Lightning `.ckpt` file can be read too.

    Args:
        path: the checkpoint.
        map_location: the device that tensors come to; anything but a device or its name means the CPU.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or needs code to be run.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint at {path}.{_neighbours(path)}")
    if path.is_dir():
        meta = read_meta(path)
        device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
        state, read = statefile.read(path / STATE, device)
        if read.crc32 != meta["files"][STATE].get("crc32"):
            raise CheckpointError(
                f"{path} is damaged: the checksum of {STATE} is not the one it was written with. "
                f"Nothing of it was loaded.{_neighbours(path)}"
            )
    else:
        state = _load_pickle(path, map_location)
    if not isinstance(state, dict) or "state_dict" not in state:
        raise CheckpointError(f'{path} is no checkpoint: it has no "state_dict".')
    return state


def read_meta(path: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself.

    Raises:
        CheckpointError: it is incomplete.
    """
    meta, fault = _examine(path)
    if fault:
        raise CheckpointError(f"{fault}{_neighbours(path)}")
    return meta


def is_complete(path: Path) -> bool:
    """Whether a checkpoint can be loaded."""
    return not _examine(path)[1]


def newest(directories: list[Path], wanted: Callable[[dict[str, Any]], bool] = lambda meta: True) -> Path | None:
    """The complete checkpoint that was written last in some directories, of those whose `meta` is wanted; or None."""
    found: list[tuple[float, Path]] = []
    for directory in directories:
        for path in directory.rglob(f"*{SUFFIX}"):
            if path.is_symlink() or path.name.startswith(_REPLACED):
                continue
            meta, fault = _examine(path)
            if not fault and wanted(meta):
                found.append((meta["created"], path))
    return max(found)[1] if found else None


def sweep(directory: Path) -> None:
    """Remove what killed writes have left in a directory, and finish a replacement that was cut short."""
    for old in directory.glob(f"{_REPLACED}*"):
        target = directory / old.name[len(_REPLACED) :]
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for temporary in directory.glob(f"{_TEMPORARY}*"):
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def delete(path: Path) -> None:
    """Delete a checkpoint: its marker first, so that it is never half there."""
    try:
        for name in (META, STATE):
            (path / name).unlink(missing_ok=True)
        path.rmdir()
    except OSError:  # it holds more than is ours, or is gone
        shutil.rmtree(path, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Make `link` (such as `last.ckpt`) stand for the checkpoint `target`, atomically."""
    temporary = link.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        temporary.symlink_to(os.path.relpath(target, link.parent))
    except OSError as error:
        log.warning(
            "%s can't be linked to %s here (%s); resuming finds it all the same.", link, target.name, error.strerror
        )
        return
    temporary.replace(link)


def _nothing() -> None: ...


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, "footplate-checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self,
        state: dict[str, Any],
        path: Path,
        meta: dict[str, Any],
        then: Callable[[], None] = _nothing,
        first: Callable[[], None] = _nothing,
    ) -> None:
        """Copy a state and begin to write it; waits first for the one before.

        Args:
            state: the live state; it may change as soon as this returns.
            path: the checkpoint's directory.
            meta: see `META`.
            then: called in the writing thread once the checkpoint is complete.
            first: called in that thread before: what the checkpoint counts on.

        Raises:
            CheckpointError: the save before this one failed, or this one holds a value that can't be kept.
        """
        self.wait()
        self._writing = self._thread.submit(_write_between, first, self._snapshot.take(state), path, meta, then)

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            CheckpointError: the last save failed.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def load_module(cls: type, path: str | Path, map_location: Any, strict: bool | None, arguments: dict[str, Any]) -> Any:
    """See `footplate.Module.load_from_checkpoint`."""
    import inspect

    from footplate.state import load_weights

    state = load(path, map_location)
    given = {**state.get("hyper_parameters", {}), **arguments}
    parameters = inspect.signature(cls.__init__).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in arguments:
            if name not in parameters:
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
    module = cls(**given)
    module.on_load_checkpoint(state)
    strict = bool(getattr(module, "strict_loading", True)) if strict is None else strict
    load_weights(module, state["state_dict"], str(path), strict, state.get("module"))
    return module.to(map_location) if map_location not in (None, "cpu") else module


def _write_between(
    first: Callable[[], None], state: Frozen, path: Path, meta: dict[str, Any], then: Callable[[], None]
) -> None:
    first()
    _write(state, path, meta)
    try:
        then()
    except Exception as error:
        raise CheckpointError(f"After {path} was written: {type(error).__name__}: {_first_line(error)}") from error


def _write(state: Frozen, path: Path, meta: dict[str, Any]) -> None:
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        with (temporary / STATE).open("xb", buffering=0) as file:
            written = state.write(file)
            os.fsync(file.fileno())
        files = {STATE: {"bytes": written.nbytes, "crc32": written.crc32}}
        with (temporary / META).open("xb") as file:
            file.write(json.dumps({**meta, "created": time.time(), "files": files}).encode())
            file.flush()
            os.fsync(file.fileno())
        _replace(temporary, path)
        _sync_directory(path.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _cannot_write(path, error) from error


def _replace(temporary: Path, path: Path) -> None:
    if not os.path.lexists(path):
        temporary.rename(path)
        return
    if path.is_symlink():
        path.unlink()
        temporary.rename(path)
        return
    old = path.with_name(f"{_REPLACED}{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: Exception) -> CheckpointError:
    code = getattr(error, "errno", None)
    free = ""
    existing = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if existing is not None:
        free = f" ({shutil.disk_usage(existing).free / 1e6:,.0f} MB free)"
    if code == errno.ENOSPC:
        return CheckpointError(
            f"The disk is full{free}: the checkpoint {path} could not be written. Earlier checkpoints are whole. "
            'Free some space, or set another default_root_dir, and resume with ckpt_path="last".'
        )
    reason = os.strerror(code) if code else _first_line(error)
    return CheckpointError(f"The checkpoint {path} could not be written: {reason}{free}.")


def _load_pickle(path: Path, map_location: Any) -> Any:
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds {foreign.group(1)}, and to load that would run code" if foreign else "it is damaged"
        raise CheckpointError(f"{path} can't be read: {why}. Nothing of it was loaded.{_neighbours(path)}") from error


def _examine(path: Path) -> tuple[dict[str, Any], str]:
    """What a checkpoint says of itself, and what is wrong with it; nothing, if it is complete."""
    try:
        meta = json.loads((path / META).read_text())
        sizes = {str(name): int(file["bytes"]) for name, file in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, f"{path} is not a complete checkpoint: it has no readable {META}."
    for name, nbytes in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else 0
        if found != nbytes:
            return meta, f"{path} is damaged: {name} has {found} bytes instead of {nbytes}."
    return meta, ""


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [other.name for other in path.parent.glob(f"*{SUFFIX}") if other != path and is_complete(other)]
    return f" {did_you_mean(path.name, names)}" if names else ""


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
