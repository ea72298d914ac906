"""Accuracy of `footplate plan` for this machine's CPU: predicted against measured memory and time.

Predicted memory is XLA's account of state, batch and temporaries, plus an estimate of the memory that XLA's libraries
allocate. Measured memory is state, batch and the growth of a process within a step: see `_measure` in
footplate/planning/compiler.py. Predicted time is the roofline; measured time is XLA's fastest step. Every round measures
the machine's peak rates again. To run it in parts: `plan_accuracy.py MLP ResNet-18 --add --json FILE`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from footplate.hardware import cpu_rates
from footplate.planning.library_models import Supervised
from footplate.planning.study import plan


def mlp() -> tuple[nn.Module, Any]:
    layers = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)]
    return nn.Sequential(*layers), (torch.empty(2048, 1024), torch.empty(2048, dtype=torch.int64))


def small_mlp() -> tuple[nn.Module, Any]:
    """The network of a quick run."""
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), (torch.empty(256, 256), torch.empty(256, dtype=torch.int64))


def resnet18() -> tuple[nn.Module, Any]:
    common.let_torchvision_be_imported()
    from torchvision.models import resnet18

    return resnet18(), (torch.empty(32, 3, 128, 128), torch.empty(32, dtype=torch.int64))


def vit_tiny() -> tuple[nn.Module, Any]:
    common.let_torchvision_be_imported()
    from timm import create_model

    images = torch.empty(16, 3, 224, 224)
    return create_model("vit_tiny_patch16_224"), (images, torch.empty(16, dtype=torch.int64))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A decoder with tied embedding and head. The defaults give GPT-2 small with 124 million parameters."""

    def __init__(
        self, vocabulary: int = 50257, width: int = 768, layers: int = 12, heads: int = 12, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(vocabulary, width), nn.Embedding(length, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = (nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.tokens(x) + places)))


def gpt_small() -> tuple[nn.Module, Any]:
    tokens = torch.empty(4, 256, dtype=torch.int64)
    return GPT(16384, 384, 8, 6, 256), (tokens, tokens)


def bert_mini() -> tuple[nn.Module, Any]:
    common.let_torchvision_be_imported()
    from transformers import BertConfig, BertForMaskedLM

    tokens = torch.empty(16, 128, dtype=torch.int64)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForMaskedLM(BertConfig(**sizes)), (tokens, tokens)


def convnext() -> tuple[nn.Module, Any]:
    common.let_torchvision_be_imported()
    from timm import create_model

    return create_model("convnext_atto"), (torch.empty(16, 3, 128, 128), torch.empty(16, dtype=torch.int64))


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "MLP": mlp,
    "ResNet-18": resnet18,
    "ViT-tiny": vit_tiny,
    "GPT-small": gpt_small,
    "BERT-mini": bert_mini,
    "ConvNeXt": convnext,
}
# A round takes a minute and has five steps. The time is that of the fastest step, the memory is the median.
ROUNDS = 1
COLUMNS = {
    "predicted_mb": "memory MB, predicted",
    "peak_mb": "measured",
    "least_ms": "step ms, least",
    "fastest_ms": "XLA, fastest",
    "xla_ms": "XLA",
    "eager_ms": "eager",
}


def once(name: str, models: dict[str, Callable[[], tuple[nn.Module, Any]]]) -> common.Figures:
    """Plan one model and run it."""
    cpu_rates.flops_per_s.cache_clear()
    cpu_rates.bytes_per_s.cache_clear()
    with torch.device("meta"):
        net, batch = models[name]()
    measured = plan(Supervised(net), batch, on=["cpu"], measure=True).measured
    assert measured is not None
    return {
        "predicted_mb": measured.predicted_peak_bytes / 1e6,
        "peak_mb": measured.peak_bytes / 1e6,
        "least_ms": measured.least_step_s * 1e3,
        "fastest_ms": measured.xla_fastest_step_s * 1e3,
        "xla_ms": measured.xla_step_s * 1e3,
        "eager_ms": measured.eager_step_s * 1e3,
    }


def main() -> None:
    parser = common.models_parser(__doc__ or "")
    options = parser.parse_args()
    models = {"MLP": small_mlp} if options.quick else MODELS
    names = options.models or list(models)
    host = common.machine()
    rounds = common.QUICK_ROUNDS if options.quick else ROUNDS
    results = common.interleave(names, lambda name: once(name, models), rounds)
    memory = {
        f"memory_measured_vs_predicted_{name}": common.spread(
            [run["peak_mb"] / run["predicted_mb"] for run in results[name]],
            "measured",
            "predicted",
            "peak memory, 1 is right",
        )
        for name in names
    }
    time = {
        f"least_vs_fastest_step_{name}": common.spread(
            [run["least_ms"] / run["fastest_ms"] for run in results[name]],
            "predicted least", "measured fastest", "wall time of a step, 1 or below is right",
        )
        for name in names
    }  # fmt: skip
    rows = [common.row(name, results[name]) for name in names]
    kept = json.loads(options.json.read_text())["rows"] if options.add and options.json.exists() else []
    taken = [run for row in [*rows, *(row for row in kept if row["name"] not in names)] for run in row["rounds"]]
    common.report(
        "plan_accuracy",
        "Predicted and measured memory and time of a step on this CPU",
        COLUMNS,
        rows,
        memory | time,
        {
            "largest_memory_error": max(abs(run["peak_mb"] / run["predicted_mb"] - 1) for run in taken),
            "largest_least_vs_fastest": max(run["least_ms"] / run["fastest_ms"] for run in taken),
        },
        host,
        ("footplate", "torch", "jax", "timm", "transformers", "torchvision"),
        options.json,
        options.add,
    )


if __name__ == "__main__":
    main()
