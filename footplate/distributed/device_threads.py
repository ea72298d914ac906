"""One kept thread for each device: what lets a single process keep several of them busy.

    run({0: task, 1: task})      the caller ──► thread 0: task      both at once; the caller waits for both
                                            └─► thread 1: task
                                 results, by index; or the first exception, once both have ended

torch lets other threads go on while an operator or a backward pass runs, so that the threads compute at the same time and
take turns only in Python. The threads are made once and wait between tasks: handing one over takes some ten microseconds.
A caller that is interrupted while it waits leaves the tasks to themselves; the threads end with the process then.
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

JOIN_S = 1.0  # what an idle thread needs to end, many times over


class Threads:
    """See the module's docstring.

    Args:
        devices: one for each thread, which makes it its own. On the CPU the threads share the cores out, unless
            `OMP_NUM_THREADS` says how many each may use.

    Attributes:
        idents: of the threads, as `threading.get_ident` gives them.
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
        self.run({index: partial(_settle, device, len(devices)) for index, device in enumerate(devices)})
        if torch.get_num_threads() != cores_here:
            torch.set_num_threads(cores_here)

    def run(self, tasks: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run each task in the thread of its index, all at once; returns what they returned.

        Raises:
            BaseException: what the task of the lowest index that failed raised, with a note of where that was; first all
                have ended.
        """
        ended: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        for index, task in tasks.items():
            self._tasks[index].put(partial(_carry_out, index, task, ended))
        found = dict.fromkeys(tasks)
        errors: dict[int, BaseException] = {}
        for _ in tasks:
            index, value, error = ended.get()
            found[index] = value
            if error is not None:
                errors[index] = error
        if errors:
            raise self._told(errors)
        return found

    def end(self) -> None:
        """Let the threads end, each after the task it is at."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            join(thread, JOIN_S, "its task goes on")

    def _told(self, errors: Mapping[int, BaseException]) -> BaseException:
        first, *others = sorted(errors)
        error = errors[first]
        error.add_note(f"Raised in replica {first} of {len(self._devices)}, on {self._devices[first]}.")
        for index in others:
            error.add_note(f"Replica {index} raised {type(errors[index]).__name__} too: {errors[index]}")
        return error


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    """What a thread does. It forgets each task at once, and with it the graph that the task may hold."""
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task


def _carry_out(index: int, task: Callable[[], Any], ended: SimpleQueue[tuple[int, Any, BaseException | None]]) -> None:
    try:
        ended.put((index, task(), None))
    except BaseException as error:
        ended.put((index, None, error))


def _settle(device: torch.device, threads: int) -> None:
    """The first thing that a thread does: its device, and on the CPU its share of the cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(usable_cores()) // threads))  # of this thread, and of threads made from now on
