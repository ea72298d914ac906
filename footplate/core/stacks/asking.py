"""Questions for the stacks of processes of this machine, within a time limit.

For each process, in this order, until a method works:

1. A question, which a thread of the process answers with the GIL (`answering.py`). Safe at any time.
2. SIGURG, which faulthandler answers without the GIL. Only a process that holds the GIL for long needs this. It isn't safe
   while other threads run Python. So a process gets it only after its thread has read the question and hasn't answered.
3. py-spy, where it is installed and the kernel allows it. It reads stopped processes, too.

Native stacks are read by py-spy on request. It pauses a process for a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from footplate.core.stacks import answering, proc
from footplate.core.stacks.requests import Answering, connected
from footplate.core.stacks.snapshot import (
    Collective,
    Process,
    Thread,
    from_faulthandler,
    from_py_spy,
    threads_from,
)

LIMIT_S = 1.5
ANSWER_S = 0.5  # after it has read the question, a process whose GIL is free answers sooner
DUMP_S = 0.3
POLL_S = 0.005
MAX_CHILDREN = 32
_THREADS = 16
# The main thread of a process that computes may sleep for a moment.
_LOOKS = 4


def ask(pids: Iterable[int], limit_s: float = LIMIT_S, native: bool = False) -> Iterator[Process]:
    """Yield the stacks and states of processes and of their children, in the order in which they become known.

    Args:
        pids: the processes.
        limit_s: when this time is over, what is known is yielded.
        native: read native stacks, too.
    """
    pids, until = list(pids), time.monotonic() + limit_s
    if not pids or sys.platform != "linux":
        yield from map(Process, pids)
        return
    children = proc.children()
    with ThreadPoolExecutor(min(_THREADS, len(pids)), "footplate-asks") as pool:
        answers = [pool.submit(_ask_tree, pid, children, until, native, []) for pid in pids]
        for answer in as_completed(answers):
            yield answer.result()


def _ask_tree(pid: int, children: Mapping[int, list[int]], until: float, native: bool, asked: list[int]) -> Process:
    """Ask a process, then those below it. `asked` counts them all."""
    asked.append(pid)
    process = _ask(pid, until, native)
    below = [
        _ask_tree(child, children, until, native, asked) for child in children.get(pid, []) if len(asked) < MAX_CHILDREN
    ]
    return replace(process, children=tuple(below))


def _ask(pid: int, until: float, native: bool) -> Process:
    name = (proc.state_of(pid) or ("", ""))[1]
    process = Process(pid, name, _settled_state(pid), proc.waits_in(pid))
    if process.state == "ended":
        return process
    files = proc.descriptors(pid, (answering.ANSWER, answering.DUMP))
    process = replace(process, **_rank_of(files))
    process = _with_stacks(process, files, until)
    if native and process.threads and process.state in ("running", "asleep", "uninterruptible"):
        stacks = _py_spy(pid, until, "--native")
        process = replace(process, native=next((thread.frames for thread in stacks if thread.is_main), ()))
    return process


def _with_stacks(process: Process, files: Mapping[str, str], until: float) -> Process:
    """Add a process's stacks, by the first method that works."""
    pid = process.pid
    if process.state in ("running", "asleep", "uninterruptible"):
        name = next((name for name in files if name.startswith(answering.ANSWER)), None)
        answer = None if name is None else _question(Answering(pid, name), until)
        if answer is not None:
            collectives = tuple(Collective(**collective) for collective in answer["collectives"])
            return replace(
                process, source="answer", threads=threads_from(answer["threads"]), collectives=collectives,
                idle_s=answer["idle_s"],
            )  # fmt: skip
        if answering.DUMP in files and (text := _signalled_dump(pid, until)):
            return replace(process, source="signal", threads=_without_ours(from_faulthandler(text)))
    threads = _without_ours(_py_spy(pid, until, "--nonblocking")) if _is_python(pid) else ()
    return replace(process, source="py-spy" if threads else "", threads=threads)


def _without_ours(threads: tuple[Thread, ...]) -> tuple[Thread, ...]:
    """Leave out the thread that answers questions."""
    return tuple(thread for thread in threads if not any(frame.file == answering.__file__ for frame in thread.frames))


def root_of(pid: int) -> int:
    """The process that has started all ranks of this machine if `pid` is one of them; otherwise `pid`."""
    is_rank = _rank_of(proc.descriptors(pid, (answering.ANSWER,))).get("rank") is not None
    return proc.parent_of(pid) or pid if is_rank else pid


def _rank_of(files: Iterable[str]) -> dict[str, Any]:
    """Rank and world size of a process, which the name of its file has."""
    for name in map(answering.Name.parse, (file for file in files if file.startswith(answering.ANSWER))):
        return {"rank": name.rank, "world_size": name.world_size}
    return {}


def _settled_state(pid: int) -> Any:
    """The state of the main thread: running if it runs at one of several looks."""
    state = "ended"
    for look in range(_LOOKS):
        if look:
            time.sleep(POLL_S)
        seen = proc.state_of(pid)
        state = seen[0] if seen else "ended"
        if state != "asleep":
            break
    return state


def _question(process: Answering, until: float) -> dict[str, Any] | None:
    """Ask the answering thread of a process; None if it can't answer."""
    asked_at = read_at = time.monotonic()
    with contextlib.suppress(OSError), connected(process) as (answers, pipe):
        os.write(pipe, answering.QUESTION)
        while True:
            # An answer that is being written isn't whole.
            with contextlib.suppress(ValueError):
                answer = json.loads(os.pread(answers, 1 << 24, 0))
                if answer["at"] >= asked_at:
                    return answer if "threads" in answer else None
            now = time.monotonic()
            if _holds_bytes(pipe) and proc.has_runnable_thread(process.pid):
                read_at = now
            if now > min(until, read_at + ANSWER_S):
                return None
            time.sleep(POLL_S)
    return None


def _holds_bytes(pipe: int) -> bool:
    """Return True if a pipe has bytes that nobody has read.

    On a busy machine, the reader may not have run yet. It is runnable then. A reader that sleeps waits for the GIL, to
    answer the question before this one.
    """
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return count > 0


def _signalled_dump(pid: int, until: float) -> str | None:
    """Let faulthandler write stacks; None if the process has no handler, or doesn't run it."""
    if not proc.catches(pid, answering.SIGNAL):
        return None
    until = min(until, time.monotonic() + DUMP_S)
    with (
        contextlib.suppress(OSError),
        os.fdopen(proc.open_memory_file(pid, answering.DUMP, os.O_RDWR), "r+b", buffering=0) as dump,
    ):
        os.ftruncate(dump.fileno(), 0)
        blocked = proc.handling(pid, answering.SIGNAL)
        os.kill(pid, answering.SIGNAL)
        while time.monotonic() < until:
            time.sleep(POLL_S)
            if os.fstat(dump.fileno()).st_size and not proc.handling(pid, answering.SIGNAL) - blocked:
                return os.pread(dump.fileno(), 1 << 24, 0).decode(errors="replace")
    return None


def _is_python(pid: int) -> bool:
    """Return True if a process runs Python. py-spy needs a second to find out that one doesn't."""
    with contextlib.suppress(OSError):
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    return False


def _py_spy(pid: int, until: float, option: str) -> tuple[Thread, ...]:
    """Read stacks with py-spy; nothing if it isn't there, isn't allowed, or takes too long."""
    program, left_s = _py_spy_path(), until - time.monotonic()
    if program is None or left_s <= 0:
        return ()
    command = [program, "dump", "--json", option, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=left_s, stdin=subprocess.DEVNULL)
        return from_py_spy(done.stdout.decode(errors="replace")) if done.returncode == 0 else ()
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ()


def _py_spy_path() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")
