"""The threads between a table and the one who asks for batches.

    readers (2) ──windows──► feeder (1) ──small tasks──► decoders (num_threads) ──► batches, in order

The feeder keeps up to `prefetch` batches in the making: it waits for the windows of the next batch, puts its columns
together, and hands its images to the decoders in small tasks that write straight into the batch's memory. The consumer
takes batches in order, waiting for the tasks of each. Whatever fails, fails where the batch is taken. `close` ends all
threads; nothing is left running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from footplate.core.threads import join_however_long
from footplate.data.order.plan import Epoch
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.collate import Maker, Making
from footplate.data.pipeline.decoded_cache import CachedImages
from footplate.data.pipeline.recipe import Recipe
from footplate.data.pipeline.row_workers import Workers
from footplate.data.pipeline.windows import Schedule
from footplate.data.table import Table
from footplate.distributed.world import World

_READERS = 2


class Pipeline:
    """The batches of one rank in one epoch, from `start` on.

    Args:
        table: where rows come from.
        recipe: what they become.
        epoch: in which order.
        start: the first batch.
        world: this process's place among all.
        threads: how many threads decode and transform.
        prefetch: how many batches may be in the making.
        caches: the decoded caches of image columns; when all are complete, images are not read.
        workers: the processes that transform rows; None when threads do.
        pin_memory: whether batches lie in page-locked memory.
    """

    def __init__(
        self,
        table: Table,
        recipe: Recipe,
        epoch: Epoch,
        start: int,
        world: World,
        threads: int,
        prefetch: int,
        caches: Mapping[str, CachedImages],
        workers: Workers | None = None,
        pin_memory: bool = False,
    ) -> None:
        buffers = Buffers(pin_memory)
        complete = bool(caches) and all(cache.is_complete() for cache in caches.values())
        content = replace(recipe.content, images=()) if complete else recipe.content
        self._batches = range(start, epoch.num_batches(world.size))
        self._caches = list(caches.values())
        self._stopped = False
        self._room = threading.Semaphore(prefetch)
        self._made: SimpleQueue[Making | BaseException] = SimpleQueue()
        self._readers = ThreadPoolExecutor(_READERS, "footplate-read")
        self._decoders = ThreadPoolExecutor(threads, "footplate-decode")
        self._schedule = Schedule(table, content, epoch, world, start, self._readers, buffers)
        self._maker = Maker(table, recipe, epoch.epoch, self._decoders, caches, buffers, workers)
        self._feeder = threading.Thread(target=self._feed, name="footplate-feed", daemon=True)
        self._feeder.start()

    def batches(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Each batch, and how many bad rows were left out of it."""
        for _ in self._batches:
            made = self._made.get()
            if isinstance(made, BaseException):
                raise made
            finished = self._maker.finish(made)
            self._room.release()
            yield finished

    def close(self) -> None:
        """Stop all threads and wait for them."""
        self._stopped = True
        self._room.release()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._decoders.shutdown(wait=False, cancel_futures=True)
        if self._feeder is not threading.current_thread():
            join_however_long(self._feeder, "it waits for the rows that are being read")
        self._readers.shutdown()
        self._decoders.shutdown()
        for cache in self._caches:
            cache.close()

    def _feed(self) -> None:
        try:
            for batch in self._batches:
                self._room.acquire()
                if self._stopped:
                    return
                self._made.put(self._maker.begin(*self._schedule.take(batch)))
        except BaseException as error:
            self._made.put(error)
