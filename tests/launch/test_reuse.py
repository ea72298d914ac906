"""Processes that outlast an attempt: after the loss of a rank, the other ranks are called again where they are.

Each function notes its process id in a file for each attempt and rank. A process was used again if its id comes twice.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from launched import gone
from process_placement import ProcessPlacement
from torch import distributed as dist

from footplate.core.stacks import answering
from footplate.distributed import group
from footplate.distributed.world import World
from footplate.launch import Restarts, launch, worker
from footplate.launch.backends import Cluster
from footplate.launch.worker import attempt


def rank() -> int:
    return int(os.environ["RANK"])


def clean_up() -> str:
    group.forget()
    return ""


def meet(directory: Path) -> None:
    """Begin a call: note this process, declare that it may be used again, and meet the other ranks."""
    (directory / f"{attempt()}-{rank()}").write_text(str(os.getpid()))
    worker.reusable(clean_up)
    group.join(World.from_environ(), "gloo", torch.device("cpu"))
    # A rank that still waits for another one's address wouldn't notice its end.
    dist.barrier()


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pids(directory: Path, of_rank: int) -> list[str]:
    """The process of a rank in each attempt."""
    files = sorted(directory.glob(f"*-{of_rank}"), key=lambda file: int(file.name.partition("-")[0]))
    return [file.read_text() for file in files]


PATIENT = Restarts(peers_grace_s=60, max_delay_s=0.1)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_replaced_and_the_others_keep_their_processes(victim, tmp_path):
    def work():
        meet(tmp_path)
        if attempt() == 0 and rank() == victim:
            end()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert launch(work, world_size=3, restarts=PATIENT) == 3
    for number in range(3):
        before, after = pids(tmp_path, number)
        assert (before != after) == (number == victim)


def test_on_several_machines_the_other_ranks_of_each_keep_their_processes(tmp_path):
    def work():
        meet(tmp_path)
        if attempt() == 0 and rank() == 1:
            end()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    backend = Cluster(ProcessPlacement(["a", "a", "b"]))
    assert launch(work, world_size=3, backend=backend, restarts=PATIENT) == 3
    assert [len(set(pids(tmp_path, number))) for number in range(3)] == [1, 2, 1]


def test_without_a_declaration_every_attempt_has_new_processes(tmp_path):
    def work():
        (tmp_path / f"{attempt()}-{rank()}").write_text(str(os.getpid()))
        dist.init_process_group("gloo")
        if attempt() == 0 and rank() == 1:
            end()
        dist.barrier()

    launch(work, world_size=2, restarts=PATIENT)
    before, after = pids(tmp_path, 0)
    assert before != after


def test_a_rank_that_raised_is_replaced_and_the_others_keep_their_processes(tmp_path):
    def work():
        meet(tmp_path)
        if attempt() == 0 and rank() == 1:
            raise OSError("the disk is gone")
        dist.barrier()

    launch(work, world_size=2, restarts=PATIENT)
    assert len(set(pids(tmp_path, 0))) == 1
    assert len(set(pids(tmp_path, 1))) == 2


def test_two_kills_leave_the_third_rank_in_its_process(tmp_path):
    def work():
        meet(tmp_path)
        worker.progressed()
        if attempt() < 2 and rank() == attempt():
            end()
        dist.barrier()
        return attempt()

    assert launch(work, world_size=3, restarts=PATIENT) == 2
    assert [len(set(pids(tmp_path, number))) for number in range(3)] == [2, 2, 1]


def test_a_kept_process_that_makes_no_progress_is_replaced(tmp_path):
    def work():
        meet(tmp_path)
        if attempt() < 2 and rank() == 1:
            end()
        dist.barrier()
        return attempt()

    assert launch(work, world_size=2, restarts=PATIENT) == 2
    first, second, third = pids(tmp_path, 0)
    assert first == second != third


def test_a_kill_while_the_ranks_meet_again_replaces_the_rank_that_waits_for_it(tmp_path):
    def work():
        if rank() == 1 and attempt() == 1:
            while not (tmp_path / "1-0").exists():
                time.sleep(0.01)
            end()
        meet(tmp_path)
        if rank() == 1 and attempt() == 0:
            end()
        dist.barrier()
        return attempt()

    assert launch(work, world_size=2, restarts=Restarts(peers_grace_s=1, max_delay_s=0.1)) == 2
    assert len(set(pids(tmp_path, 0))) == 2


def test_a_survivor_may_get_another_rank_of_a_smaller_world(tmp_path):
    def work():
        meet(tmp_path)
        (tmp_path / f"said-{attempt()}-{os.getpid()}").write_text(f"{rank()} of {dist.get_world_size()}")
        if os.environ["FOOTPLATE_SLOT"] == "0":
            end()
        total = torch.ones(1)
        dist.all_reduce(total)
        (answer,) = [name for name in _files_of_this_process() if answering.ANSWER in name]
        return total.item(), answer.partition(" ")[0].rpartition("-")[2]

    restarts = Restarts(peers_grace_s=60, max_delay_s=0.1, min_world_size=2, drop_after=1)
    assert launch(work, world_size=3, restarts=restarts) == (2, "2")
    for number in (1, 2):
        pid = (tmp_path / f"0-{number}").read_text()
        assert (tmp_path / f"said-0-{pid}").read_text() == f"{number} of 3"
        assert (tmp_path / f"said-1-{pid}").read_text() == f"{number - 1} of 2"


def _files_of_this_process() -> list[str]:
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(descriptor.readlink()))
    return names


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def leaves_a_process() -> None:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])


def replaces_a_function() -> None:
    (Path.cwd() / "patching.py").write_text("import json\njson.detect_encoding = lambda text: None\n")
    sys.path.insert(0, str(Path.cwd()))
    import patching  # noqa: F401  # pyright: ignore[reportMissingImports]


def raises_its_own_error() -> None:
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    raise ValueError("after the barrier")


def sleeps() -> None:
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    time.sleep(600)


@pytest.mark.parametrize(
    ("act", "restarts"),
    [
        (leaves_a_thread, PATIENT),
        (leaves_a_process, PATIENT),
        (replaces_a_function, PATIENT),
        (raises_its_own_error, Restarts(peers_grace_s=1, max_delay_s=0.1)),
        (sleeps, Restarts(peers_grace_s=1, max_delay_s=0.1)),
    ],
)
def test_a_survivor_in_doubt_is_replaced(act, restarts, tmp_path, monkeypatch):
    """Something of its call remains, or it doesn't leave the call because of the loss."""
    monkeypatch.chdir(tmp_path)

    def work():
        meet(tmp_path)
        if attempt() == 0 and rank() == 1:
            end()
        if attempt() == 0:
            act()
        dist.barrier()

    launch(work, world_size=2, restarts=restarts)
    assert len(set(pids(tmp_path, 0))) == 2


def test_a_second_call_finds_the_process_as_the_first_one_did(tmp_path):
    (tmp_path / "counting.py").write_text("calls = 0\n")

    def look() -> dict[str, object]:
        import counting  # pyright: ignore[reportMissingImports]

        counting.calls += 1
        return {
            "calls": counting.calls,
            "variable": os.environ.get("OF_THE_CALL"),
            "directory": str(Path.cwd()),
            "arguments": list(sys.argv),
            "handler": signal.getsignal(signal.SIGUSR1),
            "handlers of the log": len(logging.getLogger("of the call").handlers),
            "streams": (sys.stdout is sys.__stdout__, sys.stdout.fileno()),
            "collector": gc.isenabled(),
            "umask": os.umask(0o22),
        }

    def work():
        sys.path.insert(0, str(tmp_path))
        seen = look()
        meet(tmp_path)
        if attempt() == 0 and rank() == 1:
            end()
        if attempt() == 0:
            (tmp_path / "first").write_text(repr(seen))
            os.environ["OF_THE_CALL"] = "set"
            os.chdir("/")
            sys.argv.append("more")
            signal.signal(signal.SIGUSR1, lambda *_: None)
            logging.getLogger("of the call").addHandler(logging.NullHandler())
            sys.stdout = io.StringIO()
            gc.disable()
            os.umask(0o77)
        dist.barrier()
        return repr(seen)

    assert launch(work, world_size=2, restarts=PATIENT) == (tmp_path / "first").read_text()
    assert len(set(pids(tmp_path, 0))) == 1


def test_output_of_a_kept_process_goes_to_the_files_of_its_attempt(tmp_path):
    def work():
        print(f"attempt {attempt()} of {os.getpid()}")
        meet(tmp_path)
        if attempt() == 0 and rank() == 1:
            end()
        dist.barrier()
        print("the end", file=sys.stderr)

    launch(work, world_size=2, restarts=PATIENT, log_dir=tmp_path / "logs")
    (pid,) = set(pids(tmp_path, 0))
    first, second = [(tmp_path / "logs" / f"attempt-{n}" / "rank-0.log").read_text() for n in (0, 1)]
    assert f"attempt 0 of {pid}" in first
    assert "attempt 1" not in first
    assert second.splitlines() == [f"attempt 1 of {pid}", "the end"]


class _At(logging.Handler):
    """Calls a function when the supervisor says something."""

    def __init__(self, words: str, act) -> None:
        super().__init__()
        self._words, self._act = words, act

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self._act()


@contextlib.contextmanager
def at(words: str, act):
    handler, logger = _At(words, act), logging.getLogger("footplate.launch.supervisor")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def fails_once(directory: Path):
    def work():
        meet(directory)
        if attempt() == 0 and rank() == 1:
            end()
        dist.barrier()
        return attempt()

    return work


def test_a_process_that_is_killed_between_two_attempts_is_replaced(tmp_path):
    def kill():
        process = psutil.Process(int((tmp_path / "0-0").read_text()))
        process.kill()
        assert gone([process])

    with at("attempt 1 starts now", kill):
        # The process may be given to attempt 1 while its last thread still ends. Then that attempt fails, too.
        assert launch(fails_once(tmp_path), world_size=2, restarts=Restarts(peers_grace_s=10)) in (1, 2)
    assert pids(tmp_path, 0)[-1] != (tmp_path / "0-0").read_text()


def test_sigterm_between_two_attempts_ends_the_launch_and_all_processes(tmp_path):
    with at("attempt 1 starts now", lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit) as ended:
        launch(fails_once(tmp_path), world_size=2, restarts=PATIENT)
    assert ended.value.code == 143


def test_exit_handlers_of_a_process_that_is_not_needed_any_more_run(tmp_path):
    def work():
        import atexit

        meet(tmp_path)
        if rank() == 1:
            end()
        atexit.register((tmp_path / "ended").touch)
        dist.barrier()

    with pytest.raises(Exception, match="killed by SIGKILL"):
        launch(work, world_size=2, restarts=Restarts(max_restarts=0, peers_grace_s=60))
    assert (tmp_path / "ended").exists()
