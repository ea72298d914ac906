"""From a Delta table to predictions, in a run that may be killed at any time and is started again by the same command.

python examples/images.py
"""

import torch
import torch.nn.functional as F

import footplate as fp
from footplate.demo import TABLES  # two Delta tables of images that come with Footplate


class Images(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch["image"] / 255), batch["label"].long())
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def predict_step(self, batch, batch_idx):
        return {"label": batch["label"], "prediction": self.net(batch["image"] / 255).argmax(1)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


fp.seed_everything(1)
data = fp.TableDataModule(train=TABLES / "train", predict=TABLES / "val", batch_size=64)
trainer = fp.Trainer(max_epochs=3, callbacks=fp.ModelCheckpoint(every_n_train_steps=50), default_root_dir="runs/images")
trainer.fit(Images(), data, ckpt_path="last")  # starts the run, or continues it bit for bit
print(f"loss {trainer.callback_metrics['loss']:.9f} after {trainer.global_step} steps")

predictions = trainer.predict(datamodule=data, output="runs/predictions")  # a table again
print(predictions.num_rows, predictions.columns)
