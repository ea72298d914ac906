"""Stacks of real processes: asked, signalled, stopped, forked."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.stacks import answering, asking, proc, requests
from footplate.core.stacks.report import report_on
from footplate.core.stacks.snapshot import (
    Collective,
    Frame,
    Process,
    Thread,
    from_faulthandler,
    from_py_spy,
    ranks_of,
    without_ranks,
)

BEGIN = """
import ctypes, os, signal, sys, threading, time
from footplate.core.stacks import answering
answering.answer()
def hang():
    secret = "do-not-show"
    BODY
print("begins", flush=True)
hang()
"""
ROOT = Path(__file__).parent.parent.parent
Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that hangs in `hang`, whose body is given. Returns its id."""
    started = []

    def begin(body: str, **variables: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN.replace("BODY", body)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        return process.pid

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def asked(pid: int, limit_s: float = 30.0, **settings: bool) -> Process:
    (process,) = asking.ask([pid], limit_s, **settings)
    return process


def until(condition: Callable[[], object], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_answers_with_all_threads_and_no_values(start: Start) -> None:
    pid = start("threading.Thread(target=time.sleep, args=(300,), name='feeds').start(); time.sleep(300)", RANK="3")
    # A loaded machine may need time for an answer, and to begin the thread.
    until(lambda: [frame.function for frame in asked(pid).main][:1] == ["hang"])
    process = asked(pid)

    assert process.source == "answer"
    assert process.state == "asleep"
    assert [frame.function for frame in process.main] == ["hang", "<module>"]
    assert {thread.name for thread in process.threads} == {"MainThread", "feeds"}
    assert process.rank is None  # RANK alone doesn't make a rank
    assert "do-not-show" not in report_on([process])


BEGINS_THREADS = """
    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def thread_of_c(argument):
        pass

    def begin_threads():
        libc, numbers = ctypes.CDLL(None), (ctypes.c_ulong * 8)()
        while True:
            for index in range(8):
                libc.pthread_create(ctypes.byref(numbers, index * 8), None, thread_of_c, None)
            for number in numbers:
                libc.pthread_join(ctypes.c_ulong(number), None)

    threading.Thread(target=begin_threads, name="begins", daemon=True).start()
    time.sleep(300)
"""


def test_a_process_survives_questions_while_threads_of_c_begin(start: Start) -> None:
    """They begin without the GIL. A dump of faulthandler ends Python 3.11 within a thousand questions or so."""
    pid = start(BEGINS_THREADS)
    (process,) = requests.answering_processes([pid])
    for _ in range(1500):
        answer = asking._question(process, time.monotonic() + 60)
        assert answer is not None, f"the process {(proc.state_of(pid) or ('ended',))[0]}"
        assert "MainThread" in {thread["name"] for thread in answer["threads"]}


def test_no_garbage_is_collected_while_stacks_are_read() -> None:
    """That may give the GIL away in the midst."""
    collected_in = set()

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            collected_in.add(sys._getframe(1).f_code.co_name)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        threads = answering._threads()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert "_threads" in collected_in
    assert collected_in.isdisjoint({"<dictcomp>", "_calls"})
    assert gc.isenabled()
    assert threads


FLOWERS = """
import functools, time

def decorated(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call

class Flowers:
    class Inner:
        @property
        def transform(self):
            time.sleep(300)

    @staticmethod
    @decorated
    def read():
        Flowers.Inner().transform

"""


def test_a_method_has_the_name_of_its_class(start: Start, tmp_path: Path) -> None:
    (tmp_path / "flowers.py").write_text(FLOWERS)
    pid = start(f"sys.path.append({str(tmp_path)!r}); import flowers; flowers.Flowers.read()")
    until(lambda: asked(pid).source == "answer" and len(asked(pid).main) == 5)
    assert [frame.function for frame in asked(pid).main] == [
        "Flowers.Inner.transform", "Flowers.read", "decorated.<locals>.call", "hang", "<module>",
    ]  # fmt: skip


def test_a_loop_is_running_and_has_its_rank(start: Start) -> None:
    pid = start("while True: pass", RANK="3", WORLD_SIZE="4")
    until(lambda: asked(pid).source == "answer")
    process = asked(pid)

    assert (process.rank, process.world_size, process.state) == (3, 4, "running")
    assert process.main[0].function == "hang"


def test_a_process_whose_c_code_keeps_the_gil_answers_a_signal(start: Start) -> None:
    pid = start("while True: ctypes.PyDLL(None).sleep(300)", RANK="1", WORLD_SIZE="2")
    until(lambda: asked(pid).source == "signal")
    # The thread that answers may still wait for the GIL, with the question before this one, or have it just now.
    for _ in range(3):
        process = asked(pid)
        assert process.rank == 1
        assert process.source in ("signal", "answer")
        assert process.main[0].function == "hang"
    assert [thread.name for thread in process.threads] == ["MainThread"]  # not the thread that answers


def test_a_stopped_process_keeps_its_rank_and_can_be_asked_again(start: Start) -> None:
    pid = start("time.sleep(300)", RANK="1", WORLD_SIZE="2")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: (proc.state_of(pid) or ("ended", ""))[0] == "stopped")
    stopped = asked(pid)
    os.kill(pid, signal.SIGCONT)

    assert (stopped.state, stopped.rank) == ("stopped", 1)
    assert stopped.source in ("py-spy", "")
    until(lambda: asked(pid).source == "answer")


def test_a_forked_child_answers_for_itself(start: Start) -> None:
    pid = start("\n    if not os.fork(): time.sleep(300)\n    os.wait()", RANK="1", WORLD_SIZE="2")
    until(lambda: proc.children().get(pid))
    until(lambda: [child.source for child in asked(pid).children] == ["signal"])
    process = asked(pid)

    (child,) = process.children
    assert [frame.line for frame in process.main] != [frame.line for frame in child.main]
    assert child.main[0].function == "hang"
    assert child.rank is None
    assert asking.root_of(pid) == os.getpid()
    assert asking.root_of(child.pid) == child.pid


def test_a_process_without_a_handler_survives_the_question() -> None:
    with subprocess.Popen(["sleep", "300"]) as process:
        answer = asked(process.pid)
        os.kill(process.pid, answering.SIGNAL)  # not even this ends it
        assert (answer.source, answer.state, answer.threads) == ("", "asleep", ())
        assert process.poll() is None
        process.kill()
    assert asked(process.pid).state == "ended"


def test_native_calls_are_read_with_py_spy(start: Start) -> None:
    pid = start("time.sleep(300)")
    process = asked(pid, native=True)

    functions = [frame.function for frame in process.native]
    assert functions.index("hang") > 0  # the kernel's and the interpreter's calls are above it


def test_the_time_limit_holds_for_processes_that_cant_answer(start: Start) -> None:
    pids = [start("while True: ctypes.PyDLL(None).sleep(300)") for _ in range(3)]
    began = time.monotonic()
    processes = list(asking.ask(pids, limit_s=0.0))

    assert sorted(process.pid for process in processes) == sorted(pids)
    assert time.monotonic() - began < 10


def test_a_program_that_handles_the_signal_itself_is_left_alone() -> None:
    code = (
        "import signal, sys; from footplate.core.stacks import answering\n"
        "signal.signal(signal.SIGURG, lambda *_: sys.exit(3)); answering.answer()\n"
        "signal.raise_signal(signal.SIGURG)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 3


def test_dumps_of_faulthandler_are_read() -> None:
    text = (
        'Thread 0x00007f (most recent call first):\n  File "/a b.py", line 3 in wait\n  File "c.py", line 4 in <module>\n\n'
        "Thread 0x00008f [feeds] (most recent call first):\n  <no Python frame>\n\n"
        'Current thread 0x00009f (most recent call first):\n  File "d.py", line 5 in main\n  ...\n'
    )
    assert from_faulthandler(text) == (
        Thread("thread 2", False, (Frame("wait", "/a b.py", 3), Frame("<module>", "c.py", 4))),
        Thread("feeds", False, ()),
        Thread("MainThread", True, (Frame("main", "d.py", 5),)),
    )
    assert from_faulthandler("") == ()


def test_letters_that_faulthandler_has_escaped_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "花 é 🌸.py"
    file.write_text(
        "import faulthandler, sys\ndef 読む():\n    faulthandler.dump_traceback(sys.stdout.fileno())\n読む()\n"
    )
    dump = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True).stdout
    assert from_faulthandler(dump)[0].frames == (Frame("読む", str(file), 3), Frame("<module>", str(file), 4))


@given(st.text())
def test_anything_else_is_no_dump(text: str) -> None:
    assert all(isinstance(thread, Thread) for thread in from_faulthandler(text))
    with contextlib.suppress(ValueError):
        assert from_py_spy(text) == ()


FRAMES = st.builds(Frame, st.text(max_size=9), st.text(max_size=9), st.integers(0, 999))
THREADS = st.builds(Thread, st.text(max_size=9), st.booleans(), st.lists(FRAMES, max_size=3).map(tuple))
COLLECTIVES = st.builds(Collective, st.text(max_size=5), st.text(max_size=5), st.integers(0, 9), st.floats(0, 99))


def processes(children: st.SearchStrategy[Process] | None = None) -> st.SearchStrategy[Process]:
    below = st.just(()) if children is None else st.lists(children, max_size=2).map(tuple)
    return st.builds(
        Process, st.integers(1, 99), st.text(max_size=5), threads=st.lists(THREADS, max_size=2).map(tuple),
        collectives=st.lists(COLLECTIVES, max_size=2).map(tuple), rank=st.none() | st.integers(0, 3), children=below,
    )  # fmt: skip


@given(processes(processes(processes())))
def test_snapshots_travel_as_plain_values_and_no_rank_is_lost(process: Process) -> None:
    assert Process.from_dict(process.to_dict()) == process
    ranks = ranks_of([process])
    assert ranks.keys() == {each.rank for each in process.tree() if each.rank is not None}
    rest = without_ranks(process)
    assert rest is None or all(each.rank is None for each in rest.tree())


def test_answering_for_a_while_leaves_no_thread_no_descriptor_and_no_handler_behind():
    def left() -> tuple[list[str], list[str], bool]:
        threads = sorted(thread.name for thread in threading.enumerate())
        return threads, sorted(map(str, Path("/proc/self/fd").iterdir())), proc.catches(os.getpid(), answering.SIGNAL)

    before = left()
    for _ in range(2):
        with answering.while_running(), answering.while_running():
            assert answering.THREAD in left()[0]
            assert proc.catches(os.getpid(), answering.SIGNAL)
        assert left() == before


def test_a_child_forked_in_the_meantime_ends_the_block_too():
    with answering.while_running():
        child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert answering.THREAD not in [thread.name for thread in threading.enumerate()]


# Requests

HANDLES = """
def reply(arguments):
    if "mistake" in arguments:
        raise ValueError(arguments["mistake"])
    return {"doubled": 2 * arguments["number"]}
answering.handlers["double"] = reply
(__import__("time")).sleep(300)
"""


def processes_of(pid: int) -> list[requests.Answering]:
    return requests.answering_processes([pid])


def test_a_request_gets_the_reply_of_its_handler(start: Start) -> None:
    pid = start(HANDLES.replace("\n", "\n    "), RANK="3", WORLD_SIZE="4")
    (process,) = processes_of(pid)
    assert (process.pid, process.rank) == (pid, 3)
    until_handled(process)
    assert requests.send(process, "nothing", {}, 30.0) is None
    assert requests.send(process, "double", {"mistake": "a {bad} one."}, 30.0) == {"error": "ValueError: a {bad} one."}


def until_handled(process: requests.Answering) -> None:
    """Wait until the process, which has begun to answer, has its handler."""
    while requests.send(process, "double", {"number": 1.5}, 30.0) != {"doubled": 3.0}:
        time.sleep(0.01)


def test_many_may_ask_at_once_for_replies_and_for_stacks(start: Start) -> None:
    pid = start(HANDLES.replace("\n", "\n    "))
    (process,) = processes_of(pid)
    until_handled(process)
    failures: list[object] = []

    def ask(number: int) -> None:
        for index in range(25):
            request = {"number": 100 * number + index, "filler": "." * 900}
            reply = requests.send(process, "double", request, 60.0)
            if reply != {"doubled": 2 * (100 * number + index)}:
                failures.append(reply)

    def look() -> None:
        for _ in range(10):
            answer = asked(pid)
            if answer.source != "answer" or answer.main[0].function != "hang":
                failures.append(answer)

    def noted(call: Callable[..., None], *arguments: int) -> None:
        try:
            call(*arguments)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=noted, args=(ask, number)) for number in range(4)]
    threads += [threading.Thread(target=noted, args=(look,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_late_request_reaches_no_file_that_has_the_number_of_the_pipe_by_now(tmp_path: Path) -> None:
    pid = os.getpid()
    with answering.while_running():
        (process,) = [process for process in processes_of(pid) if process.pid == pid]
        pipe = answering.Name.parse(process.name).pipe
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((tmp_path / str(number)).open("w")) for number in range(16)]
        assert pipe in [file.fileno() for file in files]
        with pytest.raises(requests.NoAnswer, match=f"process {pid} trains no more"):
            requests.send(process, "double", {"number": 1}, 1.0)
    assert {path.read_text() for path in tmp_path.iterdir()} == {""}


def test_a_request_to_a_process_that_is_stopped_or_gone_says_so(start: Start) -> None:
    pid = start(HANDLES.replace("\n", "\n    "))
    (process,) = processes_of(pid)
    os.kill(pid, signal.SIGSTOP)
    while (proc.state_of(pid) or ("",))[0] != "stopped":
        time.sleep(0.01)
    with pytest.raises(requests.NoAnswer, match=f"process {pid} did not answer in 0.3 s. See: footplate stacks {pid}"):
        requests.send(process, "double", {"number": 1}, 0.3)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(requests.NoAnswer, match=f"process {pid} has ended"):
        requests.send(process, "double", {"number": 1}, 30.0)


@given(st.lists(st.sampled_from([b"?", b'{"id": "a.?{}"}\n', b'{"id": 2}\n']), max_size=8), st.integers(1, 20))
def test_requests_are_found_however_they_are_cut(parts: list[bytes], size: int) -> None:
    data, questions, gathered, unread = b"".join(parts), b"", list[bytes](), b""
    for begin in range(0, len(data), size):
        asked, requested, unread = answering._split(unread + data[begin : begin + size])
        gathered += requested
        questions += asked
    assert questions == b"?" * parts.count(b"?")
    assert gathered == [part.rstrip() for part in parts if part.startswith(b"{")]
    assert unread == b""
