"""Ranks on several hosts: each has its own clocks, name, home and working directory, some a disk of their own.

`HERE` is the same absolute path in every process and a different directory in each, like `/tmp` on several machines.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from models import ranks

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.storage.local import LocalStore
from footplate.core.errors import CheckpointError
from footplate.distributed import consistency
from footplate.training import rank_checks

from .common import Plain, equal, loader, make, seeded, weights

HERE = Path("/proc/self/cwd")
own_disks = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def on_hosts(root: Path, function: Callable[[], Any]) -> list[Any]:
    """Call `function()` on two ranks, each on a host of its own, `root/host0` and `root/host1`. Return the results."""

    def run() -> Any:
        rank = int(os.environ["RANK"])
        home = root / f"host{rank}"
        home.mkdir(parents=True, exist_ok=True)
        os.chdir(home)
        os.environ["HOME"] = str(home)
        socket.gethostname = lambda: home.name
        monotonic, wall = time.monotonic, time.time
        consistency.SEEN_WITHIN_S = 0.3
        time.monotonic, time.time = lambda: monotonic() + 1000.0 * rank, lambda: wall() - 100.0 * rank
        return function()

    return ranks.run(run, 2)


def said(function: Callable[[], Any]) -> tuple[str, str]:
    """The type and the text of the error that a function raises."""
    with pytest.raises(Exception) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


@own_disks
def test_a_run_whose_hosts_share_no_disk_saves_and_stops_at_the_same_steps_on_all(tmp_path):
    def run():
        savers = [
            fp.ModelCheckpoint(every_n_train_steps=3, filename="{step}-by-step"),
            fp.ModelCheckpoint(train_time_interval=timedelta(milliseconds=50), filename="{step}-by-time"),
            fp.ModelCheckpoint(monitor="val_loss", filename="{epoch}-best"),
        ]
        stopper = fp.EarlyStopping("val_loss", min_delta=10.0, patience=2)
        timer = fp.Timer(timedelta(minutes=5))
        trainer = make(HERE / "run", max_epochs=9, callbacks=[*savers, stopper, timer])
        trainer.fit(seeded(), loader(), loader(33))
        paths = [(saver.best_model_path, saver.last_model_path) for saver in savers]
        return trainer.global_step, trainer.current_epoch, paths

    first, second = on_hosts(tmp_path, run)
    assert first == second
    assert first[1] == 3
    assert checkpoint.find(tmp_path / "host0")
    assert not checkpoint.find(tmp_path / "host1")


@own_disks
@pytest.mark.parametrize("there_already", [False, True])
def test_hosts_that_cannot_see_the_checkpoints_are_named_before_training(there_already, tmp_path):
    def run():
        if there_already:
            (HERE / "run" / "checkpoints").mkdir(parents=True)
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("footplate.training.rank_checks").addHandler(handler)
        make(HERE / "run", max_epochs=1).fit(seeded(), loader())
        return lines

    first, second = on_hosts(tmp_path, run)
    assert len(first) == 1
    assert re.match(r"/proc/self/cwd/run/checkpoints: rank 1 \(host1\) can't see this directory of rank 0", first[0])
    assert second == []
    assert not list(tmp_path.glob("host*/run/checkpoints/.seen*"))


def test_hosts_that_share_a_disk_get_no_warning_of_it(tmp_path):
    def run():
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("footplate.training.rank_checks").addHandler(handler)
        make(tmp_path / "run", max_epochs=1).fit(seeded(), loader())
        return lines

    assert on_hosts(tmp_path, run) == [[], []]


def test_the_file_by_which_ranks_see_their_disk_is_deleted_after_a_kill_and_those_of_other_runs_stay(tmp_path):
    saver = tmp_path / "checkpoints"

    def run(name: str, killed: bool):
        def train():
            if killed and os.environ["RANK"] == "0":
                rank_checks.blind = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            callbacks = [fp.ModelCheckpoint(dirpath=saver)]
            make(tmp_path / name, max_epochs=1, callbacks=callbacks).fit(seeded(), loader())

        return train

    def left() -> list[Path]:
        return sorted(saver.glob(".seen*"))

    for name in ("one", "other"):
        with ranks.start(run(name, killed=True), 2) as started:
            assert started.exit_codes()[0] == -signal.SIGKILL
    assert len(left()) == 2
    ranks.run(run("one", killed=False), 2)
    assert len(left()) == 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_directory_is_that_of_rank_0_where_working_directories_differ(strategy, tmp_path):
    def run():
        for epochs in (1, 3):
            trainer = make("run", max_epochs=epochs, strategy=strategy)
            model = seeded()
            trainer.fit(model, loader(), loader(33), ckpt_path="last")
        trainer.save_checkpoint("by hand.ckpt")
        return trainer.global_step, trainer.run_dir, weights(model) if strategy == "ddp" else {}

    first, second = on_hosts(tmp_path, run)
    assert first[:2] == second[:2] == (12, tmp_path / "host0" / "run")
    equal(first[2], second[2])
    assert checkpoint.is_complete(tmp_path / "host0" / "by hand.ckpt")
    assert not list((tmp_path / "host1").iterdir())


def test_of_directories_that_differ_between_hosts_a_saver_takes_rank_0s_and_all_know_what_is_kept(tmp_path):
    def run():
        for epochs, path in ((2, None), (6, tmp_path / "shared.ckpt")):
            saver = fp.ModelCheckpoint(Path.home() / "best", monitor="val_loss", mode="max", save_last=False)
            trainer = make("run", max_epochs=epochs, callbacks=saver)
            trainer.fit(seeded(), loader(), loader(33), ckpt_path=path)
            if path is None:
                trainer.save_checkpoint(tmp_path / "shared.ckpt")
                trainer.group.barrier()
                shutil.rmtree(tmp_path / "host0" / "best", ignore_errors=True)
        return trainer.global_step, saver.dirpath, saver.best_k_models

    first, second = on_hosts(tmp_path, run)
    assert first == second
    assert first[0] == 24


def test_rank_0_alone_lists_the_directory_that_it_sweeps(tmp_path):
    """Files of a killed run disappear while rank 0 lists the directory."""

    def run():
        if os.environ["RANK"] == "1":
            LocalStore.find = lambda *_: list(Path("gone").iterdir())
        trainer = make(tmp_path / "run")
        trainer.fit(seeded(), loader(), ckpt_path="last")
        return trainer.global_step

    left = tmp_path / "run" / "checkpoints" / ".tmp-ckpt-of-another" / "shard-00000.safetensors"
    left.parent.mkdir(parents=True)
    left.touch()
    assert on_hosts(tmp_path, run) == [8, 8]
    assert not left.parent.exists()


@own_disks
def test_a_checkpoint_that_one_host_lacks_is_an_error_on_all(tmp_path):
    def run():
        make(HERE / "run").fit(seeded(), loader())
        again = make(HERE / "run", max_epochs=3)
        return said(lambda: again.fit(seeded(), loader(), ckpt_path="last"))

    first, second = on_hosts(tmp_path, run)
    assert first[0] == second[0] == "CheckpointError"
    assert "There is no checkpoint at" in second[1]
    assert first[1] == f"Rank 1: {second[1]}"


@own_disks
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_another_checkpoint_of_the_same_name_on_one_host_is_an_error_on_all(stage, tmp_path):
    for number in range(2):
        trainer = make(tmp_path / str(number), max_epochs=1 + number)
        trainer.fit(seeded(), loader())
        trainer.save_checkpoint(tmp_path / f"host{number}" / "same.ckpt")

    def run():
        trainer = make(HERE / "run", max_epochs=4)
        return said(lambda: getattr(trainer, stage)(seeded(), loader(), ckpt_path=HERE / "same.ckpt"))

    first, second = on_hosts(tmp_path, run)
    assert first == second
    assert first[0] == "CheckpointError"
    assert re.search(r"rank 0 \(host0\) has one of step 7.*rank 1 \(host1\) has one of step 14", first[1])


@own_disks
def test_parts_of_a_sharded_model_that_would_go_to_several_disks_are_an_error_on_all_and_leave_nothing(tmp_path):
    def run():
        return said(lambda: make(HERE / "run", strategy="fsdp").fit(seeded(), loader()))

    first, second = on_hosts(tmp_path, run)
    assert first == second
    assert first[0] == "CheckpointError"
    assert "rank 1 (host1) can't see" in first[1]
    left = [path for path in tmp_path.rglob("*") if ".tmp-" in path.name or path.suffix == ".ckpt"]
    assert not left


@own_disks
def test_predictions_go_to_one_directory_that_all_hosts_see_or_nowhere(tmp_path):
    def run(output):
        table = make("run").predict(seeded(), loader(30, 4, shuffle=False), output=output)
        return table.uri, table.num_rows

    first, second = on_hosts(tmp_path, lambda: run("out"))
    assert first == second == (str(tmp_path / "host0" / "out"), 30)
    first, second = on_hosts(tmp_path, lambda: said(lambda: run(HERE / "apart")))
    assert first == second
    assert first[0] == "ConfigError"
    assert "rank 1 (host1) can't see" in first[1]
    assert not list(tmp_path.rglob("*apart*"))


def test_a_table_that_got_a_new_version_between_two_hosts_opening_it_is_an_error_on_all(tmp_path):
    from deltalake import write_deltalake

    class OfTable(Plain):
        def training_step(self, batch, batch_idx):
            return self.net(batch["x"][:, None].expand(-1, 8)).square().mean()

    rows = pa.table({"x": pa.array([number / 40 for number in range(40)], pa.float32())})
    write_deltalake(tmp_path / "t", rows)
    write_deltalake(tmp_path / "t", rows, mode="overwrite")

    tables = [fp.Table(str(tmp_path / "t"), version=version) for version in range(2)]  # delta-rs can't be forked

    def run(number):
        trainer = make("run")
        trainer.fit(seeded(OfTable), fp.TableDataModule(train=tables[number], batch_size=4))
        return trainer.global_step

    assert on_hosts(tmp_path, lambda: run(1)) == [10, 10]
    first, second = on_hosts(tmp_path, lambda: said(lambda: run(int(os.environ["RANK"]))))
    assert first == second
    assert first[0] == "DataError"
    assert re.search(r"delta version 0 .*delta version 1 .*version=", first[1])


@pytest.mark.parametrize("epochs", [1, 9])
def test_a_checkpoint_that_rank_0_can_not_write_is_an_error_on_all(epochs, tmp_path):
    def run():
        def fails(*_: Any) -> None:
            raise CheckpointError("The disk is full.")

        LocalStore.write = fails
        return said(lambda: make("run", max_epochs=epochs).fit(seeded(), loader()))

    first, second = on_hosts(tmp_path, run)
    assert first == ("CheckpointError", "The disk is full.")
    assert second == ("CheckpointError", "Rank 0: The disk is full.")
