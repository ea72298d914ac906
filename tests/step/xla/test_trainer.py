"""`Trainer(accelerator="xla")` trains as `accelerator="cpu"` does, on one device and on several."""

from __future__ import annotations

import logging

import pytest
import torch
from models.small import Classifier, WarmingUp, dataset, loader
from torch import nn

import footplate as fp
from footplate import checkpoint
from footplate.core.device_scalar import DeviceScalar
from footplate.step.xla.runtime import program_cache
from step.xla.trained import Steady, equal, worst

# Rows of training and of validation. Each form of batch is another capture.
WHOLE = 60, 20  # batches of 10
ODD = 115, 35  # and one of 5


def fitted(make_trainer, model=None, epochs=2, rows=WHOLE, ckpt_path=None, batch_size=10, **kwargs):
    torch.manual_seed(0)
    model = Steady() if model is None else model
    trainer = make_trainer(max_epochs=epochs, log_every_n_steps=4, **kwargs)
    trainer.fit(model, loader(rows[0], batch_size), loader(rows[1], shuffle=False), ckpt_path=ckpt_path)
    return model, trainer


@pytest.mark.parametrize(("devices", "every"), [(1, "step"), pytest.param(8, "plateau", marks=pytest.mark.slow)])
def test_training_is_that_of_eager_torch(devices, every, make_trainer, tmp_path):
    torch.manual_seed(0)
    runs = []
    for name in ("cpu", "xla"):
        torch.manual_seed(0)
        runs.append(
            fitted(
                make_trainer, Steady(every), rows=ODD, accelerator=name, devices=devices if name == "xla" else 1,
                precision="64-true", gradient_clip_val=0.5, logger=fp.CSV(), default_root_dir=tmp_path / name,
            )
        )  # fmt: skip
    (wanted, eager), (trained, compiled) = runs
    assert worst(trained, wanted) < 1e-6
    assert compiled.global_step == eager.global_step == 24
    theirs, mine = eager.callback_metrics, compiled.callback_metrics
    assert mine.keys() == theirs.keys()
    assert all(float(mine[name]) == pytest.approx(float(theirs[name]), rel=1e-6) for name in theirs)
    rows = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("cpu", "xla")]
    assert len(rows[0]) == len(rows[1])
    assert rows[0][0] == rows[1][0]


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_learning_rate_of_zero_changes_no_weight(name, make_trainer):
    models = []
    for accelerator in "cpu", "xla":
        torch.manual_seed(0)
        model, _ = fitted(make_trainer, WarmingUp(name), accelerator=accelerator, devices=1, precision="64-true")
        models.append(model)
    assert worst(*models) < 1e-6


@pytest.mark.slow
def test_a_run_goes_from_torch_to_xla_and_back_with_an_unbroken_curve(make_trainer, tmp_path):
    class Losses(fp.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seen.append(float(outputs))

    def train(root, model, legs):
        losses = Losses()
        for epoch, (accelerator, devices) in enumerate(legs):
            _, made = fitted(
                make_trainer, model(), epoch + 1, ckpt_path="last", accelerator=accelerator, devices=devices,
                callbacks=[losses], default_root_dir=tmp_path / root,
            )  # fmt: skip
        return made, losses.seen

    def adamw():
        torch.manual_seed(0)
        model = Classifier()
        model.net[2] = nn.Identity()
        return model

    there, curve = train("mixed", adamw, [("cpu", 1), ("xla", 2), ("cpu", 1)])
    here, wanted = train("cpu", adamw, [("cpu", 1)] * 3)
    assert len(curve) == len(wanted) == 18
    assert curve == pytest.approx(wanted, rel=1e-5)
    assert worst(there.module, here.module) < 1e-5


@pytest.mark.slow
def test_a_run_that_was_cut_off_continues_bit_for_bit(make_trainer, tmp_path):
    """With dropout, whose draws depend only on the seed and the step."""
    torch.manual_seed(3)
    initial = Classifier()

    def train(root, **kwargs):
        model = Classifier()
        model.load_state_dict(initial.state_dict())
        _, made = fitted(
            make_trainer,
            model,
            ckpt_path="last",
            accelerator="xla",
            devices=2,
            default_root_dir=tmp_path / root,
            **kwargs,
        )
        state = checkpoint.load(checkpoint.newest([made.checkpoint_callback.dirpath]))
        return {key: state[key] for key in ("state_dict", "optimizer_states", "progress", "lr_schedulers", "metrics")}

    whole = train("whole")
    train("cut", max_steps=9)  # in the second epoch
    assert equal(train("cut"), whole)


def test_between_two_reports_nothing_is_read_from_the_devices(make_trainer, monkeypatch):
    from footplate.step.xla.runtime.device_values import OnDevice

    reads, steps = [], []
    read = OnDevice.read

    def counted(values):
        reads.append(len(steps))
        return read(values)

    class Quiet(fp.EarlyStopping):
        """A callback that the trainer takes for one of Footplate's own."""

        def on_train_batch_end(self, *_):
            steps.append(None)

    Quiet.__module__ = "footplate.callbacks.early_stopping"
    monkeypatch.setattr(OnDevice, "read", staticmethod(counted))
    trainer = make_trainer(
        accelerator="xla", max_epochs=1, log_every_n_steps=4, num_sanity_val_steps=0,
        callbacks=Quiet("train_loss"), logger=fp.CSV(), enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Steady(), loader(120))
    assert len(steps) == 12
    assert reads
    assert {step for step in reads if step % 4 not in (0, 3)} == set()


def test_a_hook_sees_the_weights_of_its_step_and_may_change_them(make_trainer):
    class Zeroes(fp.Callback):
        """Reads the weights after each step. At the third, it sets the bias without a change of torch's version counter."""

        def __init__(self):
            self.norms, self.biases = [], []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert isinstance(outputs, torch.Tensor)
            self.norms.append(float(pl_module.net[0].weight.detach().norm()))
            self.biases.append(pl_module.net[3].bias.detach().clone())
            if len(self.norms) == 3:
                pl_module.net[3].bias.data.fill_(7.0)

    seen = {}
    for name in ("cpu", "xla"):
        seen[name] = Zeroes()
        fitted(make_trainer, epochs=1, accelerator=name, callbacks=[seen[name]], enable_checkpointing=False)
    assert len(set(seen["xla"].norms)) == 6
    assert seen["xla"].norms == pytest.approx(seen["cpu"].norms, rel=1e-5)
    assert float((seen["xla"].biases[3] - 7.0).abs().max()) < 1.0
    for mine, theirs in zip(seen["xla"].biases, seen["cpu"].biases, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_averaged_weights_are_those_of_eager_torch(make_trainer):
    runs = [
        fitted(
            make_trainer, epochs=1, accelerator=name, callbacks=[fp.EMAWeightAveraging(0.5)],
            enable_checkpointing=False,
        )
        for name in ("cpu", "xla")
    ]  # fmt: skip
    assert worst(runs[1][0], runs[0][0]) < 1e-5
    val = [float(made.callback_metrics["val_loss"]) for _, made in runs]
    assert val[1] == pytest.approx(val[0], rel=1e-5)


@pytest.mark.slow
def test_what_stops_and_saves_does_so_as_with_eager_torch(make_trainer, tmp_path):
    ends = []
    for name in ("cpu", "xla"):
        stop = fp.EarlyStopping("val_loss", stopping_threshold=0.5, patience=20)
        best = fp.ModelCheckpoint(monitor="val_loss", save_top_k=2)
        _, made = fitted(
            make_trainer, epochs=30, accelerator=name, callbacks=[stop, best], val_check_interval=5, limit_val_batches=2,
            min_steps=15, default_root_dir=tmp_path / name,
        )  # fmt: skip
        ends.append((made.global_step, [path.rsplit("/", 1)[-1] for path in best.best_k_models], stop.stopped_epoch))
    assert ends[0] == ends[1]
    assert 15 <= ends[0][0] < 180


def test_another_form_of_batch_compiles_once_more_and_says_so(make_trainer, caplog):
    with caplog.at_level(logging.WARNING, "footplate"):
        _, made = fitted(make_trainer, rows=ODD, accelerator="xla", enable_checkpointing=False)
    again = [record.getMessage() for record in caplog.records if "compiled again" in record.getMessage()]
    assert len(again) == 2  # training and validation, for their last batches
    assert "Steady.training_step was compiled again (program 2" in again[0]
    assert "float32[5, 8], int64[5]; before: float32[10, 8]" in again[0]
    assert len(made.step.compilations) == 4


def test_an_attribute_that_a_hook_changes_counts_from_then_on(make_trainer, caplog):
    class Scaled(Steady):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.scale

        def on_train_epoch_start(self):
            self.scale = 1.0 / (1 + self.current_epoch)

    with caplog.at_level(logging.WARNING, "footplate"):
        runs = []
        for name in ("cpu", "xla"):
            torch.manual_seed(0)
            runs.append(fitted(make_trainer, Scaled(), accelerator=name, enable_checkpointing=False)[0])
    assert worst(runs[1], runs[0]) < 1e-5
    assert "self.scale was 1.0 when the step was captured and is 0.5 now" in caplog.text


def test_a_parameter_that_is_frozen_on_the_way_stays(make_trainer):
    class Freezes(fp.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net[0].weight.requires_grad_(trainer.current_epoch == 0)
            self.then = pl_module.net[0].weight.detach().clone()

    callback = Freezes()
    model, _ = fitted(make_trainer, accelerator="xla", callbacks=[callback], enable_checkpointing=False)
    assert torch.equal(model.net[0].weight, callback.then)


@pytest.mark.slow
def test_a_setting_of_the_optimizer_that_changes_in_every_step_is_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(program_cache, "MOST_CHANGES", 3)

    class Decays(torch.optim.lr_scheduler.StepLR):
        def step(self, *args):
            super().step(*args)
            for group in self.optimizer.param_groups:
                group["weight_decay"] *= 0.9

    class Decaying(Steady):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)
            return [optimizer], [{"scheduler": Decays(optimizer, 1), "interval": "step"}]

    with pytest.raises(fp.ConfigError, match=r"compiled 4 times.* weight_decay of SGD's group 0 was"):
        fitted(make_trainer, Decaying(), accelerator="xla", enable_checkpointing=False)


class Predicts(Steady):
    def predict_step(self, batch, batch_idx):
        logits = self(batch[0])
        return {"class": logits.argmax(1), "logits": logits}


@pytest.mark.parametrize("devices", [1, 8])
def test_predictions_become_the_table_that_eager_torch_gives(devices, make_trainer, tmp_path):
    torch.manual_seed(0)
    model = Predicts().eval()
    table = make_trainer(accelerator="xla", devices=devices).predict(
        model, loader(47, 16, shuffle=False), output=tmp_path / "out"
    )
    read = table.head(100)
    with torch.no_grad():
        expected = model(dataset(47).tensors[0])
    assert read["class"].to_pylist() == expected.argmax(1).tolist()
    torch.testing.assert_close(torch.tensor(read["logits"].to_pylist()), expected)


def test_validation_and_testing_stand_by_themselves(make_trainer):
    torch.manual_seed(0)
    model = Steady()
    for stage in ("validate", "test"):
        results = [
            getattr(make_trainer(accelerator=name, devices=devices), stage)(model, loader(35, shuffle=False))[0]
            for name, devices in (("cpu", 1), ("xla", 2))
        ]
        assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_parameters_in_bfloat16_learn_as_with_eager_torch(make_trainer):
    ends = []
    for name in ("cpu", "xla"):
        _, made = fitted(make_trainer, accelerator=name, precision="bf16-true", enable_checkpointing=False)
        assert made.module.net[0].weight.dtype == torch.bfloat16
        ends.append(float(made.callback_metrics["train_loss_epoch"]))
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


class Normed(Steady):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


def test_batch_norm_that_is_synchronised_sees_the_whole_batch(make_trainer):
    modules = []
    for name, kwargs in (("cpu", {}), ("xla", {"devices": 4, "sync_batchnorm": True})):
        torch.manual_seed(0)
        modules.append(
            fitted(
                make_trainer, Normed(), rows=(96, 20), batch_size=16, accelerator=name, precision="64-true",
                enable_checkpointing=False, **kwargs,
            )[0]
        )  # fmt: skip
    assert worst(modules[1], modules[0]) < 1e-6


@pytest.mark.slow
def test_a_lightning_module_trains_as_it_is(make_trainer):
    from lightning.pytorch import LightningModule

    class Theirs(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 3)

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    ends = []
    for name in ("cpu", "xla"):
        torch.manual_seed(0)
        _, made = fitted(make_trainer, Theirs(), accelerator=name, enable_checkpointing=False)
        ends.append({name: float(value) for name, value in made.callback_metrics.items()})
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)


def test_a_number_that_is_read_later_is_one_as_soon_as_it_is_asked_for():
    class Known(DeviceScalar):
        def __init__(self, value):
            self.value = value

        @classmethod
        def read(cls, values):
            return [scalar.value for scalar in values]

    assert float(Known(2.5)) == 2.5
