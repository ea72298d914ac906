"""Small models of every family, in their usual form, and a module that trains any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

import footplate as fp


class Trained(fp.Module):
    """Trains a classifier, at each position separately if the model has one output per position."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        if logits.dim() == 3:
            logits, y = logits.flatten(0, 1), y.flatten()
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"accuracy": (logits.argmax(-1) == y).float().mean()})
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        return logits


class Encoder(nn.Module):
    """torch's own TransformerEncoder over tokens; zeros are padding."""

    def __init__(self, vocabulary: int = 50, width: int = 16, layers: int = 2, p: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, p, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x), src_key_padding_mask=x == 0)[:, 0])


class Recurrent(nn.Module):
    """A language model of two GRU layers."""

    def __init__(self, vocabulary: int = 30, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.tokens(x))[0])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width), nn.Dropout(p)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with tied embedding and head."""

    def __init__(self, vocabulary: int = 40, width: int = 16, layers: int = 2, length: int = 9, p: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2, p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SmallResNet(nn.Module):
    """One residual block between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += x
        return self.head(F.relu(y, inplace=True))


def mlp(p: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 3))


def vit(size: int = 16, layers: int = 2) -> nn.Module:
    return torchvision.models.VisionTransformer(size, 4, layers, 2, 16, 32, num_classes=3)


def _vectors(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6), torch.randint(0, 3, (n,))


def _images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randint(0, 3, (n,))


def _padded(n: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 50, (n, 9))
    return tokens * (torch.arange(9) < torch.randint(4, 10, (n, 1))), torch.randint(0, 3, (n,))


def _sequences(vocabulary: int, n: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocabulary, (n, 10))
    return tokens[:, :-1], tokens[:, 1:]


def plain() -> nn.Module:
    """A perceptron whose result doesn't depend on how a batch is split."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "plain": (plain, _vectors),
    "mlp": (mlp, _vectors),
    "small_resnet": (SmallResNet, _images),
    "vit": (lambda: vit(layers=1), _images),
    "encoder": (lambda: Encoder(layers=1), _padded),
    "gru": (Recurrent, lambda n: _sequences(30, n)),
    "gpt": (GPT, lambda n: _sequences(40, n)),
    "resnet": (
        lambda: torchvision.models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3),
        lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 3, (n,))),
    ),
}


def made(name: str, rows: int = 8) -> tuple[Trained, list[Any]]:
    """A module in double precision, and five batches for it."""
    torch.manual_seed(0)
    net, draw = NETS[name]
    batches = [draw(rows) for _ in range(5)]
    double = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]
    return Trained(net()).double(), double
