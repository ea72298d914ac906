"""A small GPT whose layers tell how they are cut for tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import footplate as fp

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 8, 16, 4


class Attention(nn.Module):
    """Each rank of a tensor-parallel group has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # A bias of keys changes no output. Its gradients would be rounding errors, which Adam makes large steps of.
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, layer: nn.Module, x: Tensor) -> Tensor:
        # (rows, own heads, length, width of a head)
        return layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        heads = [self.heads(layer, x) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second_norm(x)))))


class Gpt(nn.Module):
    """The embedding and the last layer share their weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def tensor_parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        columns, rows = ColwiseParallel(), RowwiseParallel()
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attention.query": columns,
            "blocks.*.attention.key": columns,
            "blocks.*.attention.value": columns,
            "blocks.*.attention.out": rows,
            "blocks.*.up": columns,
            "blocks.*.down": rows,
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text(fp.Module):
    """Learns to continue rows of tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = Gpt(dropout)

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.net(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True)
        self.log("rows", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_rows", float(len(batch)), reduce_fx="sum")

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        return {"first": batch[:, 0], "next": self.net(batch[:, :-1])[:, -1].argmax(-1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def texts(rows: int = 50) -> list[Tensor]:
    """Rows of LENGTH tokens, each with a pattern of its own."""
    return [(row * row + (row % 5 + 1) * torch.arange(LENGTH)) % VOCABULARY for row in range(rows)]
