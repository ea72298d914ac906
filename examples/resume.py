"""Interrupt a run, continue it, and compare it, bit for bit, with a run that was never interrupted.

The interruption is an exception at batch 150, within an epoch. Nothing is saved at that moment, as when the process is
killed. The run continues from the checkpoint before it, in a new trainer with a new model.

    python examples/resume.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp


class Net(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Interruption(fp.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.progress.batches == 150:
            raise RuntimeError("an error at batch 150")


points = torch.rand(4096, 2) - 0.5
dataset = TensorDataset(points, (points.prod(dim=1) > 0).long())


def train(root, *callbacks):
    fp.seed_everything(1)
    model = Net()
    saver = fp.ModelCheckpoint(every_n_train_steps=40)
    trainer = fp.Trainer(
        max_epochs=4, callbacks=[saver, *callbacks], logger=False, enable_model_summary=False, default_root_dir=root
    )
    trainer.fit(model, DataLoader(dataset, batch_size=64, shuffle=True), ckpt_path="last")
    return model.state_dict()


try:
    train("runs/resume/cut", Interruption())
except RuntimeError as error:
    print(f"interrupted: {error}")
continued = train("runs/resume/cut")  # ckpt_path="last": from step 120
never_cut = train("runs/resume/whole")
print("bit for bit the same:", all(torch.equal(continued[name], value) for name, value in never_cut.items()))
