"""A training step compiled by XLA against eager torch and `torch.compile`: the time of a step, and of the first one.

Each model is trained with AdamW in single precision on the CPU with all cores, on batches that lie ready. *torch.compile*
compiles the network, forward and backward, and leaves the optimizer eager, as Footplate's `compile` does; XLA has the whole
step. The first step of XLA includes its capture. Rounds are interleaved; the first step is taken once.

    python benchmarks/xla_speed.py [MODEL …] [--add] [--json FILE]
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import torch
from common import Figures, arguments_parser, interleave, let_torchvision_be_imported, machine, ratio, report, row
from torch import Tensor, nn
from xla_models import Classifier, Entry, Tagger, Transformer

from footplate.step.capture import capture_training, state_of
from footplate.step.lowering import arrays_of, batch_arrays, lower, rates_of

WORDS, LENGTH = 1000, 64


def _resnet() -> Any:
    let_torchvision_be_imported()
    import torchvision

    return Classifier(torchvision.models.resnet18(num_classes=10))


def _vit() -> Any:
    import timm

    return Classifier(timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=10))


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Transformer(BertForMaskedLM(BertConfig(vocab_size=WORDS, intermediate_size=1024, **sizes)))


def _gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Transformer(GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=256, n_layer=12, n_head=4)))


def _images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 64, 64), torch.randint(0, 10, (rows,))


def _texts(rows: int) -> dict[str, Tensor]:
    words = torch.randint(1, WORDS, (rows, LENGTH))
    return {"input_ids": words, "labels": words.roll(-1, 1)}


def _short_texts(rows: int) -> dict[str, Tensor]:
    words = torch.randint(1, 48, (rows, 32))
    return {"input_ids": words, "labels": words.roll(-1, 1)}


MODELS: dict[str, tuple[Entry, int]] = {
    "ResNet-18": (Entry(_resnet, _images), 16),
    "ViT-tiny": (Entry(_vit, _images), 8),
    "BERT, 4 layers of 256": (Entry(_bert, _texts), 16),
    "GPT-2, 12 layers of 256": (Entry(_gpt, _texts), 8),
    "GRU, 2 layers of 16": (Entry(lambda: Tagger(nn.GRU), _short_texts), 32),
}


def eager(module: Any, batch: Any) -> Callable[[], Any]:
    """A function that makes one step of plain torch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> Any:
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def compiled(module: Any, batch: Any) -> Callable[[], Any]:
    """The same with a network that is compiled by torch."""
    module.net = torch.compile(module.net)
    return eager(module, batch)


def xla(module: Any, batch: Any) -> Callable[[], Any]:
    """The same as one program of XLA's."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    captured = capture_training(module, optimizer, batch)
    program = jax.jit(lower(captured), donate_argnums=0)
    held: list[Any] = [arrays_of(state_of(module, optimizer))]
    given, key, rates = batch_arrays(captured, batch), jax.random.key(0), rates_of(optimizer)

    def step() -> Any:
        held[0], loss, _ = program(held[0], rates, key, given)
        return loss.block_until_ready()

    return step


ENTRANTS = {"eager": eager, "torch.compile": compiled, "xla": xla}


def measured(name: str, rounds: int, steps: int) -> tuple[list[dict[str, Any]], dict[str, Figures]]:
    """Rows and ratios of one model."""
    entry, size = MODELS[name]
    torch.manual_seed(0)
    module, batch = entry.make(), entry.draw(size)
    running, first_s = {}, {}
    for entrant, make in ENTRANTS.items():
        started = time.perf_counter()
        running[entrant] = make(copy.deepcopy(module), batch)
        running[entrant]()
        first_s[entrant] = time.perf_counter() - started

    def turn(entrant: str) -> Figures:
        started = time.perf_counter()
        for _ in range(steps):
            running[entrant]()
        return {"step_ms": (time.perf_counter() - started) / steps * 1e3, "first_s": first_s[entrant]}

    found = interleave(list(ENTRANTS), turn, rounds)
    rows = [row(f"{name}: {entrant}", found[entrant]) for entrant in ENTRANTS]
    return rows, {
        f"{name}: step_vs_eager": ratio(found, "xla", "eager", "step_ms"),
        f"{name}: step_vs_compile": ratio(found, "xla", "torch.compile", "step_ms"),
        f"{name}: first_call_vs_compile": ratio(found, "xla", "torch.compile", "first_s"),
    }


def main() -> None:
    """Measure all models, or those that are named."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("models", nargs="*", help="names of models; all by default")
    parser.add_argument("--add", action="store_true", help="keep what the file has of other models")
    given = parser.parse_args()
    before = machine()
    torch.set_num_threads(int(before["usable_cores"]))
    rows, ratios = [], {}
    for name in given.models or (["GRU, 2 layers of 16"] if given.quick else list(MODELS)):
        found = measured(name, *((1, 1) if given.quick else (10, 4)))
        rows += found[0]
        ratios |= found[1]
    medians = {
        f"{kind}_median": statistics.median(one["median"] for name, one in ratios.items() if name.endswith(kind))
        for kind in ("step_vs_eager", "step_vs_compile", "first_call_vs_compile")
    }
    report(
        "xla_speed", "AdamW on the CPU, all cores", {"step_ms": "ms a step", "first_s": "first step, s"}, rows, ratios,
        medians, before, ("torch", "jax", "footplate"), given.json, given.add,
    )  # fmt: skip


if __name__ == "__main__":
    main()
