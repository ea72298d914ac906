"""`Trainer(devices=2)` in a plain script: real processes that are started, killed, frozen and told to stop.

The script below has no `if __name__ == "__main__"`. It trains, and prints its results as JSON. The tests act on its ranks
from outside, by their process ids. The undisturbed run starts a fresh interpreter; the others are forks (`template.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import template
import torch
from models.small import Classifier, dataset, loader

import footplate as fp
from footplate import checkpoint
from footplate.core.errors import LaunchError

SCRIPT = """
import hashlib, json, os, sys, time
from pathlib import Path
import torch
import footplate as fp
from models.small import Classifier, loader

options = json.loads(sys.argv[2])
pause, break_slot = options.pop("pause", 0.0), options.pop("break_slot", None)
break_after = options.pop("break_after", 0)

class Steps(fp.Callback):
    def on_train_start(self, trainer, pl_module):
        self.breaks(trainer)

    def breaks(self, trainer):
        broken = Path(options["default_root_dir"] + ".broken")
        at_break = trainer.global_step >= break_after or broken.exists()
        if break_slot is not None and os.environ["FOOTPLATE_SLOT"] == str(break_slot) and at_break:
            broken.touch()
            os._exit(3)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        record = {"rank": trainer.world.rank, "size": trainer.world.size, "pid": os.getpid(),
                  "step": trainer.global_step, "loss": float(outputs).hex(), "rows": len(batch[0])}
        with open(options["default_root_dir"] + f".{trainer.world.rank}.steps", "a") as file:
            file.write(json.dumps(record) + "\\n")
        time.sleep(pause)
        self.breaks(trainer)

torch.manual_seed(3)
model = Classifier()
trainer = fp.Trainer(**{"accelerator": "cpu", "devices": 2, "seed": 1, "max_epochs": 4, "logger": fp.CSV(),
    "enable_progress_bar": False, "enable_model_summary": False,
    "callbacks": [Steps(), fp.ModelCheckpoint(every_n_train_steps=3)], **options})
trainer.fit(model, loader(batch_size=5), loader(shuffle=False), **json.loads(sys.argv[1]))
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(json.dumps({"weights": hashlib.sha256(weights).hexdigest(), "step": trainer.global_step,
                  "val_loss": float(trainer.callback_metrics["val_loss"]).hex(),
                  "checkpoint": trainer.checkpoint_callback.last_model_path}))
"""


class Run:
    """The running script."""

    def __init__(
        self, directory: Path, fit: dict[str, Any] | None = None, *, fresh: bool = False, **options: Any
    ) -> None:
        self.directory = directory
        script = directory.parent / "train.py"
        script.write_text(textwrap.dedent(SCRIPT))
        options["default_root_dir"] = str(directory)
        arguments = [script, json.dumps(fit or {}), json.dumps(options)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
        popen = subprocess.Popen if fresh else template.Popen
        self.process: subprocess.Popen[str] = popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        file = Path(f"{self.directory}.{rank}.steps")
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int, rank: int = 0, timeout_s: float = 120) -> dict[str, Any]:
        """Wait until a rank has reached a step, and return its latest record."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            records = self.steps(rank)
            if records and records[-1]["step"] >= step:
                return records[-1]
            if self.process.poll() is not None:
                raise AssertionError(self.process.communicate()[1])
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} never came to step {step}")

    def end(self, code: int = 0, timeout_s: float = 200) -> tuple[dict[str, Any], str]:
        """Wait for the end. Return the results and the output. Assert the exit code and that no process is left."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == code, err
        pids = {record["pid"] for rank in range(4) for record in self.steps(rank)}
        assert not [pid for pid in pids if psutil.pid_exists(pid)], "a rank has been left behind"
        return json.loads(out.splitlines()[-1]) if code == 0 else {}, out + err

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()


def losses(run: Run, rank: int = 0) -> dict[int, set[str]]:
    """Every loss of a rank at a step, over all attempts."""
    by_step: dict[int, set[str]] = {}
    for record in run.steps(rank):
        by_step.setdefault(record["step"], set()).add(record["loss"])
    return by_step


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The undisturbed run."""
    with Run(tmp_path_factory.mktemp("untouched") / "run", fresh=True) as run:
        home, _ = run.end()
        yield run, home


def test_what_came_of_it_comes_home(untouched):
    run, home = untouched
    assert home["step"] == 48
    assert {record["size"] for record in run.steps()} == {2}
    state = checkpoint.load(home["checkpoint"])
    model = Classifier()
    model.load_state_dict(state["state_dict"])
    saved = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    assert hashlib.sha256(saved).hexdigest() == home["weights"], "the weights at home are not those that were trained"
    assert state["global_step"] == 48
    assert home["checkpoint"].startswith(str(run.directory))


def assert_the_same(run: Run, home: dict[str, Any], untouched: tuple[Run, dict[str, Any]]) -> None:
    whole, expected = untouched
    assert {name: home[name] for name in ("weights", "step", "val_loss")} == {
        name: expected[name] for name in ("weights", "step", "val_loss")
    }
    for rank in (0, 1):
        assert losses(run, rank) == losses(whole, rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_started_again_and_the_end_is_bit_for_bit_the_same(rank, tmp_path, untouched):
    with Run(tmp_path / "run", pause=0.02) as run:
        os.kill(run.wait_for_step(14, rank)["pid"], signal.SIGKILL)
        home, said = run.end()
    assert re.search(rf"trainer\.fit: rank {rank} was killed by SIGKILL in attempt 0; attempt 1 starts now", said)
    assert_the_same(run, home, untouched)


@pytest.mark.slow
def test_a_rank_that_is_frozen_is_found_by_its_silence(tmp_path, untouched):
    with Run(tmp_path / "run", pause=0.02, heartbeat_timeout=2) as run:
        os.kill(run.wait_for_step(14, 1)["pid"], signal.SIGSTOP)
        home, said = run.end()
    assert re.search(r"rank 1 gave no sign of life for \d s", said)
    assert_the_same(run, home, untouched)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["rank 0", "rank 1", "supervisor"])
def test_sigterm_to_anyone_ends_all_with_143_after_the_same_step_and_nothing_is_lost(target, tmp_path, untouched):
    with Run(tmp_path / "run", pause=0.02) as run:
        records = [run.wait_for_step(14, rank) for rank in (0, 1)]
        pid = run.process.pid if target == "supervisor" else records[int(target[-1])]["pid"]
        began = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        run.end(code=143)
        assert time.monotonic() - began < 30
    last = [run.steps(rank)[-1]["step"] for rank in (0, 1)]
    assert last[0] == last[1]
    assert checkpoint.read_meta(checkpoint.newest([run.directory]))["global_step"] == last[0]

    with Run(tmp_path / "run", fit={"ckpt_path": "last"}) as again:
        home, _ = again.end()
    assert_the_same(again, home, untouched)
    assert [record["step"] for record in again.steps()] == list(range(1, 49)), "no step was taken twice"


@pytest.mark.slow
def test_when_the_supervisor_is_killed_nothing_is_left_and_the_next_takes_it_up(tmp_path, untouched):
    with Run(tmp_path / "run", pause=0.02) as run:
        pids = [run.wait_for_step(14, rank)["pid"] for rank in (0, 1)]
        run.process.kill()
        deadline = time.monotonic() + 30
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with Run(tmp_path / "run", fit={"ckpt_path": "last"}) as again:
        home, _ = again.end()
    assert_the_same(again, home, untouched)


@pytest.mark.slow
def test_a_rank_that_never_comes_back_is_done_without_and_global_batches_stay_what_they_were(tmp_path):
    with Run(tmp_path / "run", devices=3, min_devices=2, break_slot=1, max_epochs=2) as run:
        home, said = run.end()
    assert "without slot 1" in said
    sizes = {record["size"] for record in run.steps()}
    assert sizes == {2}
    rows = [a["rows"] + b["rows"] for a, b in zip(run.steps(0), run.steps(1), strict=True)]
    assert rows == [15] * 16
    assert home["step"] == 16


@pytest.mark.slow
def test_with_logical_ranks_a_rank_that_is_done_without_changes_no_bit(tmp_path):
    with Run(tmp_path / "alone", devices=1, logical_ranks=8) as run:
        whole, _ = run.end()
    with Run(
        tmp_path / "run", devices=4, logical_ranks=8, min_devices=3, break_slot=1, break_after=5, max_restarts=6
    ) as run:
        home, output = run.end()
    assert "without slot 1" in output
    assert {record["size"] for record in run.steps()} == {4, 3}
    assert {name: home[name] for name in ("weights", "step", "val_loss")} == {
        name: whole[name] for name in ("weights", "step", "val_loss")
    }


@pytest.mark.slow
def test_a_run_that_fails_again_and_again_ends_with_what_its_code_raised(tmp_path):
    with Run(tmp_path / "run", devices=2, break_slot=1, max_restarts=1) as run:
        _, said = run.end(code=1)
    assert "rank 1 ended with exit code 3" in said
    assert "max_restarts=1" in said


@pytest.mark.slow
def test_only_checkpoints_of_this_very_call_are_continued_from(tmp_path):
    """An earlier run has left checkpoints in the directory. A restart of a run that begins from scratch ignores them."""
    with Run(tmp_path / "run", max_epochs=1) as first:
        first.end()
    Path(f"{tmp_path / 'run'}.0.steps").unlink()
    with Run(tmp_path / "run", max_epochs=1, break_slot=1, max_restarts=1) as second:
        second.end(code=1)
    assert second.steps() == []


# In this process: arguments and results


class Confused(Classifier):
    def training_step(self, batch, batch_idx):
        raise ValueError(f"of rank {self.global_rank}")


class Counting(fp.Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


@pytest.fixture
def several(make_trainer):
    """A function that makes quiet trainers of two ranks."""
    return lambda **options: make_trainer(**{"devices": 2, "max_restarts": 0, **options})


def test_an_exception_comes_home_as_itself_with_its_traceback(several):
    with pytest.raises(ValueError, match="of rank") as caught:
        several().fit(Confused(), loader())
    assert "in training_step" in "".join(caught.value.__notes__)


def test_a_mistake_is_said_once_and_not_tried_again(several):
    with pytest.raises(fp.ConfigError, match="monitors"):
        several(max_restarts=3, callbacks=fp.EarlyStopping("val_los")).fit(Classifier(), loader(), loader())


class LosesItsMachine(fp.Callback):
    """Kills the process that starts workers here."""

    def on_train_start(self, *_: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def test_losses_of_a_machine_have_a_budget_of_their_own(several):
    with pytest.raises(LaunchError, match=r"all ranks were lost.*max_host_restarts=0"):
        several(max_restarts=3, max_host_restarts=0, callbacks=LosesItsMachine()).fit(Classifier(), loader())


def test_what_callbacks_remember_and_the_weights_come_home_and_can_be_evaluated(several):
    counting, module = Counting(), Classifier()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    runner = several(callbacks=[counting, fp.ModelCheckpoint(monitor="val_loss")], max_epochs=1)
    runner.fit(module, loader(), loader(shuffle=False))
    assert counting.batches == 6
    assert all((a != b).any() for a, b in zip(before, module.parameters(), strict=True))
    assert runner.checkpoint_callback.best_model_score == pytest.approx(float(runner.callback_metrics["val_loss"]))

    (metrics,) = runner.validate(dataloaders=loader(shuffle=False))
    assert metrics["val_loss"] == pytest.approx(float(runner.callback_metrics["val_loss"]))


class Predicting(Classifier):
    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]


def test_predictions_of_all_ranks_come_home_in_the_order_of_the_rows(several):
    predictions = several().predict(Predicting(), loader(rows=47, shuffle=False))
    assert torch.equal(torch.cat(predictions), dataset(47).tensors[0][:, 0])


def test_what_can_not_be_sent_is_said(several):
    module = Classifier()
    module.lock = threading.Lock()
    with pytest.raises(
        fp.FootplateError, match=r"can't be sent to worker processes.*attribute `lock` .*where they are used"
    ):
        several().fit(module, loader())


def test_several_nodes_without_a_cluster_are_refused_with_what_to_do(several):
    with pytest.raises(fp.ConfigError, match="num_nodes=2 needs a cluster, and this process is connected to none"):
        several(num_nodes=2).fit(Classifier(), loader())


def test_processes_that_were_started_must_be_as_many_as_nodes_and_devices(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert fp.Trainer(accelerator="cpu", num_nodes=2, devices=1, max_epochs=1).world.size == 2
    with pytest.raises(fp.ConfigError, match=r"num_nodes=2 with 4 device\(s\) each: 8 processes, but 2 were started"):
        fp.Trainer(accelerator="cpu", num_nodes=2, devices=4, max_epochs=1)
