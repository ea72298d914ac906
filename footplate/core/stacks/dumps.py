"""Readers of stacks that faulthandler and py-spy have written."""

from __future__ import annotations

import json
import re

from footplate.core.stacks.snapshot import Frame, Thread

_HEAD = re.compile(r"(?:Current t|T)hread 0x[0-9a-f]+(?: \[(?P<name>.*)\])? \(most recent call first\):")
_SINGLE = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def from_faulthandler(text: str) -> tuple[Thread, ...]:
    """Read a dump of faulthandler. It lists the newest thread first, so the main thread is the last one.

    >>> from_faulthandler('Stack (most recent call first):\\n  File "a.py", line 3 in wait\\n')[0].frames
    (Frame(function='wait', file='a.py', line=3),)
    """
    stacks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _HEAD.fullmatch(line), _FRAME.fullmatch(line)
        if head or line == _SINGLE:
            stacks.append(((head and head["name"]) or "", []))
        elif frame and stacks:
            stacks[-1][1].append(Frame(frame["function"], frame["file"], int(frame["line"])))
    last = len(stacks) - 1
    return tuple(
        Thread("MainThread" if index == last else name or f"thread {last - index}", index == last, tuple(frames))
        for index, (name, frames) in enumerate(stacks)
    )


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
