"""The stacks and states of processes at one moment, as plain data that travels as JSON.

Threads are read from an answer (`threads_from`), from a dump of faulthandler, and from the output of py-spy.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

State = Literal["running", "asleep", "stopped", "traced", "uninterruptible", "ended"]
Source = Literal["answer", "signal", "py-spy", ""]

# Lines of a dump of faulthandler.
_HEAD = re.compile(r"(?:Current t|T)hread 0x[0-9a-f]+(?: \[(?P<name>.*)\])? \(most recent call first\):")
_SINGLE = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


@dataclass(frozen=True)
class Frame:
    """A call on a stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"`{self.function}` ({self.file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """A thread. `frames`: its calls, the most recent one first."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Collective:
    """The latest collective that a process has called in a process group.

    Attributes:
        group: the name of the process group.
        operation: such as all_reduce.
        number: its sequence number in the group.
        age_s: the time since the call.
        completed: the backend knows that it has completed. Gloo never says so.
    """

    group: str
    operation: str
    number: int
    age_s: float
    completed: bool = False

    def __str__(self) -> str:
        return f"{self.operation} {self.number:,}"


@dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
        pid: its process id.
        name: the kernel's name for it.
        state: of its main thread.
        waits_in: the kernel's function in which the main thread sleeps; empty if it isn't known.
        source: how the stacks were read; empty if they could not be.
        threads: its Python threads.
        native: the main thread's stack with native calls; empty if it wasn't read.
        collectives: the latest collective of each process group.
        idle_s: the time since it last reported progress; None if it never did.
        rank: its rank, if it is one of several.
        world_size: the number of ranks.
        children: the processes that it has started.
    """

    pid: int
    name: str = ""
    state: State = "asleep"
    waits_in: str = ""
    source: Source = ""
    threads: tuple[Thread, ...] = ()
    native: tuple[Frame, ...] = ()
    collectives: tuple[Collective, ...] = ()
    idle_s: float | None = None
    rank: int | None = None
    world_size: int = 1
    children: tuple[Process, ...] = ()

    @property
    def main(self) -> tuple[Frame, ...]:
        """The stack of its main thread; empty if it isn't known."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())

    @property
    def latest(self) -> Collective | None:
        """The collective that it has called last."""
        return min(self.collectives, key=lambda collective: collective.age_s, default=None)

    def tree(self) -> Iterator[Process]:
        """Yield this process and all below it."""
        yield self
        for child in self.children:
            yield from child.tree()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Process:
        """Read what `to_dict` has made."""
        return cls(**{
            **values,
            "threads": threads_from(values["threads"]),
            "native": tuple(Frame(**frame) for frame in values["native"]),
            "collectives": tuple(Collective(**collective) for collective in values["collectives"]),
            "children": tuple(cls.from_dict(child) for child in values["children"]),
        })  # fmt: skip


def threads_from(values: Any) -> tuple[Thread, ...]:
    """Read threads from plain values."""
    return tuple(
        Thread(thread["name"], thread["is_main"], tuple(Frame(**frame) for frame in thread["frames"]))
        for thread in values
    )


def from_faulthandler(text: str) -> tuple[Thread, ...]:
    """Read a dump of faulthandler. It lists the newest thread first, at most 100 threads, and the main thread last.

    >>> from_faulthandler('Stack (most recent call first):\\n  File "a.py", line 3 in wait\\n')[0].frames
    (Frame(function='wait', file='a.py', line=3),)
    """
    stacks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _HEAD.fullmatch(line), _FRAME.fullmatch(line)
        if head or line == _SINGLE:
            stacks.append(((head and head["name"]) or "", []))
        elif frame and stacks:
            line_number = int(frame["line"]) if frame["line"].isdecimal() else 0
            stacks[-1][1].append(Frame(_plain(frame["function"]), _plain(frame["file"]), line_number))
    last = len(stacks) - 1
    return tuple(
        Thread("MainThread" if index == last else name or f"thread {last - index}", index == last, tuple(frames))
        for index, (name, frames) in enumerate(stacks)
    )


def _plain(text: str) -> str:
    """A text with the letters outside of ASCII that faulthandler has escaped."""

    def letter(escape: re.Match[str]) -> str:
        number = int(escape[1] or escape[2] or escape[3], 16)
        return chr(number) if number <= sys.maxunicode else escape[0]

    return _ESCAPED.sub(letter, text)


def from_py_spy(text: str) -> tuple[Thread, ...]:
    """Read the output of `py-spy dump --json`.

    Raises:
        ValueError: it is something else.
    """
    threads = []
    for thread in json.loads(text):
        try:
            frames = tuple(
                Frame(frame["name"], frame["filename"], int(frame["line"] or 0)) for frame in thread["frames"]
            )
            is_main = thread.get("os_thread_id") == thread["pid"]
            threads.append(Thread(thread.get("thread_name") or "", is_main, frames))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an output of py-spy: {error}") from error
    if threads and not any(thread.is_main for thread in threads):
        threads[-1] = Thread(threads[-1].name, True, threads[-1].frames)
    return tuple(threads)


def ranks_of(processes: Iterable[Process]) -> dict[int, Process]:
    """The ranks among some processes and their children, by rank, each without the ranks below it."""
    ranks = {}
    for root in processes:
        for process in root.tree():
            if process.rank is not None:
                children = tuple(child for child in process.children if child.rank is None)
                ranks[process.rank] = replace(process, children=children)
    return dict(sorted(ranks.items()))


def without_ranks(process: Process) -> Process | None:
    """A process with those below it, without ranks, and without processes that have nothing to show.

    Returns None if nothing is left.
    """
    if process.rank is not None:
        return None
    children = tuple(child for child in map(without_ranks, process.children) if child is not None)
    return replace(process, children=children) if process.threads or children else None
