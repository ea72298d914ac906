"""A transform gives the same rows in processes as in threads. A process that dies is an error, not a wait."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import template
import torch

from footplate.core.errors import ConfigError, DataError
from footplate.data import Loader, Table

pytestmark = pytest.mark.slow


def augment(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    image = row["image"].float() + rng.random()
    return {**row, "image": image.flip(-1), "half": image.mean().bfloat16(), "noise": rng.random(), "pid": os.getpid()}


def our_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if is_worker(child)]


def is_worker(child: psutil.Process) -> bool:
    try:
        return child.status() != psutil.STATUS_ZOMBIE and any(
            "footplate.data.pipeline.row_workers" in argument for argument in child.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def batches(delta: str, **options: Any) -> list[dict[str, Any]]:
    loader = Loader(Table(delta), 32, shuffle=True, seed=5, transform=augment, **options)
    return [batch for _ in range(2) for batch in loader]


def test_rows_order_and_draws_are_those_of_threads(delta: str) -> None:
    in_threads, in_processes = batches(delta), batches(delta, num_workers=2)
    assert {pid for batch in in_threads for pid in batch["pid"].tolist()} == {os.getpid()}
    pids = {pid for batch in in_processes for pid in batch["pid"].tolist()}
    # The workers stay from epoch to epoch.
    assert len(pids) == 2
    assert os.getpid() not in pids
    for expected, actual in zip(in_threads, in_processes, strict=True):
        assert list(expected) == list(actual)
        assert torch.equal(expected["image"], actual["image"])
        assert torch.equal(expected["half"], actual["half"])
        assert torch.equal(expected["noise"], actual["noise"])
        assert expected["name"] == actual["name"]


def test_a_lambda_is_a_row_function_too_and_processes_end_with_their_loader(delta: str) -> None:
    offset = 1000
    loader = Loader(Table(delta, columns=["id"]), 100, transform=lambda row: {"id": row["id"] + offset}, num_workers=1)
    assert sorted(torch.cat([batch["id"] for batch in loader]).tolist()) == list(range(1000, 1200))
    assert our_children()
    del loader
    gc.collect()
    assert not our_children()


def test_an_error_names_the_row_and_shows_where_it_was_raised(delta: str) -> None:
    def broken(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 // (row["id"] - 120)}

    with pytest.raises(ZeroDivisionError) as caught:
        list(Loader(Table(delta), 32, transform=broken, num_workers=1))
    notes = "\n".join(caught.value.__notes__)
    assert "row group 0, row 20" in notes
    assert "in broken" in notes


def test_an_error_that_can_not_travel_is_told_in_words(delta: str) -> None:
    class Stuck(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not me")

    def broken(row: dict[str, Any]) -> dict[str, Any]:
        raise Stuck("in the mud")

    with pytest.raises(DataError) as caught:
        list(Loader(Table(delta), 32, transform=broken, num_workers=1))
    assert "in the mud" in "\n".join(caught.value.__notes__)


def test_a_killed_process_is_an_error_and_the_next_iteration_has_new_ones(delta: str, tmp_path: Path) -> None:
    once = tmp_path / "once"

    def deadly(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 120 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": row["id"]}

    loader = Loader(Table(delta, columns=["id"]), 10, transform=deadly, num_workers=2)
    with pytest.raises(DataError, match=r"worker process of transform= has died \(SIGKILL\).*num_workers"):
        list(loader)
    assert sorted(torch.cat([batch["id"] for batch in loader]).tolist()) == list(range(200))


def test_processes_end_when_the_one_who_reads_is_killed(delta: str) -> None:
    script = (
        "import sys, os\n"
        "from footplate.data import Loader, Table\n"
        "loader = Loader(Table(sys.argv[1]), 8, transform=lambda row: {'pid': os.getpid()}, num_workers=1)\n"
        "batch = next(iter(loader))\n"
        "print(batch['pid'][0].item(), flush=True)\n"
        "input()\n"
    )
    with template.Popen(
        [sys.executable, "-c", script, delta], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        worker = int(reader.stdout.readline())
        reader.kill()
    until = time.monotonic() + 60
    while runs(worker):
        assert time.monotonic() < until, "the worker outlived its reader"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_without_a_row_function_are_refused(delta: str) -> None:
    with pytest.raises(ConfigError, match="num_workers=2: worker processes call transform="):
        Loader(Table(delta), 8, num_workers=2)
