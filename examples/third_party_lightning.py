"""Train a module and a callback that were written for Lightning, unchanged, with Footplate's trainer.

`LightningTransformer` comes with Lightning. Here it learns to count: the next number is one more. It needs the extra
`lightning`.

    python examples/third_party_lightning.py
"""

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.demos import LightningTransformer
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp

VOCABULARY, LENGTH = 50, 8

first = torch.randint(0, VOCABULARY, (512, 1))
numbers = (first + torch.arange(LENGTH + 1)) % VOCABULARY  # (512, 9)
inputs, targets = numbers[:, :-1], numbers[:, 1:]
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)

model = LightningTransformer(vocab_size=VOCABULARY)
model.prepare_data = lambda: None  # it would download WikiText-2, which this training doesn't use


@torch.no_grad()
def loss():
    return F.nll_loss(model.eval()(inputs, targets), targets.reshape(-1)).item()


print(f"loss {loss():.2f} before")
trainer = fp.Trainer(
    max_epochs=3,
    gradient_clip_val=1.0,
    callbacks=[EMAWeightAveraging(decay=0.9)],
    default_root_dir="runs/lightning",
)
trainer.fit(model, loader)
print(f"loss {loss():.2f} after {trainer.global_step} steps")
