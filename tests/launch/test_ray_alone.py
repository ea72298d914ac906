"""Launches that ask for Ray where no cluster is. In a file of their own: while one runs here, Ray finds it."""

from __future__ import annotations

import socket
import sys
import tempfile

import psutil
import pytest
from launched import gone_within
from ray_nodes import PROGRAM

import footplate as fp
from footplate.launch.cluster.ray import RayPlacement

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_without_a_cluster_one_is_started_here_and_ends_with_the_program(program, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:  # short: sockets are in it
        monkeypatch.setenv("RAY_TMPDIR", place)  # where no cluster's address is found
        code, said = program(PROGRAM).end(within_s=120)
        assert code == 0, said
        assert sorted(said.splitlines()) == ["[rank 0] hello", "[rank 1] hello", "result 2"]
        of_it = [one for one in psutil.process_iter(["cmdline"]) if place in " ".join(one.info["cmdline"] or [])]
        assert gone_within(15, of_it)


def test_an_address_without_a_cluster_is_said_so(program):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, said = program(
        f"from footplate.launch.cluster.ray import RayPlacement\nRayPlacement(address='127.0.0.1:{port}')"
    ).end(within_s=120)
    assert code == 1
    assert f'LaunchError: No Ray cluster can be used at "127.0.0.1:{port}"' in said


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(fp.MissingExtra, match=r"footplate\[ray\]"):
        RayPlacement()
