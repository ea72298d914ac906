"""Inspect checkpoints: content and faults. Only the marker and the header are read, unless `verify` is set."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from footplate import checkpoint
from footplate.checkpoint.format import statefile
from footplate.checkpoint.frozen_weights import FROZEN_WEIGHTS
from footplate.checkpoint.run_state import Progress
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.core.errors import CheckpointError, did_you_mean
from footplate.core.foreign_checkpoints import to_run_state

_PARTS = (
    "state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loader", "datamodule", "step", "metrics", "loggers",
    "rng",
)  # fmt: skip
_PIECE = 16 << 20


@dataclass(frozen=True)
class CheckpointInfo:
    """The content of a checkpoint.

    Attributes:
        path: its path; for a link, the path of the target.
        kind: "checkpoint" (Footplate's) or "torch file".
        fault: why it can't be loaded; empty if it is complete.
        verified: all bytes were read and match the saved checksums.
        newest: it is the newest complete one of its directory; None if its own path was given.
        module: the class of the trained module.
        epoch: the epoch in progress, from 0.
        batch_idx: completed batches of that epoch.
        global_step: optimizer steps.
        created: seconds since 1970.
        metrics: the latest value of each metric.
        nbytes: total size of its files.
        weights: the number of weights, by type.
        frozen_weights: how many frozen weights it was saved without.
        parts: the bytes of the tensors in each part of the state; 0 for a part of plain values.
        position: the loader's position.
        versions: of Footplate, of torch, and of another library that wrote it.
        weights_only: training can't continue from it.
    """

    path: str
    kind: str = "checkpoint"
    fault: str = ""
    verified: bool = False
    newest: bool | None = None
    module: str | None = None
    epoch: int | None = None
    batch_idx: int | None = None
    global_step: int | None = None
    created: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    nbytes: int | None = None
    weights: dict[str, int] = field(default_factory=dict)
    frozen_weights: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    position: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    weights_only: bool | None = None


def inspect(path: str | Place, verify: bool = False) -> list[CheckpointInfo]:
    """Inspect a checkpoint, or all checkpoints of a run's directory, the newest last.

    Args:
        path: a path or a URI.
        verify: read all bytes, and compare their checksums.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    place = to_place(path)
    store = store_of(place)
    kind = store.kind(place)
    if kind is None:
        beside = [other.name for other in store.find(place.parent, deep=False)]
        raise CheckpointError(
            f"There is nothing at {place}. {did_you_mean(place.name, beside) if beside else ''}".rstrip()
        )

    place = store.resolve(place)
    if kind == "file" or place.name.endswith(checkpoint.SUFFIX) or store.read_marker(place) is not None:
        return [inspect_one(place, verify)]

    infos = sorted((inspect_one(path, verify) for path in store.find(place)), key=lambda info: info.created or 0.0)
    if not infos:
        raise CheckpointError(f"There is no checkpoint in {place} or below it.")
    newest = max((info for info in infos if not info.fault), key=lambda info: info.created or 0.0, default=None)
    return [dataclasses.replace(info, newest=info is newest) for info in infos]


def inspect_one(place: Place, verify: bool = False) -> CheckpointInfo:
    """Inspect one checkpoint, complete or not."""
    try:
        if store_of(place).kind(place) == "file":
            return _inspect_file(place)
        return _inspect_checkpoint(place, verify)
    except CheckpointError as error:
        return CheckpointInfo(str(place), fault=str(error))


def _inspect_checkpoint(place: Place, verify: bool) -> CheckpointInfo:
    store = store_of(place)
    meta, fault = checkpoint.examine(place)
    if fault:
        return CheckpointInfo(str(place), fault=fault, **_from_meta(meta))

    nbytes = {name: file["bytes"] for name, file in meta["files"].items()}
    with store.open(place, checkpoint.STATE) as file:
        outline = statefile.outline(file, nbytes[checkpoint.STATE], str(place))
    tree = outline.tree
    weights: Counter[str] = Counter()
    for entry in outline.tensors_of("state_dict").values():
        weights[str(entry.dtype).removeprefix("torch.")] += entry.numel
    parts = {
        name: sum(entry.nbytes for entry in outline.tensors_of(name).values()) for name in _PARTS if tree.get(name)
    }
    loader = tree.get("loader") or tree.get("position") or {}
    return CheckpointInfo(
        str(place),
        fault=_checksum_fault(place, meta) if verify else "",
        verified=verify,
        batch_idx=tree.get("progress", {}).get("batch_idx"),
        nbytes=sum(nbytes.values()) + (store.size(place, checkpoint.META) or 0),
        weights=dict(weights),
        frozen_weights=len(tree.get(FROZEN_WEIGHTS, {})),
        parts=parts,
        position={name: value for name, value in loader.items() if isinstance(value, (bool, int, float, str))},
        **_from_meta(meta),
    )


def _from_meta(meta: dict[str, Any]) -> dict[str, Any]:
    names = ("module", "epoch", "global_step", "created", "weights_only")
    versions = {name: str(meta[name]) for name in ("footplate", "torch", "made_by", "format") if name in meta}
    return {**{name: meta.get(name) for name in names}, "metrics": meta.get("metrics", {}), "versions": versions}


def _checksum_fault(place: Place, meta: dict[str, Any]) -> str:
    for name, expected in meta["files"].items():
        checksum = 0
        with store_of(place).open(place, name) as file:
            while piece := file.read(_PIECE):
                checksum = zlib.crc32(piece, checksum)
        if checksum != expected.get("crc32"):
            return f"{place} is damaged: the checksum of {name} differs from the one that was saved."
    return ""


def _inspect_file(place: Place) -> CheckpointInfo:
    """Inspect a torch file, such as another library's. It has no header of its own, so all of it is loaded."""
    state = to_run_state(checkpoint.load(place))
    weights: Counter[str] = Counter()
    for value in state["state_dict"].values():
        if isinstance(value, Tensor):
            weights[str(value.dtype).removeprefix("torch.")] += value.numel()
    progress = Progress(**state["progress"]) if "progress" in state else None
    versions = {"made_by": state["made_by"]} if "made_by" in state else {}
    return CheckpointInfo(
        str(place),
        kind="torch file",
        module=state.get("module"),
        epoch=state.get("epoch"),
        batch_idx=progress and progress.batch_idx,
        global_step=state.get("global_step"),
        created=place.stat().st_mtime if isinstance(place, Path) else None,
        nbytes=store_of(place).size(place, ""),
        weights=dict(weights),
        parts={name: _tensor_nbytes(state[name]) for name in _PARTS if state.get(name)},
        position=state.get("position", {}),
        versions=versions,
        weights_only=progress is None,
    )


def _tensor_nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_tensor_nbytes, value.values()))
    return sum(map(_tensor_nbytes, value)) if isinstance(value, (list, tuple)) else 0
