"""Train on a Delta table of images, and write a Parquet table of predictions.

The table comes with Footplate: 12,000 PNG images in four Parquet files. A Delta table keeps all its versions; `version=0`
is the first one, with 3,000 rows.

    python examples/lakehouse_images.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import footplate as fp
from footplate.demo import TABLES


class Net(fp.Module):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image):  # uint8 (B, 1, 28, 28) → logits (B, 10)
        return self.net(image.float() / 255)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["image"]), batch["label"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        hits = self(batch["image"]).argmax(1) == batch["label"]
        self.log("val_acc", hits.float().mean(), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return {"label_name": batch["label_name"], "prediction": self(batch["image"]).argmax(1)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


# `rng` depends only on the row and the epoch, so you can repeat and resume the run exactly.
def mirror(row, rng):
    if rng.random() < 0.5:
        row["image"] = row["image"].flip(-1)
    return row


train, val = fp.Table(TABLES / "train", version=0), fp.Table(TABLES / "val")
data = fp.TableDataModule(train=train, val=val, predict=val, batch_size=64, transform=mirror)
print(train.describe(rows=0))

trainer = fp.Trainer(max_epochs=2, log_every_n_steps=10, default_root_dir="runs/lakehouse")
trainer.fit(Net(), data)
predictions = trainer.predict(datamodule=data, output="runs/lakehouse/predictions")
print(predictions, "with", predictions.num_rows, "rows")
print(predictions.head(3).to_pylist())
