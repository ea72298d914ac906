"""A job's use of the machine."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time

from footplate.jobs.backends.local import usage
from footplate.jobs.backends.local.usage import Meter
from footplate.jobs.states import State
from jobs.conftest import Bench, until

BUSY = """
import subprocess, sys, time
held = bytearray(64 * 2**20)
inner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_and_what_it_has_started_are_measured_together(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "FIRST_S", 0.3)
    path = tmp_path / "usage.csv"
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            meter = Meter(path)

            def rows() -> list[dict[str, str]]:
                meter.sample([process.pid])
                return list(csv.DictReader(path.open())) if path.exists() else []

            samples = until(lambda: len(made := rows()) >= 4 and made)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert max(float(row["cpus"]) for row in samples) > 0.05  # it wants a whole core, of a machine that may be busy
    assert max(float(row["cpus"]) for row in samples[1:]) < 2
    assert int(samples[-1]["memory_bytes"]) > 64 * 2**20
    assert abs(float(samples[-1]["time"]) - time.time()) < 60


def test_of_processes_that_are_gone_and_gpus_that_are_not_there_the_cells_are_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "FIRST_S", 0.0)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    Meter(tmp_path / "usage.csv", gpus=[63]).sample([process.pid])
    header, row = (tmp_path / "usage.csv").read_text().splitlines()
    assert header == "time,cpus,memory_bytes,gpu63_busy,gpu63_memory_bytes"
    assert row.split(",")[1:] == ["0.00", "0", "", ""]


def test_a_job_leaves_its_use_of_the_machine_beside_its_logs(bench: Bench):
    bench.program('until_there("go")')
    bench.submit()
    path = bench.jobs.home.attempt("my_job", 1) / "usage.csv"
    until(lambda: path.exists() and path.read_text().count("\n") >= 2)
    (bench.directory / "go").touch()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    rows = list(csv.DictReader(path.open()))
    assert int(rows[0]["memory_bytes"]) > 2**20
