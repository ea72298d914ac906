"""The threads between a table and the consumer of its batches.

    readers (2, or 8 over a network) ──windows──► feeder (1) ──small tasks──► decoders (num_threads) ──► batches, in order

1. The feeder waits for the windows of the next batch and collates its columns. It hands the images to the decoders in small
   tasks, which write straight into the batch's memory. Up to `prefetch` batches are pending.
2. The consumer takes the batches in order, and waits for the tasks of each. If something fails, the error is raised where
   the batch is taken.
3. `close` ends all threads. Nothing keeps running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from footplate.core.threads import join_however_long, shut_down
from footplate.data.order.row_order import RowOrder
from footplate.data.pipeline.batch_builder import BatchBuilder, Busy, PendingBatch
from footplate.data.pipeline.batch_spec import BatchSpec
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.decoded_cache import CachedImages
from footplate.data.pipeline.row_workers import RowWorkers
from footplate.data.pipeline.window_prefetch import WindowPrefetcher
from footplate.data.table import Table
from footplate.distributed.world import World

_READERS = 2
# Over a network, most of the readers wait for the server.
_REMOTE_READERS = 8


class BatchPipeline:
    """The batches of one rank in one epoch, from `start` on.

    Args:
        table: the table.
        spec: how its rows become batches.
        epoch: the order of rows.
        start: the first batch.
        world: rank and world size of this process.
        threads: how many threads decode and transform.
        prefetch: how many batches may be pending.
        caches: the decoded caches of image columns. If all are complete, images are not read.
        workers: the processes that transform rows; None if threads do.
        pin_memory: True to put batches into page-locked memory.
        busy: counts the time of the decoding threads.
    """

    def __init__(
        self,
        table: Table,
        spec: BatchSpec,
        epoch: RowOrder,
        start: int,
        world: World,
        threads: int,
        prefetch: int,
        caches: Mapping[str, CachedImages],
        workers: RowWorkers | None = None,
        pin_memory: bool = False,
        busy: Busy | None = None,
    ) -> None:
        buffers = Buffers(pin_memory)
        is_cached = bool(caches) and all(cache.is_complete() for cache in caches.values())
        read = replace(spec.read, images=()) if is_cached else spec.read

        self._batches = range(start, epoch.num_batches(world.size))
        self._caches = list(caches.values())
        self._stopped = False
        # One permit for each batch that may be pending.
        self._room = threading.Semaphore(prefetch)
        self._pending: SimpleQueue[PendingBatch | BaseException] = SimpleQueue()

        self._readers = ThreadPoolExecutor(_REMOTE_READERS if table.is_remote else _READERS, "footplate-read")
        self._decoders = ThreadPoolExecutor(threads, "footplate-decode")
        self._windows = WindowPrefetcher(table, read, epoch, world, start, self._readers, buffers)
        self._builder = BatchBuilder(table, spec, epoch.epoch, self._decoders, caches, buffers, workers, busy or Busy())
        self._feeder = threading.Thread(target=self._feed, name="footplate-feed", daemon=True)
        self._feeder.start()

    def batches(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each batch, and how many bad rows were left out of it."""
        for _ in self._batches:
            pending = self._pending.get()
            if isinstance(pending, BaseException):
                raise pending
            finished = self._builder.finish(pending)
            self._room.release()
            yield finished

    def close(self) -> None:
        """Stop all threads and wait for them, but not during a garbage collection."""
        self._stopped = True
        self._room.release()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._decoders.shutdown(wait=False, cancel_futures=True)
        if self._feeder is not threading.current_thread():
            join_however_long(self._feeder, "it waits for the rows that are being read")
        shut_down(self._readers)
        shut_down(self._decoders)
        for cache in self._caches:
            cache.close()

    def _feed(self) -> None:
        try:
            for batch in self._batches:
                self._room.acquire()
                if self._stopped:
                    return
                self._pending.put(self._builder.begin(*self._windows.take(batch)))
        except BaseException as error:
            self._pending.put(error)
