"""`compile="step"`: forward, backward, clipping and optimizer, compiled as a whole, learn what the eager step learns."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from models import ranks
from models.small import Classifier, WarmingUp, dataset, loader
from torch import nn
from torch.utils.data import DataLoader

import footplate as fp
from footplate import checkpoint
from footplate.step import compiled_step


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    """Trace, and run the operations as they are: to compile them takes seconds. Count the programs and their rows."""
    programs: Counter[str] = Counter()

    def backend(graph, inputs):
        programs["all"] += 1
        tensors = [each for each in inputs if isinstance(each, torch.Tensor) and not each.requires_grad]
        programs.update(f"{len(each)} rows" for each in tensors if each.shape[1:] == (8,))
        return graph.forward

    monkeypatch.setitem(compiled_step.BACKENDS, "step", backend)
    return programs


class Plain(Classifier):
    """Without dropout; it logs in each way that modules do."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=0.01))

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_epoch=True)
        self.log_dict(
            {"largest": logits.max(), "smallest": logits.min()}, on_step=False, on_epoch=True, reduce_fx="max"
        )
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(make_trainer, module, data=None, **settings):
    torch.manual_seed(0)
    model = module()
    trainer = make_trainer(**{"max_epochs": 2, **settings})
    trainer.fit(model, data or loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return torch.cat([value.flatten().float() for value in model.state_dict().values()]), metrics, trainer


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fused", {}), ("AdamW", {"gradient_clip_val": 0.1}), ("SGD", {"accumulate_grad_batches": 3})],
)
def test_it_learns_and_logs_what_the_eager_step_does(make_trainer, name, settings):
    """The learning rate changes at each step, and the last batch of an epoch is smaller."""
    eager, metrics, _ = train(make_trainer, lambda: Plain(OPTIMIZERS[name]), **settings)
    compiled, compiled_metrics, made = train(make_trainer, lambda: Plain(OPTIMIZERS[name]), compile="step", **settings)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert compiled_metrics == pytest.approx(metrics, rel=1e-4)
    rate = made.optimizers[0].param_groups[0]["lr"]
    assert type(rate) is float


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "RMSprop"])
def test_a_learning_rate_of_zero_changes_no_weight(make_trainer, name):
    eager, _, _ = train(make_trainer, lambda: WarmingUp(name))
    compiled, _, _ = train(make_trainer, lambda: WarmingUp(name), compile="step")
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)

    before, _, _ = train(make_trainer, lambda: WarmingUp(name), max_steps=0)
    after, _, _ = train(make_trainer, lambda: WarmingUp(name), compile="step", max_steps=1)
    assert after.equal(before)


def test_nothing_is_compiled_again_for_another_learning_rate_or_a_smaller_batch(make_trainer, traced_only):
    def uneven():
        return DataLoader(dataset(44), 10)

    _, _, made = train(make_trainer, Plain, uneven(), max_epochs=1)
    assert made.global_step == 5
    train(make_trainer, Plain, uneven(), compile="step", max_epochs=1)
    once = traced_only["all"]
    train(make_trainer, Plain, uneven(), compile="step", max_epochs=4)
    assert once == 2
    assert traced_only["all"] == 2 * once


def test_shapes_that_come_twice_in_a_row_are_compiled(make_trainer, traced_only, tmp_path):
    """As after a change of the batch size, in one run or between two."""
    train(make_trainer, Plain, DataLoader(dataset(40), 10), compile="step", max_epochs=1, default_root_dir=tmp_path)
    traced_only.clear()
    trainer = make_trainer(max_epochs=3, compile="step", default_root_dir=tmp_path)
    trainer.fit(Plain(), DataLoader(dataset(60), 6), ckpt_path="last")
    assert (traced_only["10 rows"], traced_only["6 rows"]) == (0, 1)


class Buckets(torch.utils.data.Sampler):
    def __iter__(self):
        yield from ([row] * size for row, size in enumerate([4, 4, 4, 8, 8, 8, 4, 4, 8, 8]))

    def __len__(self):
        return 10


def test_a_few_shapes_are_compiled_once_each_with_their_sizes(make_trainer, traced_only):
    def data():
        return DataLoader(dataset(40), batch_sampler=Buckets())

    eager, _, _ = train(make_trainer, Plain, data(), max_epochs=2)
    compiled, _, _ = train(make_trainer, Plain, data(), max_epochs=2, compile="step")
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert (traced_only["4 rows"], traced_only["8 rows"], traced_only["all"]) == (1, 1, 3)


def test_shapes_change_a_few_times_only(make_trainer, monkeypatch, caplog):
    monkeypatch.setattr(compiled_step, "MAX_CHANGES", 1)
    caplog.set_level(logging.INFO, "footplate.step.compiled_step")
    train(make_trainer, Plain, DataLoader(dataset(40), batch_sampler=Buckets()), max_epochs=2, compile="step")
    changes = [record for record in caplog.records if record.message.startswith("From this batch on")]
    assert [record.args for record in changes] == [([(8, 8), (8,)],)]


class ReadsState(Plain):
    """Reads what changes: the step, the epoch, an attribute, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.factor = 1.0
        self.kept: list[torch.Tensor] = []
        self.last = torch.zeros(())

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.kept.append(loss.detach())
        self.log("step", float(self.global_step))
        self.last = 0.9 * self.last + loss.detach()
        return loss * self.factor + self.current_epoch * 0.1 + batch_idx * 0.01 + self.last * 0.0

    def on_train_epoch_end(self):
        self.factor *= 0.5


def test_what_a_step_reads_and_changes_in_python_is_as_in_the_eager_step(make_trainer):
    results = []
    for compiled in (False, "step"):
        torch.manual_seed(0)
        module = ReadsState()
        weights, metrics, _ = train(make_trainer, lambda module=module: module, compile=compiled, max_epochs=3)
        results.append((weights, metrics, torch.stack(module.kept), float(module.last), float(module.seen)))
    eager, compiled_run = results
    assert compiled_run[1] == pytest.approx(eager[1])
    assert compiled_run[4] == eager[4]
    torch.testing.assert_close(compiled_run[2], eager[2], rtol=1e-5, atol=1e-6)
    assert compiled_run[3] == pytest.approx(eager[3], rel=1e-5)


class Measures(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return F.cross_entropy(logits, batch[1])


def test_a_metric_object_counts_every_batch(make_trainer):
    _, eager, _ = train(make_trainer, Measures)
    _, compiled, _ = train(make_trainer, Measures, compile="step")
    assert compiled == pytest.approx(eager)


class Hooked(Plain):
    order: ClassVar[list[str]] = []

    def on_before_zero_grad(self, optimizer):
        self.order.append("zero")

    def on_after_backward(self):
        self.order.append("backward")

    def on_before_optimizer_step(self, optimizer):
        self.order.append("optimizer")
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.order.append("clip")
        self.clip_gradients(optimizer, 0.05, "norm")


def test_hooks_run_between_the_phases(make_trainer):
    eager, _, _ = train(make_trainer, Hooked, max_epochs=1)
    order = Hooked.order[:]
    Hooked.order.clear()
    compiled, _, _ = train(make_trainer, Hooked, compile="step", max_epochs=1)
    assert Hooked.order == order
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


class OwnOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1


def test_an_optimizer_that_is_not_torchs_steps_as_it_is(make_trainer, traced_only):
    def own():
        return Plain(lambda parameters: OwnOptimizer(parameters, lr=0.1))

    eager, _, _ = train(make_trainer, own, gradient_clip_val=0.1)
    compiled, _, made = train(make_trainer, own, gradient_clip_val=0.1, compile="step")
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert made.optimizers[0].param_groups[0]["steps"] == made.global_step
    assert traced_only["all"] == 1


class Cut(Exception):
    pass


def test_a_resumed_run_compiles_the_shapes_of_the_first_batch(make_trainer, tmp_path, traced_only):
    """The run continues with the smaller batch of an epoch."""
    at = 5

    class Stops(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == at + 1:
                raise Cut

    def data():
        return DataLoader(dataset(54), 10, shuffle=True)

    whole, _, _ = train(make_trainer, Plain, data(), compile="step", default_root_dir=tmp_path / "whole")
    with pytest.raises(Cut):
        train(make_trainer, Plain, data(), compile="step", default_root_dir=tmp_path / "cut", callbacks=[
            fp.ModelCheckpoint(every_n_train_steps=at, save_top_k=-1), Stops()
        ])  # fmt: skip
    traced_only.clear()
    trainer = make_trainer(max_epochs=2, compile="step", default_root_dir=tmp_path / "cut")
    model = Plain()
    trainer.fit(model, data(), ckpt_path="last")
    assert torch.equal(torch.cat([value.flatten().float() for value in model.state_dict().values()]), whole)
    assert traced_only["10 rows"] == 1
    assert traced_only["4 rows"] == 0
    state = checkpoint.load(trainer.checkpoint_callback.last_model_path or trainer.checkpoint_callback.best_model_path)
    assert not isinstance(state["optimizer_states"][0]["param_groups"][0]["lr"], torch.Tensor)


def test_ranks_average_gradients(make_trainer, tmp_path):
    def run(compiled):
        data, root = DataLoader(dataset(64), 8), tmp_path / str(compiled)
        return train(make_trainer, Plain, data, compile=compiled, default_root_dir=root)[0]

    eager = ranks.run(lambda: run(False), 2)
    of_ranks = ranks.run(lambda: run("step"), 2)
    torch.testing.assert_close(of_ranks[0], eager[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(of_ranks[0], of_ranks[1])


class ByHand(Classifier):
    automatic_optimization = False


class OwnStep(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (ByHand, {}, "automatic optimisation"),
        (OwnStep, {}, "own optimizer_step"),
        (Classifier, {"strategy": "replicas", "devices": 2}, "replicas"),
        (Classifier, {"compile": "cudagraphs"}, "needs a GPU of CUDA, not cpu"),
        (Classifier, {"compile": "whole"}, 'True, False, a dict of torch.compile\'s options, "step" or "cudagraphs"'),
        (Classifier, {"accelerator": "xla"}, "every step is compiled"),
    ],
)
def test_what_cannot_be_compiled_as_a_step_is_refused(make_trainer, module, settings, message):
    with pytest.raises(fp.ConfigError, match=message):
        make_trainer(**{"compile": "step", "max_epochs": 1, **settings}).fit(module(), loader())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_compiled_for_real_it_learns_the_same(make_trainer, monkeypatch, precision):
    monkeypatch.setitem(compiled_step.BACKENDS, "step", "inductor")
    eager, metrics, _ = train(make_trainer, Plain, precision=precision, gradient_clip_val=0.5)
    compiled, compiled_metrics, _ = train(
        make_trainer, Plain, precision=precision, gradient_clip_val=0.5, compile="step"
    )
    tolerance = 1e-4 if precision == "32-true" else 0.02
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)
    assert compiled_metrics == pytest.approx(metrics, rel=10 * tolerance)


@pytest.mark.slow
def test_compiled_for_real_a_resumed_run_is_bit_for_bit_the_run_that_was_not(make_trainer, monkeypatch, tmp_path):
    """With dropout, which Inductor draws, and a smaller last batch."""
    monkeypatch.setitem(compiled_step.BACKENDS, "step", "inductor")
    data = DataLoader(dataset(44), 10, shuffle=True)
    whole, _, _ = train(
        make_trainer, Classifier, data, compile="step", max_epochs=4, default_root_dir=tmp_path / "whole"
    )
    train(make_trainer, Classifier, data, compile="step", max_epochs=2, default_root_dir=tmp_path / "cut")
    model = Classifier()
    make_trainer(max_epochs=4, compile="step", default_root_dir=tmp_path / "cut").fit(model, data, ckpt_path="last")
    assert torch.equal(torch.cat([value.flatten() for value in model.state_dict().values()]), whole)
