"""The parallel loader: a thread of its own keeps the next batches on the device, so the step never waits for a copy.

    batches = Prefetcher(loader, move=lambda batch: to_device(batch, device), device=device)
    for batch in batches:
        step(batch)
    batches.wait_seconds                            # how long the step stood still for want of a batch

The consumer takes the first batch from the source itself, so that whatever a loader does to begin (drawing an order,
forking workers) happens where it would without a Prefetcher; the thread reads on from there. What fails in it is raised
where its batch would have been.

On CUDA the copies run on a stream of their own, from pinned memory, and the step's stream waits for exactly the batch
that it is handed. Memory goes back to the copies' stream once the step's stream is done with it, which each tensor is told
(`record_stream`); a batch that holds something which can't be told is copied on the step's stream.

The source is read ahead, so its own state is too far on: ask the Prefetcher for the state of what was handed out.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import torch

from footplate.core.threads import join_however_long
from footplate.hardware.transfer import map_tensors, movable

Move = Callable[[Any], Any]

_END = object()


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
        return self.first(math.inf)

    def first(self, most: float) -> Iterator[Any]:
        """One pass over at most so many batches of the source; no more of them are read."""
        self._state = None
        source = iter(self._batches)
        return self._iterate(source, source if math.isinf(most) else itertools.islice(source, int(most)))

    def set_epoch(self, epoch: int) -> None:
        """Tell the source which epoch is next."""
        self._batches.set_epoch(epoch)  # type: ignore[attr-defined]
        self._state = None

    def state_dict(self) -> dict[str, Any] | None:
        """The source's state after the batch that was handed out last; None when it keeps no state."""
        return self._source_state() if self._state is None else self._state

    def _iterate(self, source: Iterator[Any], batches: Iterator[Any]) -> Iterator[Any]:
        asked = time.perf_counter()
        begun = next(batches, _END)
        if begun is _END:
            return
        lane = _Lane(
            source, itertools.chain((begun,), batches), self._move, self._device, self._ahead, self._source_state
        )
        del begun
        lane.start()
        try:
            while True:
                item = lane.take()
                self.wait_seconds += time.perf_counter() - asked
                if item is None:
                    break
                batch, self._state = item
                del item
                yield batch
                del batch
                asked = time.perf_counter()
        finally:
            lane.close()
        self._state = None

    def _source_state(self) -> dict[str, Any] | None:
        get = getattr(self._batches, "state_dict", None)
        return get() if get else None


class _Lane:
    """The thread of one iteration, and the queue it fills.

    Args:
        source: the source's iterator, which is closed in the end.
        batches: those of its batches that are wanted.
        move: see `Prefetcher`.
        device: likewise.
        ahead: likewise.
        state: the source's present state.
    """

    def __init__(
        self,
        source: Iterator[Any],
        batches: Iterator[Any],
        move: Move,
        device: torch.device,
        ahead: int,
        state: Callable[[], dict[str, Any] | None],
    ) -> None:
        self._source, self._batches, self._move, self._state = source, batches, move, state
        self._streams = _Streams(device) if device.type == "cuda" else None
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
            try:
                raise item
            finally:
                del item  # else the exception would hold this frame, and this frame the exception
        if item is None:
            return None
        self._room.release()
        batch, state, copied = item
        if self._streams is not None:
            self._streams.hand_over(batch, copied)
        return batch, state

    def close(self) -> None:
        """End the thread, and with it the source's iterator."""
        self._stopped = True
        self._room.release()
        if self._thread is not threading.current_thread():  # where an iterator that was dropped is cleared away
            join_however_long(self._thread, "it waits for the batch that is being read")

    def _run(self) -> None:
        try:
            if self._streams is not None:
                torch.cuda.set_device(self._streams.device)
            self._fill()
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)
        finally:
            close = getattr(self._source, "close", None)
            if close:
                close()

    def _fill(self) -> None:
        for batch in self._batches:
            state = self._state()
            self._room.acquire()
            if self._stopped:
                return
            self._ready.put(self._placed(batch, state))
            del batch  # its memory may be wanted before the next one is read

    def _placed(self, batch: Any, state: dict[str, Any] | None) -> tuple[Any, dict[str, Any] | None, Any]:
        """The batch on the device, the state, and on CUDA the event after which it is there."""
        if self._streams is None:
            return self._move(batch), state, None
        batch = map_tensors(batch, _pinned, lambda one: callable(getattr(one, "pin_memory", None)))
        stream = self._streams.for_copies_of(batch)
        with torch.cuda.stream(stream):
            return self._move(batch), state, stream.record_event()


class _Streams:
    """The two streams of CUDA between which batches are handed over: the copies', and the consumer's at the beginning."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)
        self._consumer = torch.cuda.current_stream(device)

    def for_copies_of(self, batch: Any) -> torch.cuda.Stream:
        """The stream of its own, if all that is moved can be told who uses its memory."""
        told = all(hasattr(one, "record_stream") for one in movable(batch))
        return self._copies if told else self._consumer

    def hand_over(self, batch: Any, copied: torch.cuda.Event) -> None:
        """Let the caller's stream wait until a batch is there, and the batch's memory until that stream is done."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for one in movable(batch):
            if hasattr(one, "record_stream") and getattr(one, "is_cuda", True):
                one.record_stream(current)


def _pinned(one: Any) -> Any:
    """A tensor in page-locked memory; likewise what can put itself there."""
    if isinstance(one, torch.Tensor):
        return one.pin_memory() if one.device.type == "cpu" and one.layout is torch.strided else one
    pin = getattr(one, "pin_memory", None)
    return pin() if callable(pin) else one
