import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp


class Classifier(fp.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


points = torch.rand(4096, 2) - 0.5  # to learn: have both coordinates the same sign?
dataset = TensorDataset(points, (points.prod(dim=1) > 0).long())
net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

trainer = fp.Trainer(max_epochs=5, default_root_dir="runs/quickstart")
trainer.fit(Classifier(net), DataLoader(dataset, batch_size=64, shuffle=True))
print(f"loss {trainer.callback_metrics['train_loss']:.3f} after {trainer.global_step} steps")
