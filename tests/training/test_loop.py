"""The loop: events between two steps, their order, and the ends of epochs."""

from __future__ import annotations

import itertools
import logging
import weakref
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import Classifier, loader

import footplate as fp
from footplate.training.multi_step import chunks


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_hold_every_batch_once_in_order_and_only_the_last_is_shorter(batches, size):
    groups = list(chunks(iter(range(batches)), size))
    assert list(itertools.chain(*groups)) == list(range(batches))
    assert all(len(chunk) == size for chunk in groups[:-1])
    assert not groups or 1 <= len(groups[-1]) <= size


def test_chunks_ask_for_no_batch_ahead_of_time():
    asked = []
    source = (asked.append(index) or index for index in range(10))
    iterator = chunks(source, 2)
    next(iterator)
    assert asked == [0, 1]


class Short:
    """Has length twelve, but yields nine."""

    def __len__(self) -> int:
        return 12

    def __iter__(self):
        return itertools.islice(iter(loader()), 9)


def test_a_loader_that_gives_less_than_it_says_is_named_and_the_window_is_ended(make_trainer, caplog):
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=4)
    with caplog.at_level(logging.WARNING):
        trainer.fit(Classifier(), Short())
    assert trainer.global_step == 6
    assert "ended after 9 of 12 batches" in caplog.text


class Order(fp.Callback):
    """Records the events between the steps of a run."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.events.append(f"callback, lr {trainer.optimizers[0].param_groups[0]['lr']:.2f}")

    def on_validation_start(self, trainer, pl_module):
        self.events.append("validation")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.events.append("save")


class Notes(fp.Logger):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def log_metrics(self, metrics, step, epoch):
        self.events.append("log " + " ".join(sorted(metrics)))


class Decays(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("second", loss * 2)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_between_steps_schedulers_then_callbacks_then_loggers_then_savers_then_validation(make_trainer):
    events: list[str] = []
    saver = fp.ModelCheckpoint(every_n_train_steps=1, save_last=False)
    make_trainer(
        max_epochs=1, limit_train_batches=2, val_check_interval=1, log_every_n_steps=1, num_sanity_val_steps=0,
        callbacks=[Order(events), saver], logger=Notes(events),
    ).fit(Decays(), loader(), loader(10))  # fmt: skip
    assert events[:5] == ["callback, lr 0.50", "log second train_loss_step", "save", "validation", "log val_loss"]
    assert events[5] == "callback, lr 0.25"
    assert events[-1] == "log train_loss_epoch"


def test_a_metric_is_in_the_results_of_the_loaders_it_was_logged_for(make_trainer):
    class Tests(Classifier):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("a", dataloader_idx + 1.0)
            self.log("by_step", 5.0, on_step=True, on_epoch=True)
            self.log(f"alone_{dataloader_idx}", 3.0, add_dataloader_idx=False)
            self.log("shared", 2.0 * dataloader_idx, add_dataloader_idx=False)

        def on_test_epoch_end(self):
            self.log("all", 4.0)

    assert make_trainer().test(Tests(), [loader(20), loader(20)], verbose=False) == [
        {"a/dataloader_idx_0": 1.0, "by_step_epoch/dataloader_idx_0": 5.0, "alone_0": 3.0, "shared": 1.0, "all": 4.0},
        {"a/dataloader_idx_1": 2.0, "by_step_epoch/dataloader_idx_1": 5.0, "alone_1": 3.0, "shared": 1.0, "all": 4.0},
    ]


def test_an_epochs_order_of_batches_is_that_of_the_loader(make_trainer):
    seen = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append((batch_idx, batch[1].tolist()))
            return super().training_step(batch, batch_idx)

    batches = list(loader(40))
    make_trainer(max_epochs=1).fit(Looks(), batches)
    assert seen == [(index, y.tolist()) for index, (_, y) in enumerate(batches)]


def test_training_goes_on_in_training_mode_after_each_validation(make_trainer):
    modes = set()

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            modes.add((self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().training_step(batch, batch_idx)

    make_trainer(max_epochs=1, val_check_interval=3).fit(Looks(), loader(), loader(20))
    assert modes == {(True, True, False)}


@pytest.mark.parametrize("accumulate", [1, 5])
def test_losses_do_not_depend_on_how_often_they_are_logged_or_validated(accumulate, make_trainer):
    def run(**settings) -> list[str]:
        losses = []

        class Looks(fp.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                losses.append(float(outputs).hex())

        torch.manual_seed(0)
        make_trainer(accumulate_grad_batches=accumulate, callbacks=[Looks()], **settings).fit(
            Classifier(), loader(), loader(20)
        )
        return losses

    assert run(log_every_n_steps=1, val_check_interval=2) == run(log_every_n_steps=50, num_sanity_val_steps=0)


class Validates(Classifier):
    """Records the batches after which it is validated."""

    def __init__(self):
        super().__init__()
        self.after = []

    def on_validation_start(self):
        self.after.append(self.trainer.progress.batches)


class Passes(fp.Callback):
    """Advances the loop's clock by some seconds after certain batches, and saves after the last of them."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        batches = trainer.progress.batches
        if batches in self.seconds:
            trainer.run.loop._validated_s -= self.seconds[batches]
        if batches == max(self.seconds) + 1:
            trainer.save_checkpoint(trainer.run_dir / "cut.ckpt")


@pytest.mark.parametrize("interval", ["01:00:00", "00:01:00:00", {"minutes": 60}, timedelta(hours=1)])
def test_validation_goes_by_the_clock_over_epochs_and_attempts(make_trainer, interval):
    arguments = {"max_epochs": 3, "val_check_interval": interval, "num_sanity_val_steps": 0}
    first = Validates()
    make_trainer(**arguments, callbacks=[Passes({3: 3601.0, 5: 1800.0, 14: 1800.0, 17: 1000.0})]).fit(
        first, loader(), loader(20)
    )
    assert first.after == [3, 14]
    again = Validates()
    trainer = make_trainer(**arguments, callbacks=[Passes({20: 2601.0})])
    trainer.fit(again, loader(), loader(20), ckpt_path=trainer.run_dir / "cut.ckpt")
    assert again.after == [20]


@pytest.mark.parametrize("interval", ["1:00", "an hour", {"months": 1}, timedelta(0)])
def test_a_duration_between_validations_that_is_none_is_refused(make_trainer, interval):
    with pytest.raises(fp.ConfigError, match=r"val_check_interval=.*expected"):
        make_trainer(val_check_interval=interval)


def test_during_a_step_nothing_of_the_batch_before_is_kept(make_trainer):
    """On a GPU, it would take the memory of a batch and of what `training_step` returns."""

    class Watches(Classifier):
        earlier = ()

        def training_step(self, batch, batch_idx):
            assert all(tensor() is None for tensor in self.earlier), batch_idx
            logits = self(batch[0])
            self.earlier = (weakref.ref(batch[0]), weakref.ref(logits))
            return {"loss": torch.nn.functional.cross_entropy(logits, batch[1]), "logits": logits}

    def batches():
        for _ in range(6):
            yield torch.randn(10, 8), torch.randint(3, (10,))

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return batches()

    module = Watches()
    make_trainer(max_epochs=1).fit(module, torch.utils.data.DataLoader(Endless(), batch_size=None))
    assert len(module.earlier) == 2
