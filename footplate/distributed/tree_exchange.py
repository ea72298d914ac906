"""The sum of a flat tensor over the tree of logical ranks, between processes, while the backward pass still runs.

Each process has the nodes of its own leaves (`logical_ranks.cover`), each as a flat tensor of n elements. The elements are
cut into one chunk for each process, the *owner* of the chunk:

    1. all to all: every process sends each owner its chunk of every node
    2. the owner adds up its chunk in the order of the tree, and divides it by the number of logical ranks
    3. all gather: every owner sends its chunk to everybody

A process that has one node sends as many bytes as in a ring all-reduce: n (W - 1) / W elements in each of the two
exchanges. In the first, a process with m nodes sends m times as many.

The exchanges of several buckets must come in the same order on all processes. On the CPU, one thread makes them, in the
order in which the backward pass has asked for them, on a process group of its own. So nothing else can come between. On a
GPU, the exchanges are queued on a stream of their own, in the same order, and nobody waits on the host.

An exchange fails when another process dies. The backward pass must not end in the middle, so its future gets a value
anyway. `check` raises the error as soon as the backward pass has ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from footplate.distributed.group import TIMEOUT
from footplate.distributed.logical_ranks import cover, ranks_of, tree_sum

LAST_EXCHANGE_S = 1.0

Future = torch.futures.Future[Tensor]


class TreeExchange:
    """The exchanges of one process with the others. All processes make it together.

    Args:
        total: the number of logical ranks.
        device: of the tensors.
    """

    def __init__(self, total: int, device: torch.device) -> None:
        self._total, self._device = total, device
        self._default_group = dist.group.WORLD
        self._process, self._processes = dist.get_rank(), dist.get_world_size()
        ranges = [ranks_of(process, self._processes, total) for process in range(self._processes)]
        self._nodes = [cover(own, total) for own in ranges]
        self._most_leaves = max(map(len, ranges))
        self._leaves = list(map(len, ranges))
        on_cpu = device.type == "cpu"
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc="logical ranks") if on_cpu else None
        self._stream = None if on_cpu else torch.cuda.Stream(device)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_current(self) -> bool:
        """True if the processes are still those that have made it."""
        return self._default_group is dist.group.WORLD

    def begin(self, result: Tensor, nodes: Sequence[Sequence[Tensor]]) -> Future:
        """Begin to sum; return a future of `result`, which then has the mean over all logical ranks.

        Args:
            result: a flat tensor to overwrite. It may be one of the tensors in `nodes`.
            nodes: this process's nodes, each as tensors whose elements follow one another as in `result`.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._sum(result, nodes)
                future: Future = torch.futures.Future(devices=[self._device])
                future.set_result(result)
            return future

        future = torch.futures.Future()

        def job() -> None:
            try:
                if self._error is None:
                    self._sum(result, nodes)
            except BaseException as error:
                self._error = error
            future.set_result(result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="footplate-tree-exchange", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return future

    def check(self) -> None:
        """Raise the error of an exchange that has failed. Call it when no exchange is in progress."""
        if self._error is not None:
            raise self._error

    def gather(self, values: Tensor) -> Tensor:
        """Return a row of numbers of every logical rank, in their order. Call it when no exchange is in progress.

        Args:
            values: (own leaves, numbers), one row for each logical rank of this process.
        """
        padded = values.new_zeros(self._most_leaves, *values.shape[1:])
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in self._leaves]
        dist.all_gather(gathered, padded, group=self._group)
        return torch.cat([rows[:count] for rows, count in zip(gathered, self._leaves, strict=True)])

    def close(self) -> None:
        """End the thread, after the exchanges that it has."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            # After an exception, the thread may wait for other processes until these notice it.
            thread.join(LAST_EXCHANGE_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    @torch.no_grad()
    def _sum(self, result: Tensor, nodes: Sequence[Sequence[Tensor]]) -> None:
        elements, processes = result.numel(), self._processes
        chunk = -(-elements // processes)
        counts = [len(of_process) for of_process in self._nodes]
        count = counts[self._process]

        sent = self._chunks(result, nodes, chunk)
        received = result.new_empty(sum(counts) * chunk)
        sizes = [number * chunk for number in counts]
        dist.all_to_all_single(received, sent, sizes, [count * chunk] * processes, group=self._group)

        order = [node for of_process in self._nodes for node in of_process]
        parts = dict(zip(order, received.view(-1, chunk), strict=True))
        own = tree_sum(parts, self._total, lambda left, right: left.add_(right)).div_(self._total)
        fits = chunk * processes == elements
        whole = result if fits else result.new_empty(processes * chunk)
        _all_gather(whole, own, group=self._group)
        if not fits:
            result.copy_(whole[:elements])

    def _chunks(self, result: Tensor, nodes: Sequence[Sequence[Tensor]], chunk: int) -> Tensor:
        """Return the chunks of all nodes, by owner, then by node, in one flat tensor."""
        elements, processes = result.numel(), self._processes
        fits = chunk * processes == elements
        if fits and len(nodes) == 1:
            # The whole node is the chunks of all owners, one after another.
            tensors = [tensor.reshape(-1) for tensor in nodes[0]]
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

        sent = result.new_empty(processes, len(nodes), chunk)
        for index, tensors in enumerate(nodes):
            flat = result.new_zeros(processes * chunk)
            torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[:elements])
            sent[:, index] = flat.view(processes, chunk)
        return sent.view(-1)


# The newer name of a function that torch has renamed.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
