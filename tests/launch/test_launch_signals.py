"""The supervisor killed, suspended, or told to end: programs of their own, and the end of their workers.

No worker uses torch, so the launches preload nothing.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from launched import gone

from footplate.launch import Restarts, launch

SLEEPING = """
import os, signal, subprocess, sys, time
from footplate.launch import launch, Restarts
def work():
    child = subprocess.Popen(["sleep", "60"])
    print("there", os.environ["RANK"], flush=True)
    time.sleep(60)
launch(work, world_size=2, restarts=Restarts(max_restarts=0), grace_s=GRACE, preload=())
"""


def test_when_the_supervisor_is_killed_everything_goes_with_it(program):
    script = program(SLEEPING.replace("GRACE", "30"))
    script.read_until("there 0", "there 1")
    family = script.family()
    assert len(family) == 5  # the fork server, two workers, and their children
    script.process.kill()
    assert gone(family)


def test_when_the_supervisor_is_killed_early_the_fork_server_ends_too(program):
    script = program(SLEEPING.replace("GRACE", "30"))
    while not (family := script.family()):
        time.sleep(0.01)
    script.process.kill()
    assert gone(family)


def test_when_supervisor_and_fork_server_are_killed_at_once_the_workers_end_too(program):
    script = program(SLEEPING.replace("GRACE", "30"))
    script.read_until("there 0", "there 1")
    fork_server, *rest = script.family()
    workers = [process for process in rest if process.name() != "sleep"]
    fork_server.suspend()  # so it doesn't end by itself first
    script.process.kill()
    fork_server.kill()
    assert gone([fork_server, *workers])


def test_workers_that_the_kernel_does_not_tell_notice_the_end_by_themselves(program):
    script = program(SLEEPING.replace("GRACE", "30"))
    script.read_until("there 0", "there 1")
    fork_server, *rest = script.family()
    fork_server.suspend()  # so it neither dies nor kills
    script.process.kill()
    assert gone(rest)
    fork_server.kill()


def test_sigterm_is_passed_on_and_ends_with_143(program):
    script = program("""
import os, signal, time
from footplate.launch import launch
def work():
    def save(*_):
        os.write(1, f"saved by {os.environ['RANK']}\\n".encode())
        raise SystemExit(143)
    signal.signal(signal.SIGTERM, save)
    print("there", os.environ["RANK"], flush=True)
    time.sleep(60)
launch(work, world_size=2, preload=())
""")
    script.read_until("there 0", "there 1")
    family = script.family()
    script.process.terminate()
    code, rest = script.end()
    assert code == 143
    assert {"[rank 0] saved by 0", "[rank 1] saved by 1"} <= set(rest.splitlines())
    assert gone(family)


def test_workers_that_ignore_sigterm_have_their_grace_and_no_more(program):
    script = program(
        SLEEPING.replace("GRACE", "0.5").replace("child =", "signal.signal(signal.SIGTERM, signal.SIG_IGN);")
    )
    script.read_until("there 0", "there 1")
    began = time.monotonic()
    script.process.terminate()
    assert script.end()[0] == 143
    assert 0.5 <= time.monotonic() - began < 30


def test_ctrl_c_is_passed_on_and_ends_with_keyboard_interrupt(program):
    script = program("""
import os, time
from footplate.launch import launch
def work():
    try:
        print("there", os.environ["RANK"], flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        os.write(1, f"saved by {os.environ['RANK']}\\n".encode())
        raise
try:
    launch(work, world_size=2, preload=())
except KeyboardInterrupt:
    print("interrupted")
""")
    script.read_until("there 0", "there 1")
    script.process.send_signal(signal.SIGINT)
    code, rest = script.end()
    assert code == 0
    assert sorted(rest.splitlines()) == ["[rank 0] saved by 0", "[rank 1] saved by 1", "interrupted"]


def test_a_second_ctrl_c_kills_at_once(program):
    script = program("""
import os, signal, time
from footplate.launch import launch
def work():
    signal.signal(signal.SIGINT, lambda *_: os.write(1, f"saving {os.environ['RANK']}\\n".encode()))
    print("there", os.environ["RANK"], flush=True)
    while True:
        time.sleep(60)
try:
    launch(work, world_size=2, preload=())
except KeyboardInterrupt:
    print("interrupted")
""")
    script.read_until("there 0", "there 1")
    script.process.send_signal(signal.SIGINT)
    script.read_until("saving 0", "saving 1")
    began = time.monotonic()
    script.process.send_signal(signal.SIGINT)
    assert script.end() == (0, "interrupted\n")
    assert time.monotonic() - began < 30


def test_a_signal_in_the_pause_before_an_attempt_ends_it(program):
    script = program("""
import os
from footplate.launch import launch, Restarts
def work():
    os._exit(1)
launch(work, world_size=1, restarts=Restarts(max_restarts=9), preload=())
""")
    script.read_until("attempt 2 starts in 1 s", "attempt 3 starts in 2 s")
    script.process.terminate()
    assert script.end()[0] == 143


def test_the_callers_handlers_are_back_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    launch(print, world_size=1, preload=())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("end", [lambda: os._exit(143), lambda: exit(143)])
def test_ranks_that_all_end_with_143_are_not_started_again(end, said):
    with pytest.raises(SystemExit) as raised:
        launch(end, world_size=2, preload=())
    assert raised.value.code == 143
    assert not said.records


def test_ranks_that_all_were_interrupted_are_not_started_again(said):
    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(work, world_size=2, preload=())
    assert not said.records


def test_a_rank_that_fails_beside_one_that_was_told_to_end_is_a_failure(quick_but_patient):
    def work():
        if os.environ["FOOTPLATE_ATTEMPT"] == "1":
            return "again"
        raise SystemExit(143) if os.environ["RANK"] == "0" else ValueError

    assert launch(work, world_size=2, restarts=quick_but_patient, preload=()) == "again"


def test_sigterm_to_a_single_rank_that_does_not_handle_it_is_a_failure():
    def work():
        if os.environ["FOOTPLATE_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return os.environ["FOOTPLATE_ATTEMPT"]

    restarts = Restarts(max_restarts=1, peers_grace_s=0.3)
    assert launch(work, world_size=2, restarts=restarts, preload=()) == "1"


@pytest.mark.slow
def test_a_suspended_supervisor_does_not_take_its_ranks_for_frozen(program):
    script = program("""
import os, time
from footplate.launch import launch, Restarts
def work():
    print("there", os.environ["RANK"], flush=True)
    time.sleep(4.5)
    return "unharmed in attempt " + os.environ["FOOTPLATE_ATTEMPT"]
print(launch(work, world_size=2, heartbeat_timeout_s=2, preload=()))
""")
    script.read_until("there 0", "there 1")
    script.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    script.process.send_signal(signal.SIGCONT)
    assert script.end() == (0, "unharmed in attempt 0\n")
