"""The pool of fork servers: reuse, the environment of workers, and the end of a fork server.

Most fork servers preload nothing. They start at once, and what they preload makes no difference here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from launched import gone, pooled_pids
from torch import distributed as dist

from footplate.launch import fork_server_pool, launch


@pytest.fixture(autouse=True)
def none_before():
    fork_server_pool.end_all()


def fork_server() -> int:
    """Launch a worker. Return the process that it was forked from."""
    return launch(os.getppid, world_size=1, preload=())


def test_the_second_launch_uses_the_fork_server_of_the_first():
    first = fork_server()
    assert pooled_pids() == [first]
    assert fork_server() == first


def test_from_the_second_launch_on_the_ranks_meet_in_well_under_a_second():
    def work(began):
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        return time.monotonic() - began

    launch(work, 0.0, world_size=2)
    assert any(launch(work, time.monotonic(), world_size=2) < 1.0 for _ in range(10))  # the machine may be busy


def test_workers_have_exactly_the_environment_of_their_call(monkeypatch):
    monkeypatch.setenv("OF_THE_FIRST", "1")
    first = launch(lambda: (os.getppid(), dict(os.environ)), world_size=1, env={"GIVEN": "1"}, preload=())
    monkeypatch.delenv("OF_THE_FIRST")
    monkeypatch.setenv("OF_THE_SECOND", "2")
    second = launch(lambda: (os.getppid(), dict(os.environ)), world_size=1, preload=())
    assert first[0] == second[0]
    assert {"OF_THE_FIRST", "GIVEN"} <= first[1].keys() - second[1].keys()
    assert {name for name in os.environ if second[1].get(name) != os.environ[name]} == set()


def test_workers_are_in_the_directory_of_their_call(tmp_path, monkeypatch):
    fork_server()
    monkeypatch.chdir(tmp_path)
    assert launch(Path.cwd, world_size=1, preload=()) == tmp_path


@pytest.mark.slow
def test_settings_that_imports_read_need_another_fork_server(tmp_path, monkeypatch):
    first = fork_server()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    second = fork_server()
    monkeypatch.syspath_prepend(tmp_path)
    third = fork_server()
    assert len({first, second, third}) == 3
    assert pooled_pids() == [second, third]  # the oldest was ended
    assert not psutil.pid_exists(first)


def test_after_a_failure_it_is_used_again(quick):
    def work():
        if os.environ["FOOTPLATE_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getppid()

    first = fork_server()
    assert launch(work, world_size=2, restarts=quick, preload=()) == first
    assert fork_server() == first


def test_a_dead_fork_server_is_replaced_silently(said):
    first = fork_server()
    psutil.Process(first).kill()
    assert gone([psutil.Process(first)])
    assert fork_server() != first
    assert not said.records


@pytest.mark.slow
def test_an_idle_fork_server_ends(monkeypatch):
    first = fork_server()
    assert fork_server() == first
    fork_server_pool._pool[0].pooled_at -= fork_server_pool.IDLE_S - fork_server_pool.MARGIN_S
    second = fork_server()  # the first might end at any time now
    assert second != first
    monkeypatch.setattr(fork_server_pool, "IDLE_S", 0.3)
    third = fork_server()
    assert gone([psutil.Process(third)])


def test_launches_at_the_same_time_have_each_their_own():
    both = threading.Barrier(2, timeout=60)
    parents = []

    def launch_one():
        both.wait()
        parents.append(launch(lambda: (time.sleep(0.5), os.getppid())[1], world_size=1, preload=()))

    threads = [threading.Thread(target=launch_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(parents)) == 2


def test_a_fork_server_that_ends_with_its_thread_is_not_used_by_another_thread(said):
    servers = []
    thread = threading.Thread(target=lambda: servers.append(fork_server()))
    thread.start()
    thread.join()
    assert fork_server() not in servers
    assert not said.records


def test_it_ends_with_the_process(program):
    script = program("""
import os
from footplate.launch import launch
print("fork server", launch(os.getppid, world_size=1, preload=()), flush=True)
""")
    number = int(script.read_until("fork server").split()[-1])
    assert script.end() == (0, "")
    assert not psutil.pid_exists(number)


def test_it_ends_with_a_process_that_is_killed(program):
    script = program("""
import os, time
from footplate.launch import launch
print("fork server", launch(os.getppid, world_size=1, preload=()), flush=True)
time.sleep(60)
""")
    script.read_until("fork server")
    family = script.family()
    assert len(family) == 1
    script.process.kill()
    assert gone(family)


@pytest.mark.slow
def test_a_forked_process_has_its_own_fork_servers(program):
    script = program("""
import os
from footplate.launch import launch
first = launch(os.getppid, world_size=1, preload=())
if os.fork() == 0:
    print("other" if launch(os.getppid, world_size=1, preload=()) != first else "shared", flush=True)
    raise SystemExit
os.wait()
print("mine" if launch(os.getppid, world_size=1, preload=()) == first else "lost", flush=True)
""")
    assert script.end() == (0, "other\nmine\n")
