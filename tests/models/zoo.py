"""Small LightningModules, each of which shows one thing that people do with Lightning, and the cases made of them.

None has dropout or shuffled data: under one seed and the same batches, two engines must come to the same weights.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    ModelPruning,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from models.recording import Case


def rows(count: int, seed: int = 0) -> TensorDataset:
    """`count` pairs of 8 numbers and one of 3 classes."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def loaders(train: int = 40, val: int = 12, batch_size: int = 4) -> tuple[Any, Any]:
    """Training and validation batches in a fixed order."""
    return DataLoader(rows(train), batch_size), DataLoader(rows(val, 1), batch_size)


def two_val_loaders() -> tuple[Any, Any]:
    return DataLoader(rows(40), 4), [DataLoader(rows(12, 1), 4), DataLoader(rows(10, 2), 3)]


class Stream(IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Any:
        return iter(rows(22))


def stream_loaders() -> tuple[Any, Any]:
    return DataLoader(Stream(), batch_size=4), DataLoader(rows(12, 1), 4)


class Plain(pl.LightningModule):
    """Cross-entropy with SGD; logs a loss each way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Adam(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Groups(Plain):
    """Several parameter groups, a schedule by step, given as a dict."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            [{"params": self.net[0].parameters(), "lr": 0.01}, {"params": self.net[1:].parameters()}]
        )
        scheduler = OneCycleLR(optimizer, [0.1, 0.05], total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByEpoch(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1)]


class EverySecondEpoch(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "frequency": 2}]


class EveryThirdStep(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 3}]


class Plateau(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class PlateauByStep(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.9, patience=0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "train_loss"}]


class SeveralSchedulers(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        by_step = {"scheduler": ExponentialLR(optimizer, 0.99), "interval": "step", "name": "slow"}
        return [optimizer], [by_step, {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"}]


class OwnSchedulerStep(ByEpoch):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 2)


class Logs(Plain):
    """Logs in every way and from every hook that may."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch_only", loss, on_step=False, on_epoch=True)
        self.log("quiet", loss, logger=False)
        self.log("number", batch_idx)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log("most", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("least", logits.min(), on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log("all", logits.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log_dict({"a": loss * 2, "b": loss.item()}, on_epoch=True)
        if batch_idx == 3:
            self.log("sometimes", loss, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from_outputs", outputs["logits"].mean())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("from_start", float(batch_idx))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("from_zero_grad", 1.0)

    def on_after_backward(self) -> None:
        self.log("gradient", self.net[0].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradient_again", self.net[0].weight.grad.norm())

    def on_train_start(self) -> None:
        self.started = True

    def on_train_epoch_start(self) -> None:
        self.log("from_epoch_start", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("from_epoch_end", float(self.current_epoch), prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_sum", loss, reduce_fx="sum")
        self.log_dict({"val_a": loss, "val_b": batch_idx}, batch_size=2)
        return {"loss": loss}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_from_batch_end", outputs["loss"])

    def on_validation_epoch_start(self) -> None:
        self.log("val_from_start", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("val_from_end", 2.0)


class ValLogsByStep(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), on_step=True, on_epoch=True)


class SeveralVal(Plain):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        self.log("shared", loss, add_dataloader_idx=False) if dataloader_idx == 1 else None


class Torchmetrics(Plain):
    """Metric objects: called and logged, updated and logged, in a collection, computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.mean = MeanMetric()
        self.valid = MetricCollection({"acc": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)}, prefix="val_")
        self.by_hand = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("acc", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.log("mean_loss", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.valid.update(logits, batch[1])
        self.log_dict(self.valid)
        self.by_hand.update(logits, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("val_by_hand", self.by_hand.compute())
        self.by_hand.reset()


class Skips(Plain):
    """Returns None for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 4, 9) else super().training_step(batch, batch_idx)


class EndsEpochEarly(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 6 else None


class StopsItself(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 13:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class WarmUp(Plain):
    """The warm-up of Lightning's documentation: an `optimizer_step` of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 8:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, float(self.trainer.global_step + 1) / 8)


class StepsEverySecondBatch(Plain):
    """Lightning's documentation: optimise less often, run the closure on its own otherwise."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class OwnClipping(Plain):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        value = 0.01 if self.current_epoch else 0.1
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


class OwnZeroGrad(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class LBFGS(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class FrozenPart(Plain):
    """A part that is frozen and kept in evaluation mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[1].eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Transfers(Plain):
    """Changes batches on their way."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class OnlyBatch(Plain):
    """Steps that take the batch alone."""

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


class Gan(pl.LightningModule):
    """A generative adversarial network as Lightning's documentation writes it: two optimizers, toggled, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        noise = torch.sin(real[:, :4] * 7)
        g_opt, d_opt = self.optimizers()

        self.toggle_optimizer(g_opt)
        g_loss = F.binary_cross_entropy_with_logits(
            self.discriminator(self.generator(noise)), torch.ones(len(real), 1, device=self.device)
        )
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        g_opt.step()
        g_opt.zero_grad()
        self.untoggle_optimizer(g_opt)

        self.toggle_optimizer(d_opt)
        real_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), torch.ones(len(real), 1))
        fake = self.generator(noise).detach()
        fake_loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), torch.zeros(len(real), 1))
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        self.clip_gradients(d_opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        d_opt.step()
        d_opt.zero_grad()
        self.untoggle_optimizer(d_opt)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=1e-2)
        return [g_opt, d_opt], [StepLR(g_opt, 1, 0.5), StepLR(d_opt, 1, 0.9)]


class ManualAccumulation(Plain):
    """Manual optimisation that steps every third batch, with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Evaluated(Plain):
    """Tests and predicts too."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log_dict({"test_a": batch_idx, "test_b": 1.0})

    def on_test_epoch_end(self) -> None:
        self.log("test_end", 3.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class SeveralEvaluated(Evaluated):
    """The same over several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]) + dataloader_idx


CASES = (
    Case("plain", Plain, loaders=loaders),
    Case("adamw", Adam, loaders=loaders),
    Case("accumulation", Adam, {"accumulate_grad_batches": 3}, loaders),
    Case("clip by norm", Plain, {"gradient_clip_val": 0.1}, loaders),
    Case("clip by value", Plain, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, loaders),
    Case("accumulation and clipping", Plain, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}, loaders),
    Case("parameter groups, one cycle by step", Groups, loaders=loaders),
    Case("one cycle with accumulation", Groups, {"accumulate_grad_batches": 3}, loaders),
    Case("schedule by epoch", ByEpoch, {"max_epochs": 3}, loaders),
    Case("schedule every second epoch", EverySecondEpoch, {"max_epochs": 4}, loaders),
    Case("schedule every third step", EveryThirdStep, loaders=loaders),
    Case("schedule every third step, accumulation", EveryThirdStep, {"accumulate_grad_batches": 2}, loaders),
    Case("plateau of a validation metric", Plateau, {"max_epochs": 4}, loaders),
    Case("plateau by step", PlateauByStep, loaders=loaders),
    Case("several schedulers", SeveralSchedulers, {"max_epochs": 3}, loaders),
    Case("own scheduler step", OwnSchedulerStep, {"max_epochs": 3}, loaders),
    Case("logs", Logs, loaders=loaders),
    Case("logs every third step", Logs, {"log_every_n_steps": 3}, loaders),
    Case("logs with accumulation", Logs, {"accumulate_grad_batches": 3}, loaders),
    Case("validation logs by step", ValLogsByStep, loaders=loaders),
    Case("several validation loaders", SeveralVal, loaders=two_val_loaders),
    Case("torchmetrics", Torchmetrics, loaders=loaders),
    Case("validation twice an epoch", Plain, {"val_check_interval": 0.5}, loaders),
    Case("validation every third batch", Logs, {"val_check_interval": 3}, loaders),
    Case(
        "validation every seventh batch over epochs",
        Plain,
        {"val_check_interval": 7, "check_val_every_n_epoch": None},
        loaders,
    ),
    Case("validation every second epoch", Plain, {"check_val_every_n_epoch": 2, "max_epochs": 4}, loaders),
    Case("no validation", Plain, {"limit_val_batches": 0}, loaders),
    Case("no sanity check", Plain, {"num_sanity_val_steps": 0}, loaders),
    Case("whole sanity check", Plain, {"num_sanity_val_steps": -1}, loaders),
    Case("limits as numbers", Plain, {"limit_train_batches": 7, "limit_val_batches": 2}, loaders),
    Case("limits as parts", Plain, {"limit_train_batches": 0.75, "limit_val_batches": 0.7}, loaders),
    Case("max steps inside an epoch", Plain, {"max_epochs": None, "max_steps": 14}, loaders),
    Case("max steps at the end of an epoch", Plain, {"max_epochs": -1, "max_steps": 20}, loaders),
    Case("max steps with accumulation", Plain, {"max_steps": 5, "accumulate_grad_batches": 3}, loaders),
    Case("length unknown", Plain, loaders=stream_loaders),
    Case("length unknown, accumulation", Plain, {"accumulate_grad_batches": 4}, stream_loaders),
    Case("skipped batches", Skips, loaders=loaders),
    Case("skipped batches, accumulation", Skips, {"accumulate_grad_batches": 3}, loaders),
    Case("epoch ended by a hook", EndsEpochEarly, loaders=loaders),
    Case("stops itself", StopsItself, {"max_epochs": 5}, loaders),
    Case("stops itself, not before min_epochs", StopsItself, {"max_epochs": 5, "min_epochs": 3}, loaders),
    Case("own optimizer step", WarmUp, loaders=loaders),
    Case("own optimizer step, accumulation", WarmUp, {"accumulate_grad_batches": 3}, loaders),
    Case("steps every second batch", StepsEverySecondBatch, loaders=loaders),
    Case("own backward", OwnBackward, loaders=loaders),
    Case("own clipping", OwnClipping, loaders=loaders),
    Case("own zero_grad", OwnZeroGrad, loaders=loaders),
    Case("LBFGS", LBFGS, loaders=loaders),
    Case("frozen part in evaluation mode", FrozenPart, loaders=loaders),
    Case("batches changed on their way", Transfers, loaders=loaders),
    Case("steps that take the batch alone", OnlyBatch, loaders=loaders),
    Case("GAN by hand", Gan, loaders=loaders),
    Case("accumulation by hand", ManualAccumulation, loaders=loaders),
    Case("bf16-true", Plain, {"precision": "bf16-true"}, loaders),
    Case("bf16-mixed", Plain, {"precision": "bf16-mixed"}, loaders),
    Case("64-true", Plain, {"precision": "64-true"}, loaders),
    Case("overfit", Plain, {"overfit_batches": 3}, loaders),
    Case("fast_dev_run", Plain, {"fast_dev_run": 3}, loaders),
)


class Backbone(Plain):
    """As BackboneFinetuning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[:2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Unfreeze(BaseFinetuning):
    """Lightning's example of a fine-tuning callback."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class LogsFromCallback(pl.Callback):
    """Logs through the module and through itself, and keeps something."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += len(batch[0])
        pl_module.log("seen", float(self.seen), on_step=True, on_epoch=False)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("seen_so_far", float(self.seen))
        self.log("from_itself", float(self.seen))


WITH_CALLBACKS = (
    Case("LambdaCallback", Plain, {}, loaders, lambda: [LambdaCallback(on_train_start=lambda trainer, module: None)]),
    Case(
        "BackboneFinetuning",
        Backbone,
        {"max_epochs": 3},
        loaders,
        lambda: [BackboneFinetuning(1, backbone_initial_lr=0.01)],
    ),
    Case("BaseFinetuning", Backbone, {"max_epochs": 3}, loaders, lambda: [Unfreeze()]),
    Case("WeightAveraging", Plain, {}, loaders, lambda: [WeightAveraging()]),
    Case("EMAWeightAveraging", Plain, {}, loaders, lambda: [EMAWeightAveraging(decay=0.9)]),
    Case(
        "EMAWeightAveraging, accumulation",
        Adam,
        {"accumulate_grad_batches": 3},
        loaders,
        lambda: [EMAWeightAveraging(decay=0.9)],
    ),
    Case("ModelPruning", Plain, {}, loaders, lambda: [ModelPruning("l1_unstructured", amount=0.3)]),
    Case(
        "EarlyStopping",
        ByEpoch,
        {"max_epochs": 9},
        loaders,
        lambda: [EarlyStopping("val_loss", min_delta=0.01, patience=2)],
    ),
    Case(
        "EarlyStopping at a threshold",
        Plain,
        {"max_epochs": 9},
        loaders,
        lambda: [EarlyStopping("val_loss", stopping_threshold=0.8)],
    ),
    Case(
        "EarlyStopping on a training metric",
        Plain,
        {"max_epochs": 9},
        loaders,
        lambda: [EarlyStopping("train_loss", patience=2)],
    ),
    Case("a callback of one's own", Plain, {}, loaders, lambda: [LogsFromCallback()]),
)

EVALUATED = (
    Case("one loader", Evaluated, loaders=loaders),
    Case("several loaders", SeveralEvaluated, loaders=two_val_loaders),
    Case("limited", Evaluated, {"limit_val_batches": 2, "limit_test_batches": 2, "limit_predict_batches": 2}, loaders),
)
