"""The run state: everything that resuming needs, each part restored to its owner."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import Classifier, dataset, loader
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.run_state import Progress, keyed


class Remembers(fp.Callback):
    def __init__(self) -> None:
        self.count = 0
        self.loaded: dict | None = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self):
        return {"count": self.count, "sum": torch.tensor(float(self.count))}

    def load_state_dict(self, state_dict):
        self.count, self.loaded = state_dict["count"], state_dict


class Data(fp.DataModule):
    """Counts its epochs, and restores the count."""

    def __init__(self) -> None:
        self.seen = 0

    def train_dataloader(self):
        return DataLoader(dataset(), 10, shuffle=True)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


class Extra(Classifier):
    note = ""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["note"] = "from the module"

    def on_load_checkpoint(self, checkpoint):
        self.note = checkpoint["note"]


def test_callbacks_data_modules_and_modules_get_back_what_they_gave(make_trainer):
    data = Data()
    data.seen = 5
    make_trainer(max_epochs=1, callbacks=[Remembers()]).fit(Extra(), data)

    callback, model, later = Remembers(), Extra(), Data()
    make_trainer(max_epochs=2, callbacks=[callback]).fit(model, later, ckpt_path="last")
    assert callback.loaded["count"] == 12
    assert callback.loaded["sum"] == 12.0
    assert callback.count == 24
    assert later.seen == 5
    assert model.note == "from the module"


class Grown(Classifier):
    """Adds a second head if its checkpoint has one."""

    def __init__(self):
        super().__init__()
        self.grow(())

    def grow(self, classes):
        self.classes = classes
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 1) for _ in classes)

    def forward(self, x):
        return super().forward(x) * (1 + sum(head(torch.ones(3)) for head in self.heads))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["classes"] = list(self.classes)

    def on_load_checkpoint(self, checkpoint):
        self.grow(tuple(checkpoint["classes"]))

    def test_step(self, batch, batch_idx):
        self.log("heads", float(len(self.heads)))


def test_layers_that_a_module_builds_in_on_load_checkpoint_are_loaded_and_trained(make_trainer):
    first = Grown()
    first.grow(("cat", "dog"))
    make_trainer(max_epochs=1).fit(first, loader())

    resumed, made = Grown(), make_trainer(max_epochs=2)
    made.fit(resumed, loader(), ckpt_path="last")
    learned = {id(parameter) for group in made.optimizers[0].param_groups for parameter in group["params"]}
    assert resumed.classes == ("cat", "dog")
    assert {id(parameter) for parameter in resumed.parameters()} == learned
    assert not torch.equal(resumed.heads[1].weight, first.heads[1].weight)

    tested = Grown()
    assert make_trainer().test(tested, loader(), ckpt_path="last")[0]["heads"] == 2
    assert torch.equal(tested.heads[1].weight, resumed.heads[1].weight)


def test_two_callbacks_of_one_class_are_told_apart(make_trainer):
    first, second = Remembers(), Remembers()
    second.count = 100
    make_trainer(max_epochs=1, callbacks=[first, second]).fit(Classifier(), loader())
    again = Remembers(), Remembers()
    make_trainer(max_epochs=1, callbacks=list(again)).fit(Classifier(), loader(), ckpt_path="last")
    assert [callback.count for callback in again] == [12, 112]


def test_a_new_callback_starts_fresh_and_a_missing_one_is_no_error(make_trainer):
    make_trainer(max_epochs=1, callbacks=[Remembers()]).fit(Classifier(), loader())
    stopping = fp.EarlyStopping("train_loss")
    trainer = make_trainer(max_epochs=2, callbacks=[stopping])
    trainer.fit(Classifier(), loader(), ckpt_path="last")
    assert trainer.global_step == 24


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=8))
def test_keys_are_unique_and_depend_only_on_the_order(names):
    parts = [type(name, (), {})() for name in names]
    keys = [key for key, _ in keyed(parts)]
    assert len(set(keys)) == len(keys)
    assert keys == [key for key, _ in keyed([type(name, (), {})() for name in names])]


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 9999), st.booleans())
def test_progress_comes_back_and_a_finished_epoch_is_left_behind(epoch, batch_idx, step, ended):
    saved = Progress(epoch=epoch, batch_idx=batch_idx, global_step=step, epoch_ended=ended)
    loaded = Progress()
    loaded.load(asdict(saved))
    if ended:
        assert (loaded.epoch, loaded.batch_idx, loaded.epoch_ended) == (epoch + 1, 0, False)
    else:
        assert loaded == saved


def test_the_seed_of_the_first_attempt_rules_the_next(make_trainer):
    make_trainer(max_epochs=1, seed=11).fit(Classifier(), loader())
    resumed = make_trainer(max_epochs=2, seed=99)
    resumed.fit(Classifier(), loader(), ckpt_path="last")
    assert resumed.seed == 11


def last(made: fp.Trainer) -> Path:
    return Path(made.checkpoint_callback.last_model_path)


@pytest.fixture
def trained(make_trainer) -> Path:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Classifier(), loader())
    return last(trainer)


def test_a_checkpoint_holds_lightnings_names_and_says_what_it_is(trained):
    state, meta = checkpoint.load(trained), checkpoint.read_meta(trained)
    assert {
        "epoch",
        "global_step",
        "state_dict",
        "optimizer_states",
        "lr_schedulers",
        "hyper_parameters",
    } <= state.keys()
    assert state["hyper_parameters"] == {"lr": 0.01, "width": 16, "classes": 3}
    assert meta["global_step"] == 12
    assert meta["torch"] == torch.__version__
    assert "train_loss" in meta["metrics"]


def test_another_number_of_optimizers_is_one_clear_error(trained, make_trainer):
    class Frozen(Classifier):
        def configure_optimizers(self):
            return None

    with pytest.raises(fp.CheckpointError, match=r"made with .*configure_optimizers\(\) now returns"):
        make_trainer().fit(Frozen(), loader(), ckpt_path=trained)


def test_another_kind_of_optimizer_is_one_clear_error(trained, make_trainer):
    class Plain(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(fp.CheckpointError, match="SGD"):
        make_trainer().fit(Plain(), loader(), ckpt_path=trained)


def test_other_parameter_groups_are_one_clear_error(trained, make_trainer):
    class Grouped(Classifier):
        def configure_optimizers(self):
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[3].parameters()}]
            return torch.optim.AdamW(groups)

    with pytest.raises(fp.CheckpointError, match="the state of AdamW does not fit"):
        make_trainer().fit(Grouped(), loader(), ckpt_path=trained)


def test_a_run_can_be_taken_further_with_more_epochs(make_trainer):
    """Two epochs and then two more are four epochs."""
    torch.manual_seed(0)
    whole = Classifier()
    make_trainer(max_epochs=4, enable_checkpointing=False).fit(whole, loader())
    torch.manual_seed(0)
    make_trainer(max_epochs=2).fit(Classifier(), loader())
    resumed = Classifier()
    make_trainer(max_epochs=4).fit(resumed, loader(), ckpt_path="last")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("validation", [False, True])
def test_a_run_that_ended_inside_an_epoch_can_be_taken_further(validation, make_trainer):
    """Five steps of twelve and then fifteen more are twenty steps, loss for loss."""
    losses: dict[int, float] = {}

    class Watch(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses[trainer.progress.batches] = float(outputs)

    def run(steps: int, **settings) -> dict[str, torch.Tensor]:
        trainer = make_trainer(max_steps=steps, max_epochs=-1, callbacks=[Watch()], **settings)
        torch.manual_seed(0)
        trainer.fit(Classifier(), loader(), loader(20) if validation else None, ckpt_path="last")
        return trainer.callback_metrics

    expected = run(30, default_root_dir=make_trainer().run_dir / "whole")
    whole = dict(losses)
    losses.clear()
    run(5)
    assert run(30) == expected
    assert losses == whole


def test_a_frozen_layer_is_frozen_after_a_resume_as_before(make_trainer):
    modes: list[tuple[bool, bool]] = []

    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[2].eval()

        def training_step(self, batch, batch_idx):
            modes.append((self.net[0].training, self.net[2].training))
            return super().training_step(batch, batch_idx)

    make_trainer(max_epochs=1).fit(Frozen(), loader(), loader(20))
    make_trainer(max_epochs=2).fit(Frozen(), loader(), loader(20), ckpt_path="last")
    assert set(modes) == {(True, False)}
