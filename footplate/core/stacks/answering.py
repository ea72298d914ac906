"""Answers to questions for the stacks of this process. `asking.py` asks, from another process of the same machine.

`answer` opens three descriptors that another process of the same user finds in `/proc/PID/fd`, by the names of the files:

    memfd:footplate-stacks-17-4711-3-4    the latest answer, as JSON, of rank 3 of 4; without the ranks if there is only one
    fd 17, with the inode 4711            the write end of a pipe: a "?" in it is a question
    memfd:footplate-dump                  stacks that faulthandler writes at SIGURG

A line of JSON in the pipe is a request: `{"id": "a1", "name": "profile", "arguments": {…}}`. The thread calls the function
of that name in `handlers`. Its reply is in the next answer, under the request's id (`requests.py`). The stacks in that
answer are those of the last question.

A thread waits for questions. It takes the GIL, so that its answer is exact: names of threads, stacks of all threads, the
latest collective of each process group. If the GIL isn't free, because C code holds it, the thread can't answer. Then the
asking process sends SIGURG, which faulthandler answers without the GIL. A process without a handler ignores SIGURG.

No garbage is collected while the thread reads stacks. It makes an object of each frame, which in Python 3.11 may collect
garbage and so give the GIL away. Then a thread that begins waits forever, or a frame is freed while it is read
(https://github.com/python/cpython/issues/106883). Faulthandler wouldn't do instead: in Python 3.11, it may meet a thread
of C++ that has just begun to take the GIL, and crash.

A worker answers for its whole life. Any other process answers during the calls of a trainer (`while_running`).

A forked child, such as a loader's worker, has no such thread. It answers SIGURG, with the stack of its main thread, in a
file of its own. A stopped process answers nothing.

None of this costs anything while nobody asks. Elsewhere than on Linux nothing is opened.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from footplate.core.garbage import no_collection
from footplate.core.stacks.snapshot import Frame, Thread

ANSWER, DUMP = "footplate-stacks-", "footplate-dump"
SIGNAL = signal.SIGURG
THREAD = "footplate-stacks"
OURS = {THREAD, "footplate-heartbeat"}  # threads that never matter
QUESTION, _END = b"?", b"."
_REPLIES_KEPT = 64  # an asking process may be slow to read its reply, while others ask

# Functions that handle requests, by name. The thread calls them with the request's arguments; they must return at once. If
# one returns None, there is no such function now.
handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {}

_supported = sys.platform == "linux" and hasattr(os, "memfd_create")
_progress_at: float | None = None
_since_ns = 0  # collectives that are older belong to an earlier attempt
_open: list[int] = []  # the descriptors of this process
_childs_dump: list[int] = []  # the file of a forked child that has not called `answer`
_thread: threading.Thread | None = None
_lock = threading.Lock()


@dataclass(frozen=True)
class Name:
    """The name of the file with a process's latest answer.

    Attributes:
        pipe: the process's descriptor of the pipe for questions.
        inode: of the pipe. Another file may have the descriptor's number later.
        rank: the process's rank; None if it is none.
        world_size: the number of ranks.
    """

    pipe: int
    inode: int
    rank: int | None = None
    world_size: int = 1

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"-{self.rank}-{self.world_size}"
        return f"{ANSWER}{self.pipe}-{self.inode}{rank}"

    @classmethod
    def parse(cls, text: str) -> Name:
        """Read a name.

        >>> Name.parse("footplate-stacks-17-4711-3-4")
        Name(pipe=17, inode=4711, rank=3, world_size=4)
        """
        return cls(*map(int, text.removeprefix(ANSWER).split("-")))


@contextlib.contextmanager
def while_running() -> Iterator[None]:
    """Answer questions in a `with` block. It leaves no thread behind, unless this process answered before."""
    begins = answer()
    try:
        yield
    finally:
        if begins:
            _stop()


def answer() -> bool:
    """Answer questions from now on. Return True if this call began it; further calls do nothing."""
    global _thread
    with _lock:
        if not _supported or _open:
            return False
        with contextlib.suppress(OSError):  # no descriptors are left
            questions, ask = os.pipe2(os.O_CLOEXEC)
            name = Name(ask, os.fstat(ask).st_ino, *(_rank() or ()))
            answers = os.memfd_create(str(name), os.MFD_CLOEXEC)
            _open.extend((questions, ask, answers))
            _dump_at_signal(all_threads=True)
            _close(_childs_dump)
            _thread = threading.Thread(target=_serve, args=(questions, answers), name=THREAD, daemon=True)
            _thread.start()
        return bool(_open)


def _stop() -> None:
    """End the thread, and close the descriptors. In a forked child, there is nothing left to end."""
    global _thread
    with _lock:
        if _thread is None or not _open:
            return
        _, ask, *_ = _open
        os.write(ask, _END)
        _thread.join()
        _thread = None
        faulthandler.unregister(SIGNAL)
        _close(_open)


def begin_again() -> None:
    """Answer under the present rank, and forget all that a former attempt of this process has left."""
    global _progress_at, _since_ns
    _stop()
    handlers.clear()
    _progress_at, _since_ns = None, time.time_ns()
    answer()


def progressed() -> None:
    """Note that the work advances."""
    global _progress_at
    _progress_at = time.monotonic()


def _rank() -> tuple[int, int] | None:
    """Rank and world size of this process, from torchrun's variables; None if it is alone."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() and int(size) > 1 else None


def _dump_at_signal(all_threads: bool) -> None:
    """Let faulthandler write stacks at `SIGNAL`, unless the program handles that signal itself."""
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    dump = os.memfd_create(DUMP, os.MFD_CLOEXEC)
    # The asking process truncates the file. With this flag, the next dump then begins at its start.
    fcntl.fcntl(dump, fcntl.F_SETFL, os.O_APPEND)
    _open.append(dump)
    faulthandler.register(SIGNAL, file=dump, all_threads=all_threads)


def _serve(questions: int, answers: int) -> None:
    replies: dict[str, Any] = {}
    described: dict[str, Any] = {"at": 0.0}
    unread = b""
    while True:
        asked, requests, unread = _split(unread + os.read(questions, 4096))
        if _END in asked:
            return
        for request in requests:
            replies.update(_handled(request))
        replies = dict(list(replies.items())[-_REPLIES_KEPT:])
        if QUESTION in asked:
            try:
                described = _describe()
            except Exception as error:  # the interpreter is being torn down, or torch has changed
                described = {"at": time.monotonic(), "error": type(error).__name__}
        text = json.dumps({**described, "replies": replies}).encode()
        os.ftruncate(answers, 0)
        os.pwrite(answers, text, 0)


def _split(data: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Split what was read into single bytes, whole requests, and the beginning of a request that isn't whole.

    >>> _split(b'?{"id": "a"}\\n?{"id": ')
    (b'??', [b'{"id": "a"}'], b'{"id": ')
    """
    *lines, rest = data.split(b"\n")
    singles = [line.partition(b"{")[0] for line in (*lines, rest)]
    requests = [line[line.index(b"{") :] for line in lines if b"{" in line]
    return b"".join(singles), requests, rest[len(singles[-1]) :]


def _handled(line: bytes) -> dict[str, Any]:
    """Handle a request; return its reply under its id."""
    try:
        request = json.loads(line)
        handler = handlers.get(request["name"])
        if handler is None:
            return {request["id"]: None}
        try:
            reply = handler(request["arguments"])
            json.dumps(reply)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        return {request["id"]: reply}
    except (ValueError, KeyError, TypeError):  # not a request
        return {}


def _describe() -> dict[str, Any]:
    """Describe this process, as plain values."""
    return {
        "at": time.monotonic(),
        "threads": [asdict(thread) for thread in _threads() if thread.name not in OURS],
        "collectives": collectives(),
        "idle_s": None if _progress_at is None else time.monotonic() - _progress_at,
    }


def _threads() -> list[Thread]:
    """The stacks of all threads, the newest thread first. The functions have the names of their classes."""
    with no_collection():
        stacks = {number: tuple(_calls(frame)) for number, frame in sys._current_frames().items()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    return [
        Thread("MainThread" if number == main else names.get(number, f"thread {number}"), number == main, calls)
        for number, calls in stacks.items()
    ]


def _calls(frame: FrameType | None) -> Iterator[Frame]:
    """The calls of a thread, the most recent one first."""
    while frame is not None:
        code = frame.f_code
        yield Frame(code.co_qualname, code.co_filename, frame.f_lineno or 0)
        frame = frame.f_back


def collectives() -> list[dict[str, Any]]:
    """The latest collective of each process group, from torch's flight recorder, which gloo and NCCL keep."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    latest: dict[str, dict[str, Any]] = {}
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if not hasattr(c10d, recorder):
            continue
        with contextlib.suppress(ValueError, RuntimeError):
            for entry in json.loads(getattr(c10d, recorder)(True, False)).get("entries", []):
                if entry["time_created_ns"] < _since_ns:
                    continue
                number, description = entry["process_group"]
                latest[f"group {number}" if description in ("", "undefined") else description] = entry
    now_ns = time.time_ns()
    return [
        {
            "group": group,
            "operation": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            "number": entry["collective_seq_id"],
            "age_s": max(0.0, (now_ns - entry["time_created_ns"]) / 1e9),
            "completed": entry["state"] == "completed",
        }
        for group, entry in latest.items()
    ]


def _after_fork_in_child() -> None:
    """Leave the parent's descriptors to the parent. Answer the signal in a file of this process."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    handlers.clear()
    if not _open and not _childs_dump:
        return
    _close(_open)
    _close(_childs_dump)
    with contextlib.suppress(OSError, RuntimeError):
        _dump_at_signal(all_threads=False)
        # A later call of `answer` in this process opens the other descriptors.
        _childs_dump.extend(_open)
        _open.clear()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()


if _supported:
    os.register_at_fork(after_in_child=_after_fork_in_child)
