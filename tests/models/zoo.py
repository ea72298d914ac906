"""Small LightningModules for `cases`. Each shows one typical use of Lightning.

None has dropout or shuffled data: with one seed and the same batches, two engines must produce the same weights.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


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
    """Cross-entropy with SGD; logs a loss in each way."""

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
    """Several parameter groups, and a schedule by step, given as a dict."""

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
    """Logs in every way and from every hook that allows it."""

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


class Evaluated(Plain):
    """Has test and predict steps too."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log_dict({"test_a": batch_idx, "test_b": 1.0})

    def on_test_epoch_end(self) -> None:
        self.log("test_end", 3.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class SeveralEvaluated(Evaluated):
    """Has test and predict steps over several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]) + dataloader_idx
