"""Launches that ask for Ray without a cluster. They have a file of their own, because Ray finds any running cluster."""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from launched import gone
from ray_nodes import LIGHT, PROGRAM

import footplate as fp
from footplate.launch.cluster.ray import RayPlacement

LOSES_ITS_HEAD = """
import os, psutil, ray, sys, time
from footplate.core.errors import LaunchError
from footplate.launch.cluster import ray as placements
from footplate.launch.cluster.agent import AgentCall

placements.HEAD_S = 2.0
placement = placements.RayPlacement()
call = AgentCall("127.0.0.1", 1, b"")
placement.start(range(1), call)
while not placement.lost():  # its agent finds no driver
    time.sleep(0.1)
(head,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"]
address = ray.get_runtime_context().gcs_address
head.suspend()
while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in head.threads()):
    time.sleep(0.01)
began = time.monotonic()
placement.close()
try:
    placement.start(range(1), call)
except LaunchError:
    sys.excepthook(*sys.exc_info())
print(address, time.monotonic() - began, flush=True)
for one in psutil.Process().children(recursive=True):
    one.kill()
os._exit(0)
"""
CONNECT = """
from footplate.launch.cluster.ray import RayPlacement
RayPlacement(address="{address}")
"""
DIES = """
import os, psutil, ray, time
from footplate.core.errors import LaunchError
from footplate.launch.cluster.ray import RayPlacement

took = []
def refused(address=None):
    began = time.monotonic()
    try:
        RayPlacement(address)
        print("not refused")
    except LaunchError as error:
        print(error)
    took.append(time.monotonic() - began)

RayPlacement()
address = ray.get_runtime_context().gcs_address
(head,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"]
head.suspend()
while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in head.threads()):
    time.sleep(0.01)  # on a busy machine its other threads still answer for a moment
refused()
head.kill()
head.wait()
refused()
ray.is_initialized = lambda: False  # as in another process of this machine
refused()  # what has been its own is still found by what is left of it
refused(address)
print(max(took), flush=True)
for one in psutil.Process().children(recursive=True):
    one.kill()
os._exit(0)
"""
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def shares_our_network(process: psutil.Process) -> bool:
    """Return False for a process on a machine of a lab, whose Ray can't be found from here."""
    try:
        return Path(f"/proc/{process.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:  # ended meanwhile
        return False


@pytest.fixture(autouse=True)
def no_other_ray() -> None:
    """Wait until no cluster of another test runs: Ray would find and use it."""
    heads = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]
    assert gone([head for head in heads if shares_our_network(head)])


@pytest.fixture(autouse=True)
def light_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIGHT.items():
        monkeypatch.setenv(f"RAY_{name}", str(int(value)))


def test_without_a_cluster_one_is_started_here_and_ends_with_the_program(program, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:  # short: sockets are in it
        monkeypatch.setenv("RAY_TMPDIR", place)  # where no cluster's address is found
        code, said = program(PROGRAM).end(within_s=120)
        assert code == 0, said
        assert sorted(said.splitlines()) == ["[rank 0] hello", "[rank 1] hello", "result 2"]
        of_it = [
            process for process in psutil.process_iter(["cmdline"]) if place in " ".join(process.info["cmdline"] or [])
        ]
        assert gone(of_it)


def test_an_address_without_a_cluster_is_said_so(program):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, said = program(CONNECT.format(address=f"127.0.0.1:{port}")).end(within_s=120)
    assert code == 1
    assert f'LaunchError: No Ray cluster can be used at "127.0.0.1:{port}"' in said


def test_an_address_where_nobody_answers_is_said_so_in_time(program):
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system accepts connections, nobody reads them
        port = server.getsockname()[1]
        began = time.monotonic()
        code, said = program(CONNECT.format(address=f"127.0.0.1:{port}")).end(within_s=120)
    assert code == 1
    assert f'No Ray cluster can be used at "127.0.0.1:{port}": what listens there has sent nothing for 5 s' in said
    assert time.monotonic() - began < 60


def test_an_address_of_something_else_is_said_so(program):
    def answer() -> None:
        with server, server.accept()[0] as connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    answering = threading.Thread(target=answer)
    answering.start()
    code, said = program(CONNECT.format(address=f"127.0.0.1:{port}")).end(within_s=120)
    answering.join()
    assert code == 1
    assert f'No Ray cluster can be used at "127.0.0.1:{port}": what listens there is not Ray' in said


def test_a_ray_that_has_died_is_said_so_in_time(program, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        monkeypatch.setenv("RAY_TMPDIR", place)
        code, said = program(DIES).end(within_s=180)
    assert code == 0, said
    *refusals, slowest = said.splitlines()
    assert len(refusals) == 4, said
    of_the_connected = "to which this process is connected, doesn't answer any more: "
    assert [of_the_connected in line for line in refusals] == [True, True, False, False]
    assert "has sent nothing for 5 s" in refusals[0]
    assert all("Connection refused" in line for line in refusals[1:])
    assert all('No Ray cluster can be used at "' in line for line in refusals[2:])
    assert float(slowest) < 40


def test_a_head_that_is_lost_in_a_launch_ends_it_in_time(program, monkeypatch):
    """Ray itself waits for a minute in each call, and then ends the process."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        monkeypatch.setenv("RAY_TMPDIR", place)
        code, said = program(LOSES_ITS_HEAD).end(within_s=180)
    assert code == 0, said
    address, took_s = said.splitlines()[-1].split()
    assert (
        f"The head of the Ray cluster at {address} doesn't answer any more: what listens there has sent nothing" in said
    )
    assert "Without it, Ray can't place workers again. Start the cluster again, and then this program." in said
    assert float(took_s) < 60


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(fp.MissingExtra, match=r"footplate\[ray\]"):
        RayPlacement()
