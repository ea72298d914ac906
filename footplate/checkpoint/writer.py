"""Background writing of checkpoints while training continues: one at a time, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.checkpoint.format import shards
from footplate.checkpoint.format.shards import Shards
from footplate.checkpoint.format.statefile import Snapshot
from footplate.checkpoint.storage import Place, store_of, to_place
from footplate.checkpoint.storage.joint import complete, directory_of, write_part
from footplate.core.errors import CheckpointError


def _nothing() -> None: ...


@dataclass(frozen=True)
class Joint:
    """A save that all ranks make together; each rank writes its own part.

    Attributes:
        path: the checkpoint.
        token: a random nonce, the same on all ranks.
        rank: this rank.
        ranks: the number of ranks.
        shards: this rank's parts.
    """

    path: Path
    token: str
    rank: int
    ranks: int
    shards: Shards

    @property
    def directory(self) -> Path:
        """The directory that all ranks write into."""
        return directory_of(self.path, self.token)


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._part_snapshot = Snapshot()
        self._part: Future[None] | None = None
        self._haste = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def save(
        self,
        state: dict[str, Any],
        path: str | Place,
        meta: dict[str, Any],
        then: Callable[[], None] = _nothing,
        first: Callable[[], None] = _nothing,
    ) -> None:
        """Wait for the previous save, copy a state, and start writing it.

        Args:
            state: the live state; it may change as soon as this returns.
            path: the checkpoint's directory.
            meta: the content of the marker.
            then: called in the writing thread when the checkpoint is complete.
            first: called in the writing thread before the write, for preparations that the checkpoint depends on.

        Raises:
            CheckpointError: the previous save failed, or this state holds a value that can't be saved.
        """
        self.wait()
        frozen, place = self._snapshot.take(state), to_place(path)

        def write() -> None:
            store_of(place).write(place, frozen, meta)

        self._writing = self._submit(_write, first, write, place, then)

    def save_part(self, joint: Joint) -> None:
        """Copy this rank's part of a sharded state and start writing it.

        All ranks call this; rank 0 then calls `complete`.
        """
        self.wait()
        self._haste.clear()
        part = self._part_snapshot.take(joint.shards.parts, joint.shards.notes())
        self._part = self._submit(write_part, joint.path, joint.token, shards.file_name(joint.rank), part)

    def complete(
        self,
        joint: Joint,
        state: dict[str, Any],
        meta: dict[str, Any],
        then: Callable[[], None] = _nothing,
        first: Callable[[], None] = _nothing,
    ) -> None:
        """Copy the rest of a sharded state, and start to write it and to wait for the other ranks; see `save`."""
        frozen = self._snapshot.take(state)
        names = [shards.file_name(rank) for rank in range(joint.ranks)]

        def write() -> None:
            complete(joint.path, joint.token, names, frozen, meta, self._haste)

        self._writing = self._submit(_write, first, write, joint.path, then)

    def part_fault(self) -> str:
        """Wait until this rank's part of a sharded state is written. Return the error's text; empty if there is none."""
        failure = self._part.exception() if self._part is not None else None
        # If the rest of the state has failed already, the save fails, whatever becomes of the parts.
        if self._writing is not None and self._writing.done():
            failure = failure or self._writing.exception()
        return "" if failure is None else str(failure)

    def make_haste(self) -> None:
        """Stop waiting for the other ranks' parts soon, because a rank may be lost."""
        self._haste.set()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the last save failed.
        """
        part, self._part, writing, self._writing = self._part, None, self._writing, None
        for future in (part, writing):
            if future is not None:
                future.result()

    def close(self) -> None:
        """Wait for the last save and end the thread. Another save starts a new thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _submit(self, task: Callable[..., None], *args: Any) -> Future[None]:
        self._thread = self._thread or ThreadPoolExecutor(1, "footplate-checkpoint")
        return self._thread.submit(task, *args)


def _write(first: Callable[[], None], write: Callable[[], None], path: Place, then: Callable[[], None]) -> None:
    first()
    write()
    try:
        then()
    except Exception as error:
        raise CheckpointError(f"After {path} was written: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
