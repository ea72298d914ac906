"""Checks that all ranks agree on settings and data. `distributed/consistency.py` compares."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from footplate import checkpoint
from footplate.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from footplate.checkpoint.storage import Place
from footplate.core.errors import CheckpointError, DataError
from footplate.core.hashing import hashed
from footplate.data.adapters.rank_shares import draw_order, shared_content
from footplate.distributed.consistency import blind, check_alike, digest, parameters_of
from footplate.distributed.stored_weights import fingerprints_of
from footplate.distributed.strategies import options_of
from footplate.distributed.uneven_loaders import close
from footplate.training.config import COMPARED

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)

# The beginning of the name of a file by which the ranks see whether they share a disk.
_MARKER = ".seen-by-all-ranks-"


def check_settings(run: Run) -> None:
    """Compare the settings that decide when the ranks communicate.

    Raises:
        ConfigError: something differs.
    """
    settings = {"stage": run.stage} | {name: getattr(run.config, name) for name in COMPARED}
    settings |= {"accelerator": run.accelerator.name, "precision": run.precision.name}
    options = repr(options_of(run.config.strategy)) if run.parallel.sharded else run.parallel.name
    settings |= {"strategy": options, "callbacks that save or stop": _deciding(run.callbacks)}
    hint = "Give every rank the same: only rank 0 writes, whichever rank asks for it."
    check_alike(run.group, settings, hint)


def check_model(run: Run) -> None:
    """Compare the names, shapes and types of the parameters, which of them are trained, and the files that they come from.

    Raises:
        ConfigError: they differ.
    """
    if run.group.is_distributed:
        hint = "Build the same model on every rank: its sizes must not depend on what one rank finds."
        check_alike(run.group, {"the model": parameters_of(run.module)}, hint)
        hint = "Each machine reads its own files: put the same ones there."
        check_alike(run.group, {"the files of load_pretrained": digest(fingerprints_of(run.module))}, hint)


def check_optimizers(run: Run) -> None:
    """Compare optimizers and schedulers, since each rank makes the same step with its own optimizer.

    Raises:
        ConfigError: a rank has another optimizer, learning rate or scheduler.
    """
    if not run.group.is_distributed:
        return
    schedulers = [
        (type(config.scheduler).__name__, config.interval, config.frequency) for config in run.lr_scheduler_configs
    ]
    settings = {
        "the optimizers": ", ".join(map(_learns, run.optimizers)) or "none",
        "the schedulers": ", ".join(f"{name} (every {n} {interval}s)" for name, interval, n in schedulers) or "none",
    }
    hint = "Give every rank the same. Draw random values under a seed that all ranks have (seed_everything)."
    check_alike(run.group, settings, hint)


def warn_of_own_disks(run: Run) -> None:
    """Warn if some ranks don't see the directories of rank 0's checkpoints.

    A run that is never restarted needs no shared disk, so this is not an error. Every machine may have a directory of that
    name, so the ranks look for a new file of rank 0.
    """
    if not run.group.is_distributed:
        return
    directories = dict.fromkeys(
        callback.dirpath
        for callback in run.callbacks
        if isinstance(callback, ModelCheckpoint) and isinstance(callback.dirpath, Path)
    )
    # Other runs may keep their checkpoints in the same directory.
    own = f"{_MARKER}{hashed(str(run.run_dir))[:8]}-"
    for directory in directories:
        marker = directory / run.group.from_first(f"{own}{secrets.token_hex(8)}")
        run.group.ask_first(lambda marker=marker: _make(marker, own))
        try:
            without = blind(run.group, marker)
        finally:
            if run.world.rank == 0:
                with contextlib.suppress(OSError):
                    marker.unlink()
        if without and run.world.rank == 0:
            log.warning(
                "%s: %s can't see this directory of rank 0, and can't load its checkpoints. So the run can't continue "
                "after a restart. Set default_root_dir or ModelCheckpoint(dirpath=…) to a disk that all machines "
                'share, or use ModelCheckpoint(dirpath="s3://…").',
                directory, without,
            )  # fmt: skip


def _make(marker: Path, own: str) -> None:
    """Make an empty file, and delete those that a killed attempt of this run has left. Their names begin with `own`.

    Raises:
        CheckpointError: the directory can't be written to.
    """
    with contextlib.suppress(OSError):
        for left in marker.parent.glob(f"{own}*"):
            left.unlink()
    try:
        marker.touch()
    except OSError as error:
        raise CheckpointError(
            f"{marker.parent}: no file can be made in this directory of checkpoints: {error.strerror or error}. Free some "
            "space, or set default_root_dir or ModelCheckpoint(dirpath=…) to a directory that this process may write to."
        ) from error


def check_data(run: Run, loaders: dict[str, list[tuple[Any, float]]]) -> None:
    """Compare the data of loaders that the ranks share. A rank's own loader is not compared.

    Args:
        run: the run.
        loaders: loaders by what they are for, each with the number of its batches.

    Raises:
        DataError: it differs.
    """
    if not run.group.is_distributed:
        return
    described = {stage: ", ".join(_described(*pair) for pair in pairs) for stage, pairs in loaders.items()}
    settings = {f"the {stage} data": description or "none" for stage, description in described.items()}
    hint = "Give every rank the same: the same files, the same version of a table (Table(…, version=…)), the same seed."
    check_alike(run.group, settings, hint, DataError)


def check_order(run: Run, loader: Any) -> None:
    """Compare, before a pass over a loader, the order that its sampler gives. Each rank takes its share of it.

    Raises:
        DataError: it differs.
    """
    drawn = draw_order(loader) if run.group.is_distributed else None
    if drawn is not None:
        hint = (
            "A sampler must give every rank the same order of all rows, of which each then gets its share. Let it draw "
            "from torch's, NumPy's or Python's global generator, or seed its own; don't let it go through a set, nor "
            "share out by RANK."
        )
        check_alike(run.group, {"the order of rows": drawn}, hint, DataError)


def same_rows(run: Run, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a pass over a loader, whose first batch is compared between the ranks of each share.

    Every loader is compared. One that the trainer shares out may stand beside one that reads by `RANK`.
    """
    return batches if run.ranks_of_a_share == 1 else _compared(run, batches)


def _compared(run: Run, batches: Iterator[Any]) -> Iterator[Any]:
    first = next(batches, None)
    hashes, ranks = run.group.gather(digest(first)), run.ranks_of_a_share
    for rank, content in enumerate(hashes):
        if content != hashes[rank - rank % ranks]:
            raise DataError(
                f"Ranks {rank - rank % ranks} and {rank} belong to one tensor-parallel group, and their loaders gave them "
                "different rows. Share the rows out by device_mesh['data_parallel'] and not by RANK, and draw random "
                "numbers from a seed that both have; or give a map-style DataLoader or a footplate.data.Loader, which the "
                "trainer shares out."
            )
    try:
        if first is not None:
            yield first
        yield from batches
    finally:
        close(batches)


def read_alike(run: Run, path: Place, read: Callable[[Place], Any]) -> Any:
    """Read a checkpoint on every rank, and compare what they have read.

    Raises:
        CheckpointError: a rank can't read it, or finds another checkpoint under this name.
    """
    hint = "Each rank reads it. Keep it on a disk that all machines share, in an object store, or on each machine."

    def read_here() -> tuple[Any, Any]:
        try:
            return read(path), checkpoint.identity(path)
        except CheckpointError as error:
            if run.world.size == run.world.local_size:
                raise
            raise CheckpointError(f"{error} This is so on {socket.gethostname()}. {hint}") from error

    state, identity = run.group.ask_each(read_here)
    check_alike(run.group, {f"the checkpoint {path}": identity}, hint, CheckpointError)
    return state


def _deciding(callbacks: list[Any]) -> str:
    described = []
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            described.append(
                f"{callback.state_key}{callback.save_top_k, callback.save_last, callback.save_on_train_epoch_end}"
            )
        elif isinstance(callback, GradientAccumulationScheduler):
            described.append(f"accumulates {callback.scheduling}")
        elif isinstance(callback, EarlyStopping):
            described.append(
                f"{callback.state_key}{callback.patience, callback.strict, callback.check_on_train_epoch_end}"
            )
    return ", ".join(described) or "none"


def _learns(optimizer: Any) -> str:
    """Return an optimizer's class, its learning rates, and a digest of its other numbers."""
    numbers = [
        sorted((name, _number(value)) for name, value in group.items() if name != "params" and _number(value))
        for group in optimizer.param_groups
    ]
    rates = ", ".join(_number(group.get("lr")) for group in optimizer.param_groups)
    return f"{type(optimizer).__name__}(lr={rates}) [{digest(numbers)}]"


def _number(value: Any) -> str:
    """Return a number or numbers as text. Empty for anything else."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() == 1 else ""
    plain = isinstance(value, (int, float)) or (
        isinstance(value, (tuple, list)) and all(isinstance(item, (int, float)) for item in value)
    )
    return repr(value) if plain else ""


def _described(loader: Any, batches: float) -> str:
    held = shared_content(loader)
    return f"{batches:g} batches of {held}" if held else "a loader of its own"
