"""Callbacks: collection and order; the learning-rate monitor, the timer, the summary."""

from __future__ import annotations

import importlib
from datetime import timedelta

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate.callbacks.summary import layers, totals
from footplate.callbacks.timer import parse_duration


class Named(fp.Callback):
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def on_train_epoch_end(self, trainer, pl_module):
        self.events.append(self.name)


class Saver(Named):
    order = 2


def test_they_act_in_the_order_given_and_those_that_save_come_last(make_trainer):
    events: list[str] = []
    callbacks = [Saver("saver", events), Named("first", events), Named("second", events)]
    make_trainer(max_epochs=1, callbacks=callbacks).fit(Classifier(), loader())
    assert events == ["first", "second", "saver"]


def test_a_module_brings_callbacks_of_its_own_which_replace_those_of_the_same_type(make_trainer):
    events: list[str] = []

    class Brings(Classifier):
        def configure_callbacks(self):
            return [Saver("the module's", events)]

    trainer = make_trainer(max_epochs=1, callbacks=[Saver("the trainer's", events), Named("other", events)])
    for _ in range(2):
        trainer.fit(Brings(), loader())
    assert events == ["other", "the module's"] * 2
    trainer.fit(Classifier(), loader())
    assert events[4:] == ["other", "the trainer's"]


@pytest.mark.parametrize("group", ["footplate.callbacks_factory", "lightning.pytorch.callbacks_factory"])
def test_an_installed_package_adds_callbacks_of_its_own(group, make_trainer, tmp_path, monkeypatch):
    about = tmp_path / "watching-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: watching\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\nwatch = watching_package:make\n")
    (tmp_path / "watching_package.py").write_text(
        "import footplate as fp\n"
        "class Watching(fp.Callback): pass\n"
        "def make(): return [Watching(), fp.EarlyStopping('a')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    if group.startswith("lightning"):
        importlib.import_module("lightning.pytorch")
    names = [type(callback).__name__ for callback in make_trainer().callbacks]
    assert names[:2] == ["Watching", "EarlyStopping"]


def test_one_callback_needs_no_list(make_trainer):
    events: list[str] = []
    make_trainer(max_epochs=1, callbacks=Named("alone", events)).fit(Classifier(), loader())
    assert events == ["alone"]


@pytest.mark.parametrize("given", [fp.EarlyStopping, "early_stopping", 3])
def test_what_is_no_callback_is_refused(given, make_trainer):
    with pytest.raises(fp.ConfigError):
        make_trainer(callbacks=[given])


def test_callbacks_find_themselves_on_the_trainer(make_trainer):
    stopping, saver = fp.EarlyStopping("val_loss"), fp.ModelCheckpoint()
    trainer = make_trainer(callbacks=[stopping, saver])
    assert trainer.early_stopping_callback is stopping
    assert trainer.checkpoint_callback is saver
    assert make_trainer(enable_checkpointing=False).checkpoint_callback is None


def test_a_callback_may_log(make_trainer):
    class Logs(fp.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.log("extra", 5.0)

    trainer = make_trainer(max_epochs=1, callbacks=[Logs(), fp.EarlyStopping("extra")])
    trainer.fit(Classifier(), loader())
    assert trainer.callback_metrics["extra"] == 5.0


# LearningRateMonitor


class Rows(fp.Logger):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics, step, epoch):
        self.rows.append({"step": step, **metrics})


class Decaying(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


@pytest.mark.parametrize(("interval", "steps"), [("step", [4, 8, 12]), ("epoch", [12, 24]), (None, [4, 8, 12])])
def test_learning_rates_that_were_used_are_logged_by_step_or_epoch(interval, steps, make_trainer):
    rows = Rows()
    monitor = fp.LearningRateMonitor(interval)
    epochs = 2 if interval == "epoch" else 1
    make_trainer(max_epochs=epochs, log_every_n_steps=4, logger=rows, callbacks=[monitor]).fit(Decaying(), loader())
    rates = [(row["step"], row["lr-SGD"]) for row in rows.rows if "lr-SGD" in row]
    assert [step for step, _ in rates] == steps
    used = {
        step: step - 12 if interval == "epoch" else step - 1 for step in steps
    }  # schedulers have stepped this often
    assert all(lr == pytest.approx(0.1 * 0.5 ** used[step]) for step, lr in rates)


def test_an_epochs_learning_rate_is_the_same_after_an_interruption(make_trainer, tmp_path):
    whole, first, second = Rows(), Rows(), Rows()
    options = {"log_every_n_steps": 50, "callbacks": [fp.LearningRateMonitor("epoch")]}
    make_trainer(logger=whole, default_root_dir=tmp_path / "whole", **options).fit(Decaying(), loader())
    for rows, steps in ((first, 17), (second, -1)):
        monitors = [fp.LearningRateMonitor("epoch"), fp.ModelCheckpoint()]
        trainer = make_trainer(log_every_n_steps=50, logger=rows, callbacks=monitors, max_steps=steps)
        trainer.fit(Decaying(), loader(), ckpt_path="last")

    rates = [[row["lr-SGD"] for row in rows.rows if "lr-SGD" in row] for rows in (whole, second)]
    assert rates[1][-1:] == rates[0][-1:] != []


def test_momentum_and_weight_decay_too(make_trainer):
    monitor = fp.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    make_trainer(max_epochs=1, log_every_n_steps=12, callbacks=[monitor]).fit(Decaying(), loader())
    assert monitor.lrs["lr-SGD-momentum"] == [0.9]
    assert monitor.lrs["lr-SGD-weight_decay"] == [0.01]


def test_groups_and_several_optimizers_have_names_of_their_own(make_trainer):
    class Several(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(self.net[0].parameters())]
            first = torch.optim.SGD(groups)
            second = torch.optim.Adam([self.net[3].weight], lr=0.3)
            third = torch.optim.Adam([self.net[3].bias], lr=0.4)
            return [first, second, third], [{"scheduler": torch.optim.lr_scheduler.StepLR(third, 9), "name": "bias"}]

    monitor = fp.LearningRateMonitor()
    make_trainer(max_epochs=1, callbacks=[monitor]).fit(Several(), loader())
    assert monitor.lrs == {"lr-SGD/pg1": [0.1], "lr-SGD/pg2": [0.2], "lr-Adam": [0.3], "bias": [0.4]}


def test_an_unknown_interval_is_refused():
    with pytest.raises(fp.ConfigError, match='expected "step" or "epoch"'):
        fp.LearningRateMonitor("batch")


# Timer


def test_a_timer_without_a_limit_only_measures(make_trainer):
    timer = fp.Timer()
    trainer = make_trainer(callbacks=[timer], max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(), loader(20))
    assert timer.time_remaining() is None
    assert timer.time_elapsed("train") > timer.time_elapsed("validate") > 0.0
    assert timer.time_elapsed("test") == 0.0
    trainer.test(Classifier(), loader(20), verbose=False)
    assert timer.time_elapsed("test") > 0.0


def test_a_timer_remembers_earlier_attempts():
    first = fp.Timer("00:00:01:00")
    first._elapsed_s["train"] = 45.0
    second = fp.Timer("00:00:01:00")
    second.load_state_dict(first.state_dict())
    assert second.time_remaining() == 15.0


def test_a_timer_may_check_at_the_end_of_epochs_only(make_trainer):
    trainer = make_trainer(callbacks=[fp.Timer({"microseconds": 1}, interval="epoch", verbose=False)], max_epochs=5)
    with pytest.raises(fp.ConfigError, match='expected "step" or "epoch"'):
        fp.Timer(interval="minute")
    trainer.fit(Classifier(), loader())
    assert trainer.current_epoch <= 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("01:00:00:01", timedelta(days=1, seconds=1)),
        ({"hours": 2}, timedelta(hours=2)),
        (timedelta(minutes=3), timedelta(minutes=3)),
    ],
)
def test_durations(given, expected):
    assert parse_duration(given) == expected


# ModelSummary


def test_the_summary_counts_each_layer_and_what_is_frozen():
    model = Classifier()
    model.net[0].requires_grad_(False)
    assert layers(model, 1) == [("net", "Sequential", 195)]
    assert [name for name, _, _ in layers(model, -1)] == ["net", "net.0", "net.1", "net.2", "net.3"]
    assert layers(model, 0) == []
    assert totals(model) == (195, 51, 780)


def test_a_lazy_layer_is_counted_as_nothing_yet():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    assert totals(model) == (8, 8, 32)
