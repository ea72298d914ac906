"""A network for rows of numbers and categories."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp


class TabularNet(fp.Module):
    """Embeds each category, scales each number, and passes all of them through residual layers.

    Args:
        numbers: the number columns, with their mean and standard deviation.
        categories: the category columns, with their number of ids. Id 0 is a value that training rows don't have.
        label: the column to predict, 0 or 1.
    """

    def __init__(
        self,
        numbers: dict[str, tuple[float, float]],
        categories: dict[str, int],
        label: str,
        width: int = 128,
        depth: int = 3,
        lr: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.numbers, self.categories, self.label, self.lr = list(numbers), list(categories), label, lr
        mean, deviation = torch.tensor(list(numbers.values())).T
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation.clamp(min=1e-6))
        sizes = {name: min(32, 2 + count // 2) for name, count in categories.items()}
        self.embeddings = nn.ModuleDict({name: nn.Embedding(categories[name], size) for name, size in sizes.items()})
        self.first = nn.Linear(2 * len(numbers) + sum(sizes.values()), width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # logits (B,)
        numbers = torch.stack([batch[name].float() for name in self.numbers], 1)  # (B, numbers)
        missing = numbers.isnan()
        scaled = torch.where(missing, 0.0, (numbers - self.mean) / self.deviation)
        embedded = [self.embeddings[name](batch[name]) for name in self.categories]
        hidden = self.first(torch.cat([scaled, missing.float(), *embedded], 1))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.last(hidden).squeeze(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self(batch), batch[self.label].float())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, label = self(batch), batch[self.label]
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, label.float()), prog_bar=True)
        self.log("val_accuracy", ((logits > 0) == (label > 0)).float().mean(), prog_bar=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"label": batch[self.label], "probability": torch.sigmoid(self(batch))}

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
