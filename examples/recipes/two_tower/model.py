"""Two towers: one makes a vector of a user, the other of an item. A user likes an item if their vectors are alike."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp


class TwoTower(fp.Module):
    """Trains with the other items of a batch as the ones that were not bought.

    Popular items are in more batches than others, and so they are more often a wrong answer. The loss corrects this: it
    subtracts the logarithm of an item's share of all purchases.

    Args:
        users: the number of users.
        share: the share of each item in all purchases.
        categories: the number of categories of items.
        size: the length of a vector.
    """

    def __init__(self, users: int, share: list[float], categories: int, size: int = 32, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="share")
        self.lr = lr
        self.register_buffer("log_share", torch.tensor(share).clamp(min=1e-9).log())
        self.user = nn.Embedding(users, size)
        self.item = nn.Embedding(len(share), size)
        self.category = nn.Embedding(categories, size)
        self.user_tower = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
        self.item_tower = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
        self.popularity = nn.Embedding(len(share), 1)
        nn.init.zeros_(self.popularity.weight)

    def user_vectors(self, batch: dict[str, Tensor]) -> Tensor:  # (B, size + 1)
        user = self.user(batch["user"])
        vector = user + self.user_tower(user)
        return torch.cat([vector, torch.ones_like(vector[:, :1])], 1)

    def item_vectors(self, batch: dict[str, Tensor]) -> Tensor:  # (B, size + 1)
        item = self.item(batch["item"]) + self.category(batch["category"])
        return torch.cat([item + self.item_tower(item), self.popularity(batch["item"])], 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.user_vectors(batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self.user_vectors(batch) @ self.item_vectors(batch).T  # (B, B): users × items
        scores = scores - self.log_share[batch["item"]]
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
