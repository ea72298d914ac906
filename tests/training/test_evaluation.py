"""Validation while a model is trained, and the results of `validate`, `test` and `predict`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.small import Classifier, dataset, loader

import footplate as fp

# While a model is trained


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({}, [12, 24]),
        ({"val_check_interval": 0.25}, [3, 6, 9, 12, 15, 18, 21, 24]),
        ({"val_check_interval": 1.0}, [12, 24]),
        ({"val_check_interval": 5}, [5, 10, 17, 22]),
        ({"val_check_interval": 1, "max_epochs": 1}, list(range(1, 13))),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10, 15, 20]),
        ({"val_check_interval": 20, "check_val_every_n_epoch": None}, [20]),
        ({"check_val_every_n_epoch": 2}, [24]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, [18, 24]),
        ({"check_val_every_n_epoch": 3}, []),
        ({"accumulate_grad_batches": 4, "val_check_interval": 6}, [6, 12, 18, 24]),
    ],
)
def test_when_validation_is_due(settings, at, fit):
    assert fit(**settings)[1].validated_at == at


@pytest.mark.parametrize(("steps", "tried"), [(0, 0), (2, 2), (3, 3), (10, 4), (-1, 4)])
def test_num_sanity_val_steps(steps, tried, fit):
    made, watch = fit(num_sanity_val_steps=steps, max_epochs=1)
    assert watch.evaluated == ["sanity"] * tried + ["val"] * 4
    assert made.num_sanity_val_steps == (math.inf if steps == -1 else steps)


def test_the_sanity_check_leaves_no_metrics(make_trainer):
    seen: dict[str, Any] = {}

    class Look(fp.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.update(trainer.callback_metrics)

    make_trainer(callbacks=[Look()], max_epochs=1).fit(Classifier(), loader(), loader(40))
    assert seen == {}


def test_a_mistake_in_validation_is_found_before_training(make_trainer):
    class Mistaken(Classifier):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    trainer = make_trainer()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Mistaken(), loader(), loader(40))
    assert trainer.global_step == 0


def test_what_validation_inside_fit_makes_can_be_used_in_training(make_trainer):
    class Calibrates(Classifier):
        scale = torch.ones(1)

        def training_step(self, batch, batch_idx):
            return (self(batch[0]) * self.scale).square().mean()

        def validation_step(self, batch, batch_idx):
            self.scale = 2 * batch[0].std().reshape(1)

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Calibrates(), loader(), loader(40))
    assert trainer.status == "finished"


# Calls of their own


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_is_without_gradients_by_inference_mode_or_no_grad(inference_mode, make_trainer):
    seen = []

    class Looks(Classifier):
        def validation_step(self, batch, batch_idx):
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training))

    make_trainer(inference_mode=inference_mode).validate(Looks(), loader(40))
    assert set(seen) == {(inference_mode, False, False)}


def test_validation_reports_the_mean_over_all_rows(make_trainer):
    model, (x, y) = Classifier().eval(), dataset(47).tensors
    (result,) = make_trainer().validate(model, loader(47), verbose=False)
    with torch.no_grad():
        assert result["val_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)


def test_several_loaders_have_results_of_their_own(make_trainer):
    class Several(Classifier):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("rows", float(len(batch[0])), reduce_fx="sum")
            self.log("all", float(len(batch[0])), reduce_fx="sum", add_dataloader_idx=False)
            self.log("which", {"index": float(dataloader_idx)})

    results = make_trainer().validate(Several(), [loader(40), loader(20)], verbose=False)
    assert results == [
        {"rows/dataloader_idx_0": 40.0, "all": 60.0, "which.index/dataloader_idx_0": 0.0},
        {"rows/dataloader_idx_1": 20.0, "all": 60.0, "which.index/dataloader_idx_1": 1.0},
    ]


def test_several_loaders_need_a_step_that_is_told_which(make_trainer):
    with pytest.raises(fp.ConfigError, match=r"\(batch, batch_idx, dataloader_idx\)"):
        make_trainer().validate(Classifier(), [loader(40), loader(20)])


def test_results_hold_what_loggers_are_not_told(make_trainer):
    class Hidden(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("hidden", 1.0, logger=False)

    assert make_trainer().validate(Hidden(), loader(40), verbose=False) == [{"hidden": 1.0}]


def test_predictions_come_back_in_order_a_list_for_each_loader(make_trainer):
    class Predicts(Classifier):
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return batch[1]

    labels = dataset().tensors[1]
    one = make_trainer().predict(Predicts(), loader(45, shuffle=False))
    assert torch.equal(torch.cat(one), labels[:45])
    two = make_trainer().predict(Predicts(), [loader(45, shuffle=False), loader(20, shuffle=False)])
    assert [len(batches) for batches in two] == [5, 2]
    assert make_trainer().predict(Predicts(), loader(40), return_predictions=False) is None


def test_results_are_printed_unless_told_otherwise(make_trainer, capsys):
    make_trainer(enable_progress_bar=True).test(Classifier(), loader(40))
    assert "test_loss" in capsys.readouterr().err
    make_trainer(enable_progress_bar=True).test(Classifier(), loader(40), verbose=False)
    assert "test_loss" not in capsys.readouterr().err
