"""Ranks that are killed, frozen, raise or exit: detected, classified, and restarted."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil
import pytest
import torch
from launched import gone
from torch import distributed as dist

from footplate.cli.run import _last_words
from footplate.core.errors import ConfigError, DataError, FootplateError, LaunchError
from footplate.distributed.group import join
from footplate.distributed.world import World
from footplate.launch import Restarts, fork_server_pool, launch, local
from footplate.launch.worker import attempt, progressed, slot


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("victim", [0, 1])
def test_after_kill_9_all_ranks_are_started_again_with_a_rendezvous_of_their_own(victim, quick, said):
    def work():
        dist.init_process_group("gloo")
        if attempt() == 0 and rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return attempt(), os.environ["MASTER_PORT"]

    again, port = launch(work, world_size=2, restarts=quick)
    assert again == 1
    line = f"launch: rank {victim} was killed by SIGKILL in attempt 0; attempt 1 starts now (restart 1 of 3)"
    assert [record.message for record in said.records] == [line]
    assert int(port) > 0


def test_a_rank_that_dies_while_the_ranks_meet_is_no_mistake_of_the_user(quick, said, tmp_path):
    meets = tmp_path / "meets"

    def work():
        if attempt() == 0 and rank() == 0:  # rank 0 has the store
            while not meets.exists():
                time.sleep(0.01)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        meets.touch()
        join(World.from_environ(), "gloo", torch.device("cpu"))
        return attempt()

    assert launch(work, world_size=2, restarts=quick) == 1
    assert "launch: rank 0 was killed by SIGKILL in attempt 0" in said.text


@pytest.mark.slow
def test_ten_kills_are_all_recovered_from():
    def work():
        dist.init_process_group("gloo")
        total = torch.ones(1)
        for step in range(3):
            dist.all_reduce(total)
            if attempt() < 10 and step == 1 and rank() == attempt() % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            progressed()
        return attempt(), total.item()

    assert launch(work, world_size=2, restarts=Restarts(max_restarts=10)) == (10, 8.0)


def test_a_restart_costs_a_fork_not_an_import(tmp_path):
    def work():
        if attempt() == 0:
            (tmp_path / "forked by").write_text(str(os.getppid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getppid()

    assert launch(work, world_size=1) == int((tmp_path / "forked by").read_text())


def test_an_exception_comes_home_as_it_was_with_the_workers_traceback():
    class OwnError(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code

        def __reduce__(self):
            return OwnError, (self.code,)

    def innermost():
        raise OwnError(7)

    def work():
        dist.init_process_group("gloo")
        if rank() == 1:
            innermost()
        dist.barrier()

    with pytest.raises(OwnError) as raised:
        launch(work, world_size=2, restarts=Restarts(max_restarts=0))
    assert raised.value.code == 7
    (note,) = raised.value.__notes__
    assert note.startswith("Raised by rank 1 in attempt 0 (max_restarts=0):")
    assert "in innermost" in note


@pytest.mark.slow
def test_an_exception_after_a_hang_is_shown_with_the_hang(tmp_path):
    """`footplate run` prints the last note of the exception. So the hang must not take the exception's place."""
    hangs = tmp_path / "hangs"

    def work():
        progressed()
        while not hangs.exists() or not list(hangs.iterdir()):
            time.sleep(0.05)
        raise OSError("the bucket can't be reached")

    with pytest.raises(OSError, match="the bucket") as raised:
        launch(work, world_size=1, restarts=Restarts(max_restarts=0), hangs_dir=hangs, stall_s=1.0)
    words = _last_words(raised.value)
    assert "OSError: the bucket can't be reached" in words
    assert f"All stacks: {hangs}" in words


def test_an_exception_that_cannot_be_pickled_comes_home_as_text():
    class Stubborn(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    def work():
        raise Stubborn("no way", 2)

    with pytest.raises(LaunchError, match=r"(?s)rank 0 raised Stubborn: no way in attempt 0.*Traceback.*in work"):
        launch(work, world_size=1, restarts=Restarts(max_restarts=0))


def test_exceptions_are_tried_again_until_no_restart_is_left(quick, said):
    def work():
        raise ValueError(f"in attempt {attempt()}")

    with pytest.raises(ValueError, match="in attempt 3") as raised:
        launch(work, world_size=1, restarts=quick)
    assert "(max_restarts=3 is used up)" in raised.value.__notes__[0]
    lines = [record.message for record in said.records if record.levelname == "WARNING"]
    assert [line.partition("; ")[2] for line in lines] == [
        "attempt 1 starts now (restart 1 of 3)",
        "attempt 2 starts in 0.1 s (restart 2 of 3)",
        "attempt 3 starts in 0.1 s (restart 3 of 3)",
    ]


def test_the_same_exception_again_is_the_codes_fault_and_ends_it(quick_but_patient, said, tmp_path):
    def work():
        (tmp_path / f"{attempt()}-{rank()}").touch()
        raise TypeError("unsupported operand")

    with pytest.raises(TypeError, match="unsupported operand") as raised:
        launch(work, world_size=2, restarts=quick_but_patient)
    (note,) = raised.value.__notes__
    assert "in attempt 1 (as in the attempt before it, with no progress in between: the code is at fault" in note
    assert "in work" in note
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    (line,) = [record.message for record in said.records if record.levelname == "WARNING"]
    assert line.endswith("attempt 1 starts now (restart 1 of 3)")


def test_the_same_exception_after_progress_or_of_what_is_outside_is_tried_again(quick):
    def advances():
        progressed()
        if attempt() < 3:
            raise TypeError("at some step")
        return attempt()

    def waits():
        if attempt() < 3:
            raise ConnectionRefusedError("the table's server")
        return attempt()

    assert launch(advances, world_size=1, restarts=quick) == 3
    assert launch(waits, world_size=1, restarts=quick) == 3


def test_the_cause_is_reported_not_the_connections_that_it_broke(quick):
    def work():
        dist.init_process_group("gloo")
        if rank() == 2:
            raise ZeroDivisionError("the cause")
        dist.barrier()

    with pytest.raises(ZeroDivisionError, match="the cause"):
        launch(work, world_size=3, restarts=Restarts(max_restarts=0))


def test_a_mistake_of_the_user_is_not_tried_again_and_nobody_is_waited_for():
    def work():
        if rank() == 1:
            raise DataError(f"no such column, said in attempt {attempt()}")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(DataError, match="said in attempt 0"):
        launch(work, world_size=2)
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os._exit(3), "rank 0 ended with exit code 3"),
        (lambda: sys.exit(4), "rank 0 ended with exit code 4"),
        (lambda: sys.exit("a message"), "rank 0 ended with exit code 1"),
        (lambda: os._exit(0), "rank 0 ended with exit code 0 before its function had returned"),
        (os.abort, "rank 0 was killed by SIGABRT"),
    ],
)
def test_an_end_without_a_result_is_a_failure_that_says_how(end, text):
    with pytest.raises(LaunchError, match=text):
        launch(end, world_size=1, restarts=Restarts(max_restarts=0))


def test_a_frozen_rank_is_found_and_killed(quick, said):
    def work():
        if attempt() == 0 and rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return attempt()

    assert launch(work, world_size=2, restarts=quick, heartbeat_timeout_s=2) == 1
    assert "rank 1 gave no sign of life for 2 s" in said.text


def test_a_rank_frozen_before_it_said_anything_is_found_too(quick, said, tmp_path, monkeypatch):
    marker = tmp_path / "frozen"
    (tmp_path / "freezes_one.py").write_text(f"""
import os, pathlib, signal
def freeze():
    if not pathlib.Path({str(marker)!r}).exists():
        pathlib.Path({str(marker)!r}).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
os.register_at_fork(after_in_child=freeze)
""")
    monkeypatch.syspath_prepend(tmp_path)
    assert launch(attempt, world_size=1, restarts=quick, preload=("freezes_one",), heartbeat_timeout_s=2) == 1
    assert "rank 0 gave no sign of life for 2 s" in said.text


def test_a_rank_that_never_gives_up_the_lock_is_found_and_killed(quick, said):
    def work():
        if attempt() == 0:
            import re

            re.match(r"(a+)+$", "a" * 60 + "b")  # years, in C, without letting another thread run
        return attempt()

    assert launch(work, world_size=1, restarts=quick, heartbeat_timeout_s=2) == 1
    assert "gave no sign of life" in said.text


def test_a_rank_that_is_busy_for_long_is_not_frozen():
    def work():
        until = time.monotonic() + 3
        while time.monotonic() < until:
            pass
        return attempt()

    assert launch(work, world_size=2, heartbeat_timeout_s=2) == 0


def test_peers_that_do_not_notice_are_killed_after_their_grace(quick):
    def work():
        if attempt() == 0:
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return attempt()

    began = time.monotonic()
    assert launch(work, world_size=2, restarts=quick) == 1
    assert time.monotonic() - began < 40


def test_what_a_worker_has_started_ends_with_it(tmp_path, quick):
    def work():
        import subprocess

        if attempt() == 0:
            (tmp_path / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
            os.kill(os.getpid(), signal.SIGKILL)

    launch(work, world_size=1, restarts=quick)
    child = int((tmp_path / "child").read_text())
    assert gone([process for process in psutil.process_iter() if process.pid == child])


def test_a_killed_fork_server_is_replaced_and_counts_against_the_hosts_budget(said):
    def work():
        if attempt() == 0 and rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return attempt()

    assert launch(work, world_size=2, restarts=Restarts(max_restarts=0), preload=()) == 1
    (line,) = [record.message for record in said.records]
    assert "all ranks were lost with the process that starts them, which was killed by SIGKILL in attempt 0" in line
    assert "(restart 1 of 10)" in line


@pytest.mark.slow
def test_a_fork_server_that_does_not_kill_a_worker_is_killed(quick, said, monkeypatch):
    monkeypatch.setattr(local, "KILL_S", 1.0)

    def work():
        if attempt() == 0:
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        return attempt()

    assert launch(work, world_size=1, restarts=quick, heartbeat_timeout_s=2, preload=()) == 1
    assert "rank 0 gave no sign of life" in said.text


def test_the_hosts_budget_ends_too():
    def work():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(LaunchError, match=r"all ranks were lost.*max_host_restarts=0"):
        launch(work, world_size=1, restarts=Restarts(max_host_restarts=0), preload=())


def test_a_rank_that_fails_again_and_again_is_left_out(quick, said):
    def work():
        dist.init_process_group("gloo")
        if slot() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        places = [None] * dist.get_world_size()
        dist.all_gather_object(places, (rank(), slot(), os.environ["LOCAL_RANK"]))
        return places

    restarts = Restarts(max_restarts=2, min_world_size=2, max_delay_s=0.1, peers_grace_s=0.3)
    assert launch(work, world_size=3, restarts=restarts) == [(0, 0, "0"), (1, 2, "1")]
    assert "without slot 1 (with 2 of 3 ranks)" in said.text


def test_a_rank_that_has_made_progress_is_not_left_out(quick):
    def work():
        progressed()
        if attempt() < 3 and slot() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.environ["WORLD_SIZE"]

    restarts = Restarts(max_restarts=3, min_world_size=1, peers_grace_s=0.3)
    assert launch(work, world_size=2, restarts=restarts) == "2"


def test_workers_that_cannot_be_started_are_left_out_down_to_the_smallest_world(monkeypatch, said):
    # The fork server can open no more files, so it can't receive a worker's pipes.
    start = fork_server_pool.start

    def start_and_limit(*args):
        server = start(*args)
        psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE, (8, 8))
        return server

    monkeypatch.setattr(fork_server_pool, "take", lambda key: None)
    monkeypatch.setattr(fork_server_pool, "start", start_and_limit)
    with pytest.raises(LaunchError, match="rank 0 could not be started: too many open files"):
        launch(print, world_size=2, restarts=Restarts(max_host_restarts=0, min_world_size=1, max_delay_s=0), preload=())
    assert "without slot 0 (with 1 of 2 ranks)" in said.text


@pytest.mark.parametrize("fewest", [0, 3])
def test_an_impossible_smallest_world_is_refused(fewest):
    with pytest.raises(ConfigError, match=f"min_world_size={fewest}"):
        launch(print, world_size=2, restarts=Restarts(min_world_size=fewest))


def test_a_worker_that_does_not_end_after_returning_is_killed(said):
    def work():
        threading.Thread(target=time.sleep, args=(60,)).start()
        return "the result"

    assert launch(work, world_size=1, grace_s=0.3) == "the result"
    assert "rank 0 has returned but not ended" in said.text


def test_launch_error_is_one_that_a_command_line_shows_without_a_traceback():
    assert issubclass(LaunchError, FootplateError)
