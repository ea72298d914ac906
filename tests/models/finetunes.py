"""Typical fine-tuning code: a timm model and a Hugging Face model in a LightningModule, small and untrained.

The modules follow the Databricks article (timm) and Lightning's transfer-learning page (Hugging Face), line for line except
for the size of the network. It is built from a configuration, so that nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import timm
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class LitClassificationModel(pl.LightningModule):
    """A timm model with a new head; the backbone is frozen."""

    def __init__(self, class_count: int, learning_rate: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model("test_resnet", pretrained=False, num_classes=class_count)
        for param in self.model.parameters():
            param.requires_grad = False
        for param in self.model.get_classifier().parameters():
            param.requires_grad = True
        self.accuracy = MulticlassAccuracy(class_count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch["features"], batch["label"]
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, logger=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self(batch["features"])
        self.accuracy(prediction, batch["label"])
        self.log("val_acc", self.accuracy, prog_bar=True)
        self.log("val_loss", F.cross_entropy(prediction, batch["label"]), prog_bar=True, sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch["features"]).softmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.model.get_classifier().parameters(), lr=self.hparams.learning_rate, momentum=self.hparams.momentum
        )


class Images(Dataset):
    """Noise images. The brightness grows with the class."""

    def __init__(self, rows: int = 24) -> None:
        noise = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(rows) % 3
        self.images = noise + self.labels.reshape(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self.images[index], "label": int(self.labels[index])}


class ImagesDataModule(pl.LightningDataModule):
    """Training and validation images, made in `setup`."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.images = Images()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.images, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.images, batch_size=self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()


class BertClassifier(pl.LightningModule):
    """A BERT for two classes, with weight decay by group and a linear schedule with warm-up."""

    def __init__(self, learning_rate: float = 5e-3, warmup_steps: int = 2, weight_decay: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=2,
        )
        self.model = BertForSequenceClassification(config)
        self.outputs: list[torch.Tensor] = []

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(**batch)  # a ModelOutput: a dict whose "loss" is the loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(**batch)
        self.outputs.append((outputs.logits.argmax(-1) == batch["labels"]).float())
        self.log("val_loss", outputs.loss, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", torch.cat(self.outputs).mean())
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        no_decay = ["bias", "LayerNorm.weight"]
        decays = {name: not any(part in name for part in no_decay) for name, _ in self.model.named_parameters()}
        groups = [
            {
                "params": [p for name, p in self.model.named_parameters() if decays[name] is wanted],
                "weight_decay": self.hparams.weight_decay if wanted else 0.0,
            }
            for wanted in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate)
        scheduler = get_linear_schedule_with_warmup(
            optimizer, self.hparams.warmup_steps, int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def sentences(rows: int = 32, batch_size: int = 8) -> DataLoader:
    """Rows of 6 tokens, with class 1 if the first token is in the upper half; batches in the form of tokenizers."""
    tokens = torch.randint(0, 50, (rows, 6), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens, (tokens[:, 0] >= 25).long()), batch_size, collate_fn=_encode)


def _encode(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> BatchEncoding:
    tokens, labels = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    return BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels})
