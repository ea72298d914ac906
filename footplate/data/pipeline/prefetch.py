"""Prefetching to the device: a thread copies the next batches ahead, so the step doesn't wait for a copy.

    batches = Prefetcher(loader, move=lambda batch: to_device(batch, device), device=device)
    for batch in batches:
        step(batch)
    batches.wait_seconds                            # how long the step has waited for batches

The consumer takes the first batch from the source itself. So everything that a loader does to begin (drawing an order,
forking workers) happens where it would without a Prefetcher. The thread reads on from there. An error in the thread is
raised where its batch would have been.

On CUDA, the copies run on a stream of their own, from pinned memory, and the step's stream waits for exactly the batch
that it gets. Each tensor records the step's stream (`record_stream`), so its memory goes back to the copies' stream
when the step's stream has finished with it. If a batch holds something that can't record a stream, it is copied on the
step's stream.

The source is read ahead, so its own state is too far on. Ask the Prefetcher for the state after the last batch that it
handed out.
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
    """Iterates over batches that are on the step's device already.

    Args:
        batches: a `Loader` or any iterable of batches.
        move: copies a batch to the device or devices; called in the background thread.
        device: the device. On CUDA, a stream and pinned memory are used.
        ahead: how many batches wait on the device.

    Attributes:
        wait_seconds: the total time that the consumer has waited for batches.

    Examples:
        >>> from footplate.data import Prefetcher
        >>> loader = fp.Loader(fp.Table("flowers.parquet"), batch_size=4)
        >>> batches = Prefetcher(loader, move=lambda batch: batch["label"].to("cpu"))
        >>> [labels.shape for labels in batches]
        [torch.Size([4]), torch.Size([4])]
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
        """Begin a pass over the source. Closing the iterator ends its thread."""
        return self.first(math.inf)

    def first(self, limit: float) -> Iterator[Any]:
        """Begin a pass over at most `limit` batches of the source. No more batches are read."""
        self._state = None
        source = iter(self._batches)
        return self._iterate(source, source if math.isinf(limit) else itertools.islice(source, int(limit)))

    def set_epoch(self, epoch: int) -> None:
        """Set the source's next epoch."""
        self._batches.set_epoch(epoch)  # type: ignore[attr-defined]
        self._state = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the source's state after the batch that was handed out last; None if the source has no state."""
        return self._source_state() if self._state is None else self._state

    def _iterate(self, source: Iterator[Any], batches: Iterator[Any]) -> Iterator[Any]:
        asked = time.perf_counter()
        first = next(batches, _END)
        if first is _END:
            return

        thread = _PrefetchThread(
            source, itertools.chain((first,), batches), self._move, self._device, self._ahead, self._source_state
        )
        # This frame must hold no batch: its memory may be needed.
        del first
        thread.start()

        try:
            while True:
                item = thread.take()
                self.wait_seconds += time.perf_counter() - asked
                if item is None:
                    break
                batch, self._state = item
                del item
                yield batch
                del batch
                asked = time.perf_counter()
        finally:
            thread.close()
        self._state = None

    def _source_state(self) -> dict[str, Any] | None:
        get = getattr(self._batches, "state_dict", None)
        return get() if get else None


class _PrefetchThread:
    """The thread of one iteration, and the queue that it fills.

    Args:
        source: the source's iterator. The thread closes it at the end.
        batches: the batches to read from it.
        move: see `Prefetcher`.
        device: see `Prefetcher`.
        ahead: see `Prefetcher`.
        state: returns the source's current state.
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
        """Return the next batch and the source's state after it; None at the end."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                # Otherwise the exception would hold this frame, and this frame the exception.
                del item
        if item is None:
            return None
        self._room.release()
        batch, state, copied = item
        if self._streams is not None:
            self._streams.hand_over(batch, copied)
        return batch, state

    def close(self) -> None:
        """End the thread and close the source's iterator."""
        self._stopped = True
        self._room.release()
        # Python may collect a dropped iterator in this thread itself, which can't join itself.
        if self._thread is not threading.current_thread():
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
            self._ready.put(self._moved(batch, state))
            # The memory of the batch may be needed before the next batch is read.
            del batch

    def _moved(self, batch: Any, state: dict[str, Any] | None) -> tuple[Any, dict[str, Any] | None, Any]:
        """Move a batch. Return it with the state, and on CUDA with the event that ends its copy."""
        if self._streams is None:
            return self._move(batch), state, None
        batch = map_tensors(batch, _pinned, lambda value: callable(getattr(value, "pin_memory", None)))
        stream = self._streams.for_copies_of(batch)
        with torch.cuda.stream(stream):
            return self._move(batch), state, stream.record_event()


class _Streams:
    """The CUDA stream of the copies, and the stream that the consumer had at the beginning."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)
        self._consumer = torch.cuda.current_stream(device)

    def for_copies_of(self, batch: Any) -> torch.cuda.Stream:
        """Return the copies' stream if everything that is moved can record a stream, else the consumer's."""
        can_record = all(hasattr(value, "record_stream") for value in movable(batch))
        return self._copies if can_record else self._consumer

    def hand_over(self, batch: Any, copied: torch.cuda.Event) -> None:
        """Let the caller's stream wait for the copy of a batch, and the batch's memory for that stream."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for value in movable(batch):
            if hasattr(value, "record_stream") and getattr(value, "is_cuda", True):
                value.record_stream(current)


def _pinned(value: Any) -> Any:
    """Return a tensor, or any value with `pin_memory`, in page-locked memory."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory() if value.device.type == "cpu" and value.layout is torch.strided else value
    pin = getattr(value, "pin_memory", None)
    return pin() if callable(pin) else value
