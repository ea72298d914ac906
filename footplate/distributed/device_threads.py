"""Permanent threads, one for each device, so that a single process keeps several devices busy.

    run({0: task, 1: task})      the caller ──► thread 0: task      both at once; the caller waits for both
                                            └─► thread 1: task
                                 results, by index; or the first exception, once both have ended

torch lets other threads run while an operator or a backward pass runs. So the threads compute at the same time, and only
take turns in Python. The threads are made once and wait between tasks; passing a task on takes about ten microseconds. If
the caller is interrupted while it waits, the tasks run on, and the threads end with the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from footplate.core.threads import join
from footplate.hardware.machine import usable_cores

# Time for the threads to end. An idle thread needs much less.
JOIN_S = 1.0


class Threads:
    """One thread for each device; see the module's docstring.

    Args:
        devices: one for each thread, which selects it. On the CPU the threads share the cores, unless `OMP_NUM_THREADS`
            sets the number for each.

    Attributes:
        idents: the threads' identifiers, as from `threading.get_ident`.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._tasks: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(target=_work, args=(tasks,), name=f"replica {index} ({device})", daemon=True)
            for index, (tasks, device) in enumerate(zip(self._tasks, devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        self.idents = [thread.ident or 0 for thread in self._threads]
        cores_here = torch.get_num_threads()
        self.run({index: partial(_set_up, device, len(devices)) for index, device in enumerate(devices)})
        if torch.get_num_threads() != cores_here:
            torch.set_num_threads(cores_here)

    def run(self, tasks: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run each task in the thread of its index, all at once; return their results.

        Raises:
            BaseException: the exception of the failed task with the lowest index, with a note that names the device. It is
                raised when all tasks have ended.
        """
        ended: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        for index, task in tasks.items():
            self._tasks[index].put(partial(_run_task, index, task, ended))
        results = dict.fromkeys(tasks)
        errors: dict[int, BaseException] = {}
        for _ in tasks:
            index, value, error = ended.get()
            results[index] = value
            if error is not None:
                errors[index] = error
        if errors:
            raise self._with_notes(errors)
        return results

    def end(self) -> None:
        """End the threads, each after its present task."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            join(thread, JOIN_S, "its task still runs")

    def _with_notes(self, errors: Mapping[int, BaseException]) -> BaseException:
        first, *others = sorted(errors)
        error = errors[first]
        error.add_note(f"Raised in replica {first} of {len(self._devices)}, on {self._devices[first]}.")
        for index in others:
            error.add_note(f"Replica {index} raised {type(errors[index]).__name__} too: {errors[index]}")
        return error


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run tasks until None arrives. Each finished task is dropped at once, with the graph that it may hold."""
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task


def _run_task(index: int, task: Callable[[], Any], ended: SimpleQueue[tuple[int, Any, BaseException | None]]) -> None:
    try:
        ended.put((index, task(), None))
    except BaseException as error:
        ended.put((index, None, error))


def _set_up(device: torch.device, threads: int) -> None:
    """Select the device of this thread, and on the CPU its share of the cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # This holds for this thread, and for threads that are made later.
        torch.set_num_threads(max(1, int(usable_cores()) // threads))
