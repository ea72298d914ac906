"""Lightning's profilers on our trainer: the recorded actions and their counts, without an effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import profilers
from models.small import Classifier, loader

import footplate as fp


class Hooked(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.profiler.profile("my own"):
            pass


class Watches(fp.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pass


def test_the_actions_that_lightnings_pages_name_are_recorded(make_trainer: Any) -> None:
    profiler = profilers.SimpleProfiler()
    modules = [Hooked(), Hooked()]
    modules[1].load_state_dict(modules[0].state_dict())
    arguments = {"max_epochs": 2, "callbacks": [Watches()], "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    make_trainer(**arguments).fit(modules[0], loader(), loader(20))
    make_trainer(**arguments, profiler=profiler).fit(modules[1], loader(), loader(20))
    counts = {action: len(times) for action, times in profiler.recorded_durations.items()}
    expected = {
        "run_training_epoch": 2,
        "run_training_batch": 24,
        "[Strategy]Strategy.training_step": 24,
        "[Strategy]Strategy.backward": 24,
        "[Strategy]Strategy.validation_step": 4,
        "[LightningModule]Hooked.optimizer_step": 12,
        "[LightningModule]Hooked.on_train_batch_end": 24,
        "[Callback]Watches.on_train_epoch_end": 2,
        "my own": 24,
    }
    assert {action: counts.get(action) for action in expected} == expected
    assert counts["[_TrainingEpochLoop].train_dataloader_next"] >= 24
    assert counts["[_EvaluationLoop].val_next"] >= 4
    assert profiler.current_actions == {}
    weights = [module.state_dict() for module in modules]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
def test_a_profiler_reports_into_the_runs_directory(make_trainer: Any, name: str) -> None:
    trainer = make_trainer(max_epochs=1, profiler=name, limit_train_batches=4)
    trainer.profiler.filename = "report"
    trainer.fit(Hooked(), loader(), loader(20))
    trainer.test(Hooked(), loader(20), verbose=False)
    for stage in ("fit", "test"):
        (report,) = Path(trainer.run_dir).glob(f"{stage}-report*.txt")
        assert ("training_step" if stage == "fit" else "test_step") in report.read_text()


@pytest.mark.parametrize("given", ["fast", 3, profilers.SimpleProfiler])
def test_what_is_no_profiler_is_refused(make_trainer: Any, given: Any) -> None:
    with pytest.raises(fp.ConfigError, match=r"profiler=.*expected"):
        make_trainer(profiler=given)


def test_an_object_that_starts_and_stops_is_a_profiler(make_trainer: Any) -> None:
    class Own:
        def __init__(self) -> None:
            self.open: list[str] = []
            self.seen: set[str] = set()

        def start(self, action: str) -> None:
            self.open.append(action)
            self.seen.add(action)

        def stop(self, action: str) -> None:
            assert self.open.pop() == action

    own = Own()
    make_trainer(max_epochs=1, profiler=own).fit(Classifier(), loader())
    assert own.open == []
    assert {"run_training_epoch", "run_training_batch"} <= own.seen


def test_a_call_leaves_nothing_of_a_profiler_on_the_users_objects(make_trainer: Any) -> None:
    class Own:
        def __init__(self) -> None:
            self.actions: list[str] = []

        def start(self, action: str) -> None:
            self.actions.append(action)

        def stop(self, action: str) -> None:
            pass

    own, modules, callbacks = Own(), [Classifier(), Classifier()], [Watches(), Watches()]
    make_trainer(max_epochs=1, callbacks=callbacks[:1]).fit(modules[0], loader())
    make_trainer(max_epochs=1, callbacks=callbacks[1:], profiler=own).fit(modules[1], loader())
    for without, with_profiler in (*zip(*(module.modules() for module in modules), strict=True), callbacks):
        assert vars(without).keys() == vars(with_profiler).keys()

    recorded = len(own.actions)
    make_trainer(max_epochs=1, callbacks=callbacks[1:]).fit(modules[1], loader())
    assert len(own.actions) == recorded
