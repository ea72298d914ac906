"""What the entry point of a job on Slurm makes of the answers to `scontrol requeue`."""

from __future__ import annotations

from pathlib import Path

import pytest

from footplate.jobs.backends.slurm.entrypoint import _requeue


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that makes `scontrol` run some lines of a shell script."""

    def write(lines: str) -> None:
        program = tmp_path / "scontrol"
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


def test_slurm_says_why_it_requeues_no_job(scontrol):
    scontrol("echo 'Requested operation is presently disabled for job 7' >&2; exit 1")
    assert _requeue(7) == "Requested operation is presently disabled for job 7"
    scontrol("exit 3")
    assert _requeue(7) == "scontrol ends with exit code 3"


def test_a_requeue_may_end_its_own_scontrol(scontrol):
    scontrol("kill -TERM $$")
    assert _requeue(7) == ""


def test_a_node_without_scontrol_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _requeue(7) == "this node has no scontrol"
