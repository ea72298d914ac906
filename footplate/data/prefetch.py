"""The parallel loader: a thread of its own keeps the next batches on the device, so the step never waits for a copy.

    batches = Prefetcher(loader, move=lambda batch: to_device(batch, device), device=device)
    for batch in batches:
        step(batch)
    batches.wait_seconds                            # how long the step stood still for want of a batch

On CUDA the copies run on a stream of their own, from pinned memory, and the step's stream waits for exactly the batch
that it is handed. `move` decides where a batch goes: to one device, or in shards to all devices of a mesh.

The source is read ahead, so its own state is too far on: ask the Prefetcher for the state of what was handed out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils import _pytree as pytree

Move = Callable[[Any], Any]


class Prefetcher:
    """Iterates over batches that are already where the step needs them.

    Args:
        batches: a `Loader` or any iterable of batches.
        move: puts a batch on the device or devices; called in the background thread.
        device: where to; it decides whether a CUDA stream and pinned memory are used.
        ahead: how many batches wait on the device.

    Attributes:
        wait_seconds: how long the consumer has waited for batches, in all.
    """

    def __init__(self, batches: Iterable[Any], move: Move, device: torch.device | str = "cpu", ahead: int = 2) -> None:
        self._batches = batches
        self._move = move
        self._device = torch.device(device)
        self._ahead = ahead
        self._state: dict[str, Any] | None = None
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """One pass over the source; closing the iterator ends its thread."""
        self._state = self._source_state()
        lane = _Lane(iter(self._batches), self._move, self._device, self._ahead, self._source_state)
        return self._iterate(lane)

    def state_dict(self) -> dict[str, Any] | None:
        """The source's state after the batch that was handed out last; None when it keeps no state."""
        return self._source_state() if self._state is None else self._state

    def _iterate(self, lane: _Lane) -> Iterator[Any]:
        lane.start()
        try:
            while True:
                asked = time.perf_counter()
                item = lane.take()
                self.wait_seconds += time.perf_counter() - asked
                if item is None:
                    break
                batch, self._state = item
                yield batch
        finally:
            lane.close()
        self._state = self._source_state()

    def _source_state(self) -> dict[str, Any] | None:
        get = getattr(self._batches, "state_dict", None)
        return get() if get else None


class _Lane:
    """The thread of one iteration, and the queue it fills."""

    def __init__(
        self,
        source: Iterator[Any],
        move: Move,
        device: torch.device,
        ahead: int,
        state: Callable[[], dict[str, Any] | None],
    ) -> None:
        self._source, self._move, self._state = source, move, state
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._room = threading.Semaphore(ahead)
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="footplate-prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> tuple[Any, dict[str, Any] | None] | None:
        """The next batch and the source's state after it; None at the end."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            return None
        self._room.release()
        batch, state, copied = item
        if copied is not None:
            current = torch.cuda.current_stream(self._stream.device)  # type: ignore[union-attr]
            current.wait_event(copied)
            pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(current), batch)
        return batch, state

    def close(self) -> None:
        """End the thread, and with it the source's iterator."""
        self._stopped = True
        self._room.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._fill()
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)
        finally:
            close = getattr(self._source, "close", None)
            if close:
                close()

    def _fill(self) -> None:
        for batch in self._source:
            state = self._state()
            self._room.acquire()
            if self._stopped:
                return
            moved, copied = self._place(batch)
            self._ready.put((moved, state, copied))

    def _place(self, batch: Any) -> tuple[Any, Any]:
        """The batch on the device, and on CUDA the event after which it is there."""
        if self._stream is None:
            return self._move(batch), None
        batch = pytree.tree_map_only(torch.Tensor, lambda t: t.pin_memory() if t.device.type == "cpu" else t, batch)
        with torch.cuda.stream(self._stream):
            moved = self._move(batch)
            return moved, self._stream.record_event()
