"""An image classifier around any network, with mixup, CutMix, and a learning rate that warms up and falls."""

import importlib
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp


def make_network(name: str, num_classes: int) -> nn.Module:
    """Make a network by name: "timm:resnet50", "torchvision:resnet50", or a class of yours, such as "mine:Net"."""
    library, _, network = name.partition(":")
    if library == "timm":
        import timm

        return timm.create_model(network, num_classes=num_classes)
    if library == "torchvision":
        import torchvision

        return torchvision.models.get_model(network, num_classes=num_classes)
    return getattr(importlib.import_module(library), network)(num_classes=num_classes)


class Mix(nn.Module):
    """Mixes each image of a batch with another one, by mixup or CutMix.

    Everything is drawn with torch, so that it also works in a step that is compiled as a whole.

    Args:
        mixup: the parameter of the Beta distribution from which mixup draws a share. 0 turns it off.
        cutmix: the same for CutMix. With both, each batch has one of them.
    """

    def __init__(self, mixup: float, cutmix: float) -> None:
        super().__init__()
        self.mixup, self.cutmix = mixup, cutmix
        rng = np.random.default_rng(0)
        for name, alpha in (("mixup_shares", mixup), ("cutmix_shares", cutmix)):
            shares = rng.beta(alpha, alpha, 4096) if alpha else np.ones(1)
            self.register_buffer(name, torch.tensor(shares, dtype=torch.float32), persistent=False)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images, the rows of the other images, and the share of the first ones."""
        other = torch.randperm(len(image), device=image.device)
        mask = self._mask(*image.shape[-2:], image.device)
        return mask * image + (1 - mask) * image[other], other, mask.mean()

    def _mask(self, height: int, width: int, device: torch.device) -> Tensor:  # (H, W): the share of the first image
        mixup = draw(self.mixup_shares).expand(height, width)
        size = (1 - draw(self.cutmix_shares)).sqrt() / 2
        y, x = torch.arange(height, device=device) / height, torch.arange(width, device=device) / width
        inside_y = (y - torch.rand((), device=device)).abs() < size
        inside_x = (x - torch.rand((), device=device)).abs() < size
        cutmix = 1 - (inside_y[:, None] & inside_x[None, :]).float()
        part_of_mixup = 0.5 * bool(self.mixup) if self.cutmix else 1.0
        return torch.where(torch.rand((), device=device) < part_of_mixup, mixup, cutmix)


def draw(values: Tensor) -> Tensor:
    return values[torch.randint(len(values), (1,), device=values.device)]


class Classifier(fp.Module):
    """Classifies images.

    Args:
        network: see `make_network`. It gets three channels.
        num_classes: the number of labels.
        lr: the highest learning rate. It fits `batch_size` × processes rows in a step.
        weight_decay: see `torch.optim.AdamW`.
        warmup: the part of the steps in which the rate rises.
        mixup: see `Mix`.
        cutmix: see `Mix`.
        label_smoothing: see `torch.nn.CrossEntropyLoss`.
    """

    def __init__(
        self,
        network: str,
        num_classes: int,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup: float = 0.05,
        mixup: float = 0.2,
        cutmix: float = 1.0,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = make_network(network, num_classes)
        self.mix = Mix(mixup, cutmix)

    def forward(self, image: Tensor) -> Tensor:  # 0 … 255, (B, C, H, W) → logits (B, num_classes)
        image = image.float().expand(-1, 3, -1, -1) / 255
        return self.network((image - 0.45) / 0.225)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        image, label = batch["image"], batch["label"]
        mirror = torch.rand(len(image), 1, 1, 1, device=image.device) < 0.5
        image, other, share = self.mix(torch.where(mirror, image.flip(3), image))
        logits, smoothing = self(image), self.hparams.label_smoothing
        first = F.cross_entropy(logits, label, label_smoothing=smoothing)
        second = F.cross_entropy(logits, label[other], label_smoothing=smoothing)
        loss = share * first + (1 - share) * second
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, label = self(batch["image"]), batch["label"]
        self.log("val_loss", F.cross_entropy(logits, label), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == label).float().mean(), prog_bar=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"prediction": self(batch["image"]).argmax(1)}

    def configure_optimizers(self) -> dict:
        # Biases, norms and other vectors don't decay.
        decays = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)

        steps = int(self.trainer.estimated_stepping_batches)
        warmup_steps = max(1, round(self.hparams.warmup * steps))

        def rate(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
