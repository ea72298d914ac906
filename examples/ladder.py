"""Run one training function in one process, in two processes of this machine, or in two workers of a cluster.

    python examples/ladder.py 1 -2                  # one process, then two of this machine
    python examples/ladder.py 2 --backend ray       # two workers of Ray; after ray.init() or with RAY_ADDRESS

The global batch always has 64 rows, so all runs end with the same loss, except for the last digits of sums. GELU keeps that
difference small. ReLU's gradient jumps at 0, so that a last digit may become a difference in the third one.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

import footplate as fp
from footplate.demo import TABLES


class Net(fp.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.GELU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["image"].float() / 255), batch["label"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch["image"].float() / 255), batch["label"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(epochs):
    size = int(os.environ["WORLD_SIZE"])
    data = fp.TableDataModule(
        train=fp.Table(TABLES / "train", version=0), val=fp.Table(TABLES / "val"), batch_size=64 // size
    )
    trainer = fp.Trainer(accelerator="cpu", max_epochs=epochs, seed=1, logger=False, enable_checkpointing=False)
    trainer.fit(Net(), data)
    return trainer.callback_metrics["val_loss"].item()


parser = argparse.ArgumentParser()
parser.add_argument("np", type=int, nargs="+")
parser.add_argument("--backend")
args = parser.parse_args()
for np in args.np:
    loss = fp.Runner(np=np, backend=args.backend, driver_log_verbosity="rank_0").run(train, epochs=2)
    print(f"np={np}: val_loss {loss:.4f}")
