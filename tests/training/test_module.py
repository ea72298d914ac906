"""User code: modules, manual optimisation, data modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from models.small import Classifier, dataset, loader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import footplate as fp


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def test_plain_torch_works_through_a_module_of_two_lines(make_trainer):
    class Two(fp.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    net = nn.Linear(8, 3)
    before = weights(net).clone()
    make_trainer(max_epochs=1).fit(Two(net), loader())
    assert not torch.equal(weights(net), before)


def test_a_plain_loop_learns_the_very_same(make_trainer):
    """Three epochs of SGD by hand and by the trainer end with the same bits."""

    class Hand(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = nn.Identity()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    ours = Hand()
    raw = copy.deepcopy(ours)
    batches = list(loader(shuffle=False))
    make_trainer(max_epochs=3).fit(ours, batches)
    optimizer = raw.configure_optimizers()
    for _ in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(raw(x), y).backward()
            optimizer.step()
    assert torch.equal(weights(ours), weights(raw))


@pytest.mark.parametrize("form", ["tensor", "dict"])
def test_a_step_returns_the_loss_or_a_dict_that_holds_it(form, make_trainer):
    seen = []

    class Returns(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if form == "tensor" else {"loss": loss, "extra": loss * 2}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(outputs)

    make_trainer(max_epochs=1).fit(Returns(), loader())
    tensors = [seen[0]] if form == "tensor" else list(seen[0].values())
    assert len(seen) == 12
    assert not any(tensor.requires_grad for tensor in tensors)


def test_none_skips_a_batch(make_trainer):
    class Skips(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx % 3 else None

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Skips(), loader())
    assert trainer.global_step == 8


@pytest.mark.parametrize("returned", [3.0, "loss", {"los": torch.zeros(())}, [torch.zeros(())]])
def test_anything_else_is_refused_with_what_was_expected(returned, make_trainer):
    class Wrong(Classifier):
        def training_step(self, batch, batch_idx):
            return returned

    with pytest.raises(fp.ConfigError, match=r"training_step\(\) returned .*expected the loss"):
        make_trainer().fit(Wrong(), loader())


def test_what_a_step_returns_is_let_go(make_trainer):
    """Logits that are returned for hooks must not accumulate until metrics are next read."""
    import weakref

    kept: list[weakref.ref] = []
    alive: list[int] = []

    class Returns(Classifier):
        def training_step(self, batch, batch_idx):
            alive.append(sum(reference() is not None for reference in kept))
            logits = self(batch[0])
            kept.append(weakref.ref(logits))
            return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits}

    make_trainer(max_epochs=1, log_every_n_steps=1000).fit(Returns(), loader())
    assert max(alive) <= 1


class Manual(Classifier):
    """Two optimizers, stepped by hand; returns an arbitrary value."""

    returned: object = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            scheduler.step()
        return self.returned

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[3])]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in optimizers]


@pytest.mark.parametrize("returned", [None, {"d_loss": torch.zeros(())}, torch.zeros(3), "anything"])
def test_manual_optimisation_steps_count_and_what_is_returned_is_free(returned, make_trainer):
    model = Manual()
    model.returned = returned
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, loader())
    assert trainer.global_step == 24
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**12)


def test_a_toggled_optimizer_alone_gets_gradients(make_trainer):
    seen = []

    class Toggles(Manual):
        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            with self.toggled_optimizer(first):
                seen.append([p.requires_grad for p in self.parameters()])
            seen.append([p.requires_grad for p in self.parameters()])

    model = Toggles()
    model.net[3].bias.requires_grad = False
    make_trainer(max_epochs=1, limit_train_batches=1).fit(model, loader())
    assert seen == [[True, True, False, False], [True, True, True, False]]


def test_manual_methods_are_refused_where_optimisation_is_automatic(make_trainer):
    class Confused(Classifier):
        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))

    with pytest.raises(fp.ConfigError, match="automatic_optimization = False"):
        make_trainer().fit(Confused(), loader())


@pytest.mark.parametrize("setting", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_settings_of_automatic_optimisation_are_refused_with_manual(setting, make_trainer):
    with pytest.raises(fp.ConfigError, match=rf"{next(iter(setting))}=.*no meaning with manual optimisation"):
        make_trainer(**setting).fit(Manual(), loader())


def test_users_may_take_over_each_part_of_the_step(make_trainer):
    called = []

    class Own(Classifier):
        def backward(self, loss):
            called.append("backward")
            loss.backward()

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            called.append("zero_grad")
            optimizer.zero_grad()

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            called.append(f"clip {gradient_clip_val} {gradient_clip_algorithm}")
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            called.append("step")
            optimizer.step(closure=optimizer_closure)

    trainer = make_trainer(max_epochs=1, limit_train_batches=1, gradient_clip_val=0.5)
    trainer.fit(Own(), loader())
    assert called == ["step", "zero_grad", "backward", "clip 0.5 norm"]
    assert trainer.global_step == 1


def test_an_own_optimizer_step_must_run_its_closure(make_trainer):
    class Forgets(Classifier):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step()

    with pytest.raises(fp.ConfigError, match="never ran its optimizer_closure"):
        make_trainer().fit(Forgets(), loader())


def test_batches_pass_through_the_transfer_hooks(make_trainer):
    class Moves(Classifier):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"x": batch[0], "y": batch[1]}

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return {**batch, "device": device}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert batch["device"].type == "cpu"
            return batch["x"], batch["y"]

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Moves(), loader(), loader(20))
    assert trainer.global_step == 12


def test_a_module_knows_its_place_and_its_trainer(make_trainer):
    seen = []

    class Looks(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((self.current_epoch, self.global_step, self.global_rank, self.trainer.max_epochs))

    model = Looks()
    assert (model.current_epoch, model.global_step) == (0, 0)
    with pytest.raises(fp.ConfigError, match="not attached to a Trainer"):
        _ = model.trainer
    make_trainer(max_epochs=2).fit(model, loader())
    assert (seen[0], seen[-1]) == ((0, 1, 0, 2), (1, 24, 0, 2))


def test_logging_without_a_trainer_is_a_warning_and_no_error():
    class Alone(Classifier):
        pass

    with pytest.warns(UserWarning, match=r"Alone\.log\(\) has no effect"):
        Alone().log("x", 1.0)


def test_a_trained_module_can_be_pickled_and_copied(make_trainer):
    model = Classifier()
    make_trainer(max_epochs=1).fit(model, loader())
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(weights(other), weights(model))
        assert other._trainer is None


def test_freezing_and_device_and_dtype():
    model = Classifier().double()
    assert (model.device.type, model.dtype) == ("cpu", torch.float64)
    assert not any(p.requires_grad for p in model.freeze().parameters())
    assert not model.training
    assert all(p.requires_grad for p in model.unfreeze().parameters())
    assert model.training


def test_configure_model_builds_layers_before_the_optimizer_sees_them(make_trainer):
    class Late(Classifier):
        def configure_model(self):
            if not hasattr(self, "late"):
                self.late = nn.Linear(3, 3)

        def forward(self, x):
            return self.late(super().forward(x))

    model = Late()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(model, loader())
    assert any(p is model.late.weight for group in trainer.optimizers[0].param_groups for p in group["params"])
    assert len(trainer.validate(model, loader(20), verbose=False)) == 1


# Data modules


class Stages(fp.DataModule):
    def __init__(self) -> None:
        self.called: list[str] = []

    def prepare_data(self):
        self.called.append("prepare_data")

    def setup(self, stage):
        self.called.append(f"setup {stage}")

    def teardown(self, stage):
        self.called.append(f"teardown {stage}")

    def train_dataloader(self):
        self.called.append("train")
        return loader()

    def val_dataloader(self):
        self.called.append("val")
        return loader(20)

    def test_dataloader(self):
        self.called.append("test")
        return loader(30)


@pytest.mark.parametrize("keyword", [True, False])
def test_a_data_module_is_asked_in_order(keyword, make_trainer):
    data, made = Stages(), make_trainer(max_epochs=2)
    if keyword:
        made.fit(Classifier(), datamodule=data)
    else:
        made.fit(Classifier(), data)
    assert data.called == ["prepare_data", "setup fit", "train", "val", "teardown fit"]
    assert data.trainer is made
    made.test(Classifier(), data, verbose=False)
    assert data.called[5:] == ["prepare_data", "setup test", "test", "teardown test"]


def test_a_module_may_have_loaders_of_its_own(make_trainer):
    class Whole(Classifier):
        def train_dataloader(self):
            return loader(30)

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Whole())
    assert trainer.global_step == 3


def test_two_sources_at_once_are_refused(make_trainer):
    with pytest.raises(fp.ConfigError, match="give one"):
        make_trainer().fit(Classifier(), Stages(), datamodule=Stages())


def test_a_data_module_of_plain_sets(make_trainer):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(dataset(25))

    data = fp.DataModule.from_datasets(dataset(), [dataset(20), dataset(30)], batch_size=10, drop_last=True)
    train, validation = data.train_dataloader(), data.val_dataloader()
    assert isinstance(train, DataLoader)
    assert (len(train), [len(batches) for batches in validation]) == (12, [2, 3])
    order = torch.cat([y for _, y in validation[1]])
    assert torch.equal(order, dataset(30).tensors[1])

    class Several(Classifier):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Several(), data)
    assert trainer.global_step == 12
    trainer.fit(Classifier(), fp.DataModule.from_datasets(Stream(), batch_size=10))
    assert trainer.global_step == 3


def test_a_set_that_was_not_given_has_no_loader(make_trainer):
    data = fp.DataModule.from_datasets(
        TensorDataset(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)), batch_size=2
    )
    with pytest.raises(fp.ConfigError, match=r"trainer\.test\(\) has no data"):
        make_trainer().test(Classifier(), data)


def test_parameters_that_optimizers_share_are_trainable_again_after_any_toggles(make_trainer):
    seen = []

    class Shares(Manual):
        def configure_optimizers(self):
            first, shared, last = self.net[0].parameters(), self.net[3].weight, self.net[3].bias
            return [torch.optim.SGD(group, lr=0.1) for group in (list(first), [shared], [shared, last])]

        def training_step(self, batch, batch_idx):
            first, second, third = self.optimizers()
            for toggled in (first, second, third):
                self.toggle_optimizer(toggled)
                seen.append([p.requires_grad for p in self.parameters()])
            self.untoggle_optimizer(third)
            seen.append([p.requires_grad for p in self.parameters()])

    make_trainer(max_epochs=1, limit_train_batches=1).fit(Shares(), loader())
    assert seen == [
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
        [True, True, True, True],
    ]


def test_a_training_step_that_a_callback_replaces_is_the_one_that_trains(make_trainer):
    called = []

    class Replaces(fp.Callback):
        def on_train_start(self, trainer, pl_module):
            original = pl_module.training_step
            pl_module.training_step = lambda batch: (called.append(len(batch)), original(batch, 0))[1]

    make_trainer(max_epochs=1, callbacks=[Replaces()]).fit(Classifier(), loader())
    assert called == [2] * 12


def test_what_holds_a_trainer_is_copied_and_sent_without_it(make_trainer):
    """Averaging callbacks copy modules. Processes receive them by pickle."""
    made, module = make_trainer(max_epochs=1), Classifier()
    made.fit(module, loader())
    holder = {"trainer": made, "module": module}
    copied = copy.deepcopy(holder)
    assert copied["trainer"] is made
    assert copied["module"] is not module
    assert pickle.loads(pickle.dumps(holder))["trainer"] is None
