"""The monitor of a training: its file, its loggers, and what it must not change."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ranks
from models.small import Classifier, dataset, loader
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.data import DataLoader

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.core.goodput import NAME, read_rows
from footplate.core.goodput.time_record import TimeRecord
from footplate.monitoring.record import MonitorFile
from footplate.step.phase_times import PHASES
from footplate.training import monitor

CAUSES = {
    "input", "transfer", "forward", "backward", "optimizer", "step", "communication", "callbacks", "logging", "checkpoint",
    "validation",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _looks_at_every_step(monkeypatch):
    for name in ("LOOK_S", "STEPS_BETWEEN_LOOKS", "WINDOW_S", "TRACKED_S", "LEAST_S"):
        monkeypatch.setattr(monitor, name, 0.0)


def rows(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(directory / NAME)[0] if row["kind"] == kind]


def test_the_windows_of_a_run_sum_to_its_time_by_cause(make_trainer, tmp_path):
    trainer = make_trainer(logger=fp.CSV(), log_every_n_steps=2)
    trainer.fit(Classifier(), loader(), loader(20))
    windows = rows(tmp_path / "run", "window")
    assert {cause for window in windows for cause in window["seconds"]} <= CAUSES
    for window in windows:
        assert sum(window["seconds"].values()) == pytest.approx(window["wall_s"], abs=1e-6)
        assert all(seconds >= 0 for seconds in window["seconds"].values())
    (start,), (end,) = rows(tmp_path / "run", "start"), rows(tmp_path / "run", "end")
    # Two clocks: the windows are monotonic.
    assert sum(window["wall_s"] for window in windows) == pytest.approx(end["time"] - start["time"], abs=0.05)
    assert sum(window["batches"] for window in windows) == 24
    assert sum(window["samples"] for window in windows) == 240
    assert {"validation", "checkpoint", "forward", "backward", "optimizer"} <= set(trainer.monitor.seconds)
    assert end["status"] == "finished"
    assert start["process_s"] >= start["setup_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [({"max_epochs": 3}, 36), ({"max_epochs": 3, "accumulate_grad_batches": 2}, 18), ({"max_steps": 7}, 7),
     ({"max_epochs": 1, "max_time": {"hours": 1}}, None)],
)  # fmt: skip
def test_the_record_tells_the_steps_of_the_whole_training(make_trainer, tmp_path, arguments, steps):
    trainer = make_trainer(logger=fp.CSV(), log_every_n_steps=1, **arguments)
    trainer.fit(Classifier(), loader())
    (start,), windows = rows(tmp_path / "run", "start"), rows(tmp_path / "run", "window")
    assert start["total_steps"] == steps
    assert steps is None or windows[-1]["step"] == steps
    # A chart's reader understands what the monitor writes.
    snapshot = TimeRecord(tmp_path / "run" / "monitor.jsonl").snapshot()
    assert (snapshot.ended, snapshot.total_steps) == (True, steps)
    assert {cause for part in snapshot.parts for cause in part.seconds} <= CAUSES
    assert sum(part.samples or 0 for part in snapshot.parts) == sum(window["samples"] for window in windows)


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Closure(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Classifier, {}),
        (Classifier, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
        (Classifier, {"precision": "bf16-mixed"}),
        (ByHand, {}),
        (Closure, {}),
    ],
    ids=["plain", "accumulated", "bf16", "by hand", "closure"],
)
def test_looking_at_every_step_changes_no_bit_of_the_training(make_trainer, module, settings, tmp_path):
    results = []
    for name, enabled in (("on", True), ("off", False)):
        torch.manual_seed(0)
        trainer = make_trainer(enable_monitor=enabled, default_root_dir=tmp_path / name, logger=fp.CSV(), **settings)
        model = module()
        trainer.fit(model, loader())
        results.append((model.state_dict(), (tmp_path / name / "metrics.csv").read_text()))
    (with_monitor, metrics), (without, others) = results
    assert all(torch.equal(value, without[name]) for name, value in with_monitor.items())
    assert metrics == others


def test_nothing_stays_on_the_step_that_was_looked_at(make_trainer):
    states = []

    class Between(fp.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            states.append((trainer.step.bare, set(PHASES) & set(trainer.step.__dict__), _len_torch_dispatch_stack()))

    make_trainer(max_epochs=1, callbacks=[Between()]).fit(Classifier(), loader())
    assert states == [(True, set(), 0)] * 12


def test_a_step_that_raises_is_restored_and_the_error_is_the_users(make_trainer):
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ZeroDivisionError("mine")
            return super().training_step(batch, batch_idx)

    trainer = make_trainer()
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.fit(Fails(), loader())
    assert not {"forward", "backpropagate"} & set(trainer.run.step.__dict__)


def test_a_profiler_sees_the_steps_that_are_looked_at(make_trainer):
    actions = []

    class Records:
        def start(self, action: str) -> None:
            actions.append(action)

        def stop(self, action: str) -> None:
            pass

    make_trainer(max_epochs=1, profiler=Records()).fit(Classifier(), loader())
    assert actions.count("run_training_batch") == 12
    assert actions.count("[Strategy]Strategy.training_step") == 12


def test_the_loggers_get_shares_and_rates_but_not_metrics_csv(make_trainer, tmp_path):
    trainer = make_trainer(logger=[fp.CSV(), fp.JSONLines()], log_every_n_steps=1)
    trainer.fit(Classifier(), loader())
    assert "monitor/" not in (tmp_path / "run" / "metrics.csv").read_text()
    lines = [json.loads(line) for path in (tmp_path / "run").rglob("*.jsonl") for line in path.read_text().splitlines()]
    sent = [line for line in lines if "monitor/samples_per_s" in json.dumps(line)]
    assert sent
    # The share of the peak and the goodput are known at the end.
    (end,) = rows(tmp_path / "run", "end")
    assert end["peak_flops_per_s"] > 0
    assert any("monitor/goodput" in json.dumps(line) for line in lines)


def test_hooks_before_a_batch_count_as_hooks(make_trainer):
    class Slow(fp.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.01)

    trainer = make_trainer(max_epochs=1, callbacks=[Slow()])
    trainer.fit(Classifier(), loader())
    assert trainer.monitor.seconds["callbacks"] > 0.1
    assert trainer.monitor.seconds["transfer"] < 0.1


def test_without_loggers_or_in_a_dry_run_nothing_is_written(make_trainer, tmp_path):
    make_trainer(enable_checkpointing=False).fit(Classifier(), loader())
    make_trainer(fast_dev_run=True, logger=fp.CSV()).fit(Classifier(), loader())
    assert not list(tmp_path.rglob("monitor.jsonl"))


def test_it_can_be_switched_off(make_trainer, tmp_path, capsys):
    trainer = make_trainer(enable_monitor=False, logger=fp.CSV())
    trainer.fit(Classifier(), loader())
    assert trainer.monitor.evidence is None
    assert not list(tmp_path.rglob("monitor.jsonl"))
    with pytest.raises(ConfigError, match="enable_monitor=3: expected True or False"):
        make_trainer(enable_monitor=3)


def test_a_run_that_goes_on_adds_to_the_file(make_trainer, tmp_path):
    make_trainer(max_epochs=1, logger=fp.CSV()).fit(Classifier(), loader())
    path = tmp_path / "run" / "monitor.jsonl"
    path.write_text(path.read_text() + '{"kind": "wind')
    make_trainer(max_epochs=2, logger=fp.CSV()).fit(Classifier(), loader(), ckpt_path="last")
    starts = rows(tmp_path / "run", "start")
    assert [start["step"] for start in starts] == [0, 12]
    assert [end["step"] for end in rows(tmp_path / "run", "end")] == [12, 24]


def test_the_record_names_the_job_and_checkpoints_outside_of_the_directory(make_trainer, tmp_path, monkeypatch):
    elsewhere = fp.ModelCheckpoint(dirpath=tmp_path / "elsewhere")
    make_trainer(max_epochs=1, logger=fp.CSV(), callbacks=[elsewhere]).fit(Classifier(), loader())
    monkeypatch.setenv("FOOTPLATE_JOB_ID", "flowers_1-1764060000000000")
    monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", "1")
    make_trainer(max_epochs=1, logger=fp.CSV()).fit(Classifier(), loader())
    alone, in_a_job = rows(tmp_path / "run", "start")
    assert (alone["job"], alone["checkpoints"]) == (None, [str(tmp_path / "elsewhere")])
    assert (in_a_job["job"], in_a_job["checkpoints"]) == ("flowers_1-1764060000000000", [])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_ends_early_says_so(make_trainer, tmp_path, error):
    class Ends(fp.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise error

    with pytest.raises(error):
        make_trainer(callbacks=[Ends()], logger=fp.CSV()).fit(Classifier(), loader())
    (end,) = rows(tmp_path / "run", "end")
    assert end["status"] == ("failed" if error is RuntimeError else "interrupted")


def test_a_disk_that_is_full_ends_the_record_and_not_the_training(tmp_path, caplog):
    (tmp_path / "monitor.jsonl").mkdir()
    file = MonitorFile(tmp_path)
    for _ in range(3):
        file.add("window", batches=1)
    assert caplog.text.count("The times of this run are no longer written down") == 1


def test_flops_are_those_of_the_products_forward_and_backward(make_trainer):
    trainer = make_trainer()
    trainer.fit(Classifier(), loader())
    evidence = trainer.monitor.evidence
    assert evidence is not None
    # Ten rows, layers of 8 × 16 and 16 × 3. Backward, the first layer needs no gradient of its input.
    first, second = 2 * 10 * 8 * 16, 2 * 10 * 16 * 3
    assert evidence.flops == 2 * first + 3 * second
    assert evidence.mfu is not None
    assert 0.0 < evidence.mfu < 1.0


def test_tokens_are_counted_in_batches_of_sequences(make_trainer):
    class Sequences(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch["tokens"][:, :8].float()).mean()

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Sequences(), [{"tokens": torch.ones(4, 50, dtype=torch.long)}] * 10)
    assert trainer.monitor.evidence is not None
    assert trainer.monitor.evidence.tokens == 2000


def _two_ranks(root: Path) -> Any:
    for name in ("LOOK_S", "STEPS_BETWEEN_LOOKS"):
        setattr(monitor, name, 0.0)
    trainer = fp.Trainer(
        accelerator="cpu", default_root_dir=root, max_epochs=3, logger=fp.CSV(), enable_progress_bar=False,
        enable_model_summary=False, seed=1,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(dataset(100), 10))
    return sum(trainer.monitor.seconds.values())


def test_rank_0_writes_for_all_ranks_and_knows_their_times(tmp_path):
    first, second = ranks.run(_two_ranks, 2, tmp_path)
    compared = rows(tmp_path, "epoch")[-1]["ranks"]
    assert [rank["rank"] for rank in compared] == [0, 1]
    assert all(0 < rank["own_s"] <= max(first, second) for rank in compared)
    assert sum(window["samples"] for window in rows(tmp_path, "window")) == 300
    assert len(rows(tmp_path, "start")) == 1


class Wide(Classifier):
    """Units for FSDP2: two layers, and the module itself, which has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.register_buffer("offset", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] + self.offset
        for layer in self.layers:
            x = layer(x)
        return super().training_step((x, batch[1]), batch_idx)


def _sharded(root: Path, enabled: bool, calls: int = 1) -> Any:
    for name in ("LOOK_S", "STEPS_BETWEEN_LOOKS", "LEAST_S"):
        setattr(monitor, name, 0.0)
    torch.manual_seed(0)
    module, seconds, evidence = Wide(), [], None
    for _ in range(calls):
        trainer = fp.Trainer(
            accelerator="cpu", default_root_dir=root, max_epochs=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, seed=1, strategy="fsdp", enable_monitor=enabled,
        )  # fmt: skip
        trainer.fit(module, DataLoader(dataset(100), 5))
        seconds.append(dict(trainer.monitor.seconds))
        evidence = evidence or trainer.monitor.evidence
    return trainer.parallel.whole(trainer.parallel.state_dict(module)), seconds, evidence and evidence.flops


def test_a_sharded_step_has_phases_communication_and_flops_in_each_call_and_the_same_bits(tmp_path):
    (with_monitor, calls, flops), _ = ranks.run(_sharded, 2, tmp_path, True, 2)
    (without, _, _), _ = ranks.run(_sharded, 2, tmp_path, False, 2)
    assert all(torch.equal(value, without[name]) for name, value in with_monitor.items())
    for seconds in calls:
        assert all(seconds[cause] > 0 for cause in ("forward", "backward", "optimizer", "communication"))
    # Five rows on each of two ranks. The first layer needs no gradient of its input.
    layer, first, second = 2 * 5 * 8 * 8, 2 * 5 * 8 * 16, 2 * 5 * 16 * 3
    assert flops == 2 * (2 * layer + 3 * (layer + first + second))


def test_shares_and_rates_are_finite(make_trainer, tmp_path):
    make_trainer(logger=fp.CSV(), log_every_n_steps=1, max_steps=3).fit(Classifier(), loader())
    for row in read_rows(tmp_path / "run" / NAME)[0]:
        assert all(math.isfinite(value) for value in row.get("seconds", {}).values())
