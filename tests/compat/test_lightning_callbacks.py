"""Lightning's callbacks on our trainer. test_lightning_equivalence.py compares their effect on weights."""

from __future__ import annotations

import contextlib
import copy
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loggers.logger import DummyLogger
from models.optimising import Backbone
from models.recording import quiet
from models.zoo import Evaluated, Plain, loaders, two_val_loaders

import footplate as fp
from footplate import checkpoint
from footplate.compat.lightning.callbacks import translate_callbacks

CHECKPOINTS = {
    "the best two": {"monitor": "val_loss", "save_top_k": 2},
    "all": {"save_top_k": -1},
    "by step": {"every_n_train_steps": 4, "save_top_k": -1},
    "the latest": {},
    "named": {"filename": "{epoch:02d}-{val_loss:.2f}", "monitor": "val_loss", "save_top_k": -1},
    "the best of max": {"monitor": "val_loss", "mode": "max", "save_top_k": 1},
    "every second epoch": {"every_n_epochs": 2, "save_top_k": -1},
}


@pytest.mark.parametrize("arguments", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_model_checkpoint_keeps_what_lightnings_keeps(arguments: dict[str, Any], tmp_path: Path) -> None:
    def run(make: Any, directory: Path) -> theirs.ModelCheckpoint:
        torch.manual_seed(0)
        callback = theirs.ModelCheckpoint(dirpath=directory, **arguments)
        with quiet():
            trainer = make(
                accelerator="cpu", max_epochs=4, callbacks=[callback], logger=False, enable_progress_bar=False,
                enable_model_summary=False, default_root_dir=str(tmp_path),
            )  # fmt: skip
            trainer.fit(Plain(), *loaders())
        return callback

    expected, actual = run(pl.Trainer, tmp_path / "lightning"), run(fp.Trainer, tmp_path / "footplate")

    def kept(directory: Path) -> set[str]:
        return {path.name for path in directory.glob("*.ckpt") if path.name not in ("best.ckpt", "last.ckpt")}

    assert kept(tmp_path / "footplate") == kept(tmp_path / "lightning") != set()
    assert Path(actual.best_model_path).name == Path(expected.best_model_path).name
    if arguments.get("monitor"):
        assert float(actual.best_model_score) == pytest.approx(float(expected.best_model_score), rel=1e-6)
        assert {Path(path).name for path in actual.best_k_models} == {
            Path(path).name for path in expected.best_k_models
        }
        assert Path(actual.kth_best_model_path).name == Path(expected.kth_best_model_path).name


def test_callbacks_that_save_come_last(make_trainer: Any) -> None:
    first, second, rates = theirs.ModelCheckpoint(), theirs.ModelCheckpoint(monitor="val_loss"), pl.Callback()
    given = [first, rates, second]
    assert [callback for callback in make_trainer(callbacks=given).callbacks if callback in given] == [
        rates,
        first,
        second,
    ]


def test_the_users_objects_are_the_trainers_and_learn(make_trainer: Any) -> None:
    stopping = theirs.EarlyStopping("val_loss", patience=1, stopping_threshold=10.0)
    rates, timer = theirs.LearningRateMonitor("epoch"), theirs.Timer(duration=timedelta(hours=1))
    saver = theirs.ModelCheckpoint(monitor="val_loss", save_last=True)
    given = [stopping, rates, timer, saver]

    runner = make_trainer(callbacks=given, logger=True)
    runner.fit(Plain(), *loaders())

    assert all(callback in runner.callbacks for callback in given)
    assert (runner.checkpoint_callback, runner.early_stopping_callback) == (saver, stopping)
    assert stopping.stopping_reason is EarlyStoppingReason.STOPPING_THRESHOLD
    assert rates.lrs["lr-SGD"] == [0.1]
    assert 0 < timer.time_elapsed("train") < 60
    assert isinstance(saver.best_model_score, torch.Tensor)
    assert isinstance(saver.dirpath, str)
    assert Path(saver.last_model_path).name == "last.ckpt"
    assert Path(saver.last_model_path).resolve() == Path(saver.best_model_path).resolve()
    saver.to_yaml()
    assert yaml.safe_load((Path(saver.dirpath) / "best_k_models.yaml").read_text()) == {
        saver.best_model_path: float(saver.best_model_score)
    }


def test_a_saver_that_a_trainer_has_used_is_as_it_was_for_the_next(make_trainer: Any) -> None:
    saver = theirs.ModelCheckpoint(monitor="val_loss")
    make_trainer(callbacks=[saver]).fit(Plain(), *loaders())
    before = saver.best_model_path, float(saver.best_model_score)

    make_trainer(callbacks=[saver])

    assert (saver.best_model_path, float(saver.best_model_score)) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_callbacks_that_a_trainer_has_used_can_be_copied(copied: Any, make_trainer: Any) -> None:
    given = [theirs.ModelCheckpoint(monitor="val_loss"), theirs.EarlyStopping("val_loss"), theirs.TQDMProgressBar()]
    make_trainer(callbacks=given).fit(Plain(), *loaders())

    saver, stopping, bar = map(copied, given)

    assert (saver.best_model_path, stopping.best_score) == (given[0].best_model_path, given[1].best_score)
    assert [type(made) for made in (saver, stopping, bar)] == [type(callback) for callback in given]
    assert isinstance(bar, theirs.TQDMProgressBar)
    assert isinstance(saver, fp.ModelCheckpoint)


def test_arguments_of_a_model_checkpoint_survive() -> None:
    interval = theirs.ModelCheckpoint(monitor="a", mode="max", save_last=True, train_time_interval=timedelta(minutes=5))
    never = theirs.ModelCheckpoint(every_n_epochs=0, save_on_exception=True)

    translate_callbacks([interval, never])

    assert (interval.save_last, interval.mode, interval.every_n_epochs) == (True, "max", 0)
    assert vars(interval)["train_time_interval"] == timedelta(minutes=5)
    assert (never.every_n_epochs, never.save_on_exception) == (0, True)


def test_a_subclass_is_called_and_calls_ours(make_trainer: Any) -> None:
    class Counting(theirs.ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "{epoch}-newest"

        def __init__(self) -> None:
            super().__init__(monitor="val_loss", save_last=True, save_top_k=-1)
            self.saves = 0

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            self.saves += 1

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch != 1:
                super().on_train_epoch_end(trainer, pl_module)

    class AtTheEnd(theirs.EarlyStopping):  # from Lightning's documentation
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pass

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._run_early_stopping_check(trainer)

    saver, stopping = Counting(), AtTheEnd("val_loss", stopping_threshold=10.0)
    runner = make_trainer(callbacks=[saver, stopping], max_epochs=3)
    runner.fit(Plain(), *loaders())

    assert runner.current_epoch == 3
    assert stopping.stopped_epoch == 3
    assert saver.saves == len(saver.best_k_models) == 2
    assert Path(saver.last_model_path).name == "epoch=2-newest.ckpt"
    names = {path.name for path in Path(saver.dirpath).glob("*newest.ckpt")}
    assert names == {"epoch=2-newest.ckpt"}


def test_a_subclass_whose_method_would_never_be_called_is_refused() -> None:
    class Renaming(theirs.ModelCheckpoint):
        def format_checkpoint_name(self, *args: Any, **kwargs: Any) -> str:
            return "mine"

    class Suffix(theirs.ModelCheckpoint):
        FILE_EXTENSION = ".mine"

    with pytest.raises(fp.ConfigError, match=r"Renaming overrides ModelCheckpoint\.format_checkpoint_name\(\)"):
        fp.Trainer(max_epochs=1, callbacks=[Renaming()])
    with pytest.raises(fp.ConfigError, match=r"Suffix\.FILE_EXTENSION is"):
        fp.Trainer(max_epochs=1, callbacks=[Suffix()])


def test_a_progress_bar_of_yours_shows_what_it_wants(make_trainer: Any) -> None:
    class Mine(theirs.TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            seen.append(super().get_metrics(trainer, pl_module))
            return seen[-1]

    class Showing(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("shown", 1.0, prog_bar=True)

    seen: list[dict[str, Any]] = []
    bar = Mine()
    make_trainer(callbacks=[bar], enable_progress_bar=True, logger=True).fit(Showing(), *loaders())

    assert seen[-1]["shown"] == 1.0
    assert bar.train_progress_bar.n == bar.train_progress_bar.total == 10


def test_figures_of_the_device_are_in_the_rows_that_are_reported(make_trainer: Any) -> None:
    monitor = theirs.DeviceStatsMonitor()
    runner = make_trainer(callbacks=[monitor], log_every_n_steps=10, max_epochs=1)
    runner.fit(Plain(), *loaders())

    assert set(runner.callback_metrics) >= {
        f"DeviceStatsMonitor.on_train_batch_{when}/cpu_percent" for when in ("start", "end")
    }


@pytest.mark.parametrize("fails", [True, False])
def test_a_checkpoint_of_an_exception_is_there_after_one_alone(fails: bool, make_trainer: Any, tmp_path: Path) -> None:
    class Failing(Plain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if fails and batch_idx == 3:
                raise RuntimeError("a mistake")

    saver = theirs.OnExceptionCheckpoint(tmp_path / "failed")
    with contextlib.nullcontext() if not fails else pytest.raises(RuntimeError, match="a mistake"):
        make_trainer(callbacks=[saver], enable_checkpointing=False).fit(Failing(), *loaders())

    assert checkpoint.exists(saver.ckpt_path) is fails
    assert not fails or checkpoint.load(saver.ckpt_path)["global_step"] == 3


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_timer_of_no_time_stops_before_the_first_step(interval: str, make_trainer: Any) -> None:
    runner = make_trainer(callbacks=[theirs.Timer(timedelta(0), interval=interval)])
    runner.fit(Plain(), *loaders())
    assert runner.global_step == 0


def test_callbacks_that_the_module_configures_are_translated_too(make_trainer: Any) -> None:
    class Configures(Plain):
        def configure_callbacks(self) -> Any:
            return [theirs.EarlyStopping("val_loss", stopping_threshold=10.0), theirs.LambdaCallback()]

    runner = make_trainer(max_epochs=9)
    runner.fit(Configures(), *loaders())

    assert isinstance(runner.early_stopping_callback, theirs.EarlyStopping)
    assert runner.current_epoch == 1


def test_fine_tuning_that_is_resumed_goes_on_learning_what_was_unfrozen(tmp_path: Path) -> None:
    def run(directory: Path, epochs: int, resume: Any = None) -> Any:
        torch.manual_seed(0)
        module = Backbone()
        with quiet():
            trainer = fp.Trainer(
                accelerator="cpu", max_epochs=epochs, callbacks=[theirs.BackboneFinetuning(1)], logger=False, seed=1,
                default_root_dir=str(directory), enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, *loaders(), ckpt_path=resume)
        assert len(trainer.optimizers[0].param_groups) == 2  # the second was added in epoch 1
        return module

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, "last")

    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_weight_averaging_resumes_with_the_weights_it_trained(make_trainer: Any, tmp_path: Path) -> None:
    def run(directory: str, epochs: int, resume: str | None = None) -> Any:
        torch.manual_seed(0)
        module = Plain()
        averaging = theirs.EMAWeightAveraging(decay=0.9)
        runner = make_trainer(max_epochs=epochs, callbacks=[averaging], default_root_dir=tmp_path / directory)
        runner.fit(module, *loaders(), ckpt_path=resume)
        return module

    whole = run("whole", 3)
    run("parts", 2)
    resumed = run("parts", 3, "last")

    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_weight_averaging_gives_the_weights_of_the_callback_of_our_own(make_trainer: Any, tmp_path: Path) -> None:
    def run(averaging: Any, directory: str) -> Any:
        torch.manual_seed(0)
        module = Plain()
        make_trainer(max_epochs=2, callbacks=[averaging], default_root_dir=tmp_path / directory).fit(module, *loaders())
        # Theirs averages the count of batches, too, and rounds it; ours leaves it what it is.
        return {name: value for name, value in module.state_dict().items() if value.is_floating_point()}

    expected = run(theirs.EMAWeightAveraging(decay=0.9), "theirs")
    torch.testing.assert_close(run(fp.EMAWeightAveraging(decay=0.9), "ours"), expected)


def test_spike_detection_stops_at_a_bad_loss(make_trainer: Any) -> None:
    from lightning.fabric.utilities.spike import TrainingSpikeException

    class Spikes(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1e6 if batch_idx == 8 else 1)

    with pytest.raises(TrainingSpikeException):
        make_trainer(callbacks=[theirs.SpikeDetection(warmup=3, rtol=3.0)]).fit(Spikes(), *loaders())


class Writer(theirs.BasePredictionWriter):
    """Keeps the values that it should write."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[tuple[Any, ...]] = []
        self.epoch: tuple[Any, Any] = ([], [])

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.batches.append((indices, len(prediction), batch_idx, dataloader_idx))
        self.indices_so_far = trainer.predict_loop.epoch_batch_indices

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = (predictions, batch_indices)


@pytest.mark.parametrize("interval", ["batch", "batch_and_epoch"])
@pytest.mark.parametrize("make", [loaders, two_val_loaders], ids=["one loader", "several loaders"])
def test_prediction_writers_are_given_what_lightning_gives_them(
    make_trainer: Any, make: Any, interval: str, tmp_path: Path
) -> None:
    class Predicts(Evaluated):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self(batch[0])

    torch.manual_seed(0)
    module, expected, actual = Predicts(), Writer(interval), Writer(interval)
    with quiet():
        pl.Trainer(
            accelerator="cpu", logger=DummyLogger(), callbacks=[expected], enable_progress_bar=False,
            default_root_dir=str(tmp_path),
        ).predict(module, make()[1])  # fmt: skip
    make_trainer(callbacks=[actual]).predict(module, make()[1])

    assert actual.batches == expected.batches
    assert actual.indices_so_far == expected.indices_so_far
    assert actual.epoch[1] == expected.epoch[1]
    for mine, their in zip(flat(actual.epoch[0]), flat(expected.epoch[0]), strict=True):
        assert torch.equal(mine, their)


def flat(predictions: Any) -> list[Any]:
    return [
        item for prediction in predictions for item in (prediction if isinstance(prediction, list) else [prediction])
    ]


def test_state_of_ones_own_callback_is_saved_and_resumed(make_trainer: Any) -> None:
    class Counts(pl.Callback):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.batches = state_dict["batches"]

    first, second = Counts(), Counts()
    make_trainer(max_epochs=1, callbacks=[first]).fit(Plain(), *loaders())
    make_trainer(max_epochs=2, callbacks=[second]).fit(Plain(), *loaders(), ckpt_path="last")

    assert (first.batches, second.batches) == (10, 20)


def test_ones_own_checkpoint_callback_saves_when_it_likes(make_trainer: Any, tmp_path: Path) -> None:
    class Saves(theirs.Checkpoint):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"mine-{trainer.current_epoch}.ckpt")

    make_trainer(max_epochs=2, callbacks=[Saves()], enable_checkpointing=False).fit(Plain(), *loaders())

    assert sorted(path.name for path in tmp_path.glob("mine-*")) == ["mine-0.ckpt", "mine-1.ckpt"]
    make_trainer(max_epochs=3).fit(Plain(), *loaders(), ckpt_path=tmp_path / "mine-1.ckpt")


BY_EPOCH: dict[str, Any] = {
    "accumulation": lambda: theirs.GradientAccumulationScheduler({1: 3, 3: 2}),
    "averaging": lambda: theirs.StochasticWeightAveraging(0.05, 0.5, annealing_epochs=3),
    "averaging, linear": lambda: theirs.StochasticWeightAveraging([0.02], 2, 2, "linear"),
}


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
@pytest.mark.parametrize("make", BY_EPOCH.values(), ids=BY_EPOCH)
def test_callbacks_that_act_by_epoch_end_with_lightnings_weights(tmp_path: Path, make: Any, norm: bool) -> None:
    class Trained(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(8) if norm else torch.nn.Tanh(), torch.nn.Linear(8, 3))
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if torch.is_grad_enabled() and self.trainer.current_epoch < 6:
                self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    modules = [Trained(), Trained()]
    modules[1].load_state_dict(modules[0].state_dict())
    callbacks = [make(), make()]
    for module, kind, callback in zip(modules, (pl.Trainer, fp.Trainer), callbacks, strict=True):
        with quiet():
            kind(
                accelerator="cpu", max_epochs=6, callbacks=[callback], logger=False, enable_progress_bar=False,
                enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(tmp_path),
            ).fit(module, loaders()[0])  # fmt: skip
    assert modules[0].rates == modules[1].rates
    expected = dict(modules[0].state_dict())
    if norm and isinstance(callbacks[0], theirs.StochasticWeightAveraging):  # whose last step takes old gradients there
        expected |= dict(callbacks[0]._average_model.named_parameters())  # pyright: ignore[reportOptionalMemberAccess]
    assert expected.keys() == modules[1].state_dict().keys()
    for name, value in expected.items():
        assert torch.equal(value, modules[1].state_dict()[name]), name
