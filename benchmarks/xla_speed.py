"""A training step compiled by XLA against eager torch and `torch.compile`: time of a step, and time to the first one.

Each model trains with AdamW in single precision on all cores of the CPU, on a prepared batch. *torch.compile* compiles the
network, forward and backward, and leaves the optimizer eager, as the trainer's `compile=True` does. XLA compiles the whole
step. Rounds are interleaved. The first step is timed once, from a new module to the first loss. XLA's time includes its
capture; torch.compile begins with an empty cache.

Further figures: K steps of XLA in one call; the same step on two virtual devices with half of the batch each; and, for a
tiny MLP, the cost of a call of 50 steps to the host. That is the time until the call returns, and all of the trainer's
time, including the loader, without the time of the devices.

    python benchmarks/xla_speed.py [MODEL …] [--core] [--add] [--json FILE]
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import jax
import torch
from common import (
    LESS,
    WALL_STEP,
    Figures,
    Ratio,
    interleave,
    let_torchvision_be_imported,
    machine,
    models_parser,
    ratio,
    report,
    row,
    spread,
)
from jax import lax
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from xla_models import Classifier, Entry, Tagger, Transformer

import footplate as fp
from footplate.step.xla.capture import capture_training, state_of
from footplate.step.xla.lowering import arrays_of, batch_arrays, lower, rates_of
from footplate.step.xla.lowering.data_parallel import data_parallel, mesh_of

WORDS, LENGTH = 1000, 64
AT_ONCE = 4
TINY_AT_ONCE, TINY_STEPS = 50, 5000


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


class Tiny(fp.Module):
    """A network whose step costs almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _numbers(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 1)


MODELS: dict[str, tuple[Entry, int]] = {
    "ResNet-18": (Entry(_resnet, _images), 8),
    "ViT-tiny": (Entry(_vit, _images), 4),
    "BERT-mini": (Entry(_bert, _texts), 8),
    "GPT-small": (Entry(_gpt, _texts), 4),
    "GRU": (Entry(lambda: Tagger(nn.GRU), _short_texts), 32),
}
"""Models, and the rows of their batches. The GRU has 2 layers of 16 over 32 words."""


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def eager(module: Any, batch: Any) -> Callable[[], Any]:
    """A function that makes one step of plain torch."""
    optimizer = _optimizer(module)

    def step() -> Any:
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def compiled(module: Any, batch: Any) -> Callable[[], Any]:
    """A function that makes the same step with a network compiled by torch."""
    module.net = torch.compile(module.net)
    return eager(module, batch)


def xla(module: Any, batch: Any) -> Callable[[], Any]:
    """A function that makes the same step as one program of XLA."""
    optimizer = _optimizer(module)
    captured = capture_training(module, optimizer, batch)
    return _running(jax.jit(lower(captured), donate_argnums=0), module, optimizer, batch_arrays(captured, batch))


def xla_at_once(module: Any, batch: Any) -> Callable[[], Any]:
    """A function that makes `AT_ONCE` steps in one program."""
    optimizer = _optimizer(module)
    captured = capture_training(module, optimizer, batch)
    step = lower(captured)

    def several(state: Any, rates: Any, key: Any, batch: Any) -> Any:
        def body(state: Any, number: Any) -> Any:
            state, loss, logs = step(state, rates, jax.random.fold_in(key, number), batch)
            return state, (loss, logs)

        state, (losses, logs) = lax.scan(body, state, jax.numpy.arange(AT_ONCE))
        return state, losses, logs

    return _running(jax.jit(several, donate_argnums=0), module, optimizer, batch_arrays(captured, batch))


def xla_on_two(module: Any, batch: Any) -> Callable[[], Any]:
    """A function that makes the step on two virtual devices, each with half of the batch."""
    optimizer = _optimizer(module)
    half = pytree.tree_map(lambda tensor: tensor[: len(tensor) // 2], batch)
    captured = capture_training(module, optimizer, half, averages=True)
    program = data_parallel(captured, mesh_of(jax.devices()[:2]))
    return _running(program, module, optimizer, batch_arrays(captured, batch, 2))


def _running(program: Any, module: Any, optimizer: Any, arrays: Any) -> Callable[[], Any]:
    held: list[Any] = [arrays_of(state_of(module, optimizer))]
    key, rates = jax.random.key(0), rates_of(optimizer)

    def step() -> Any:
        held[0], loss, _ = program(held[0], rates, key, arrays)
        return loss.block_until_ready()

    return step


AT_ONCE_NAME = f"xla, {AT_ONCE} steps a call"
ENTRANTS = {
    "eager": eager, "torch.compile": compiled, "xla": xla, AT_ONCE_NAME: xla_at_once, "xla, two devices": xla_on_two,
}  # fmt: skip
CORE = {name: ENTRANTS[name] for name in ("eager", "torch.compile", "xla")}
QUICK = {name: ENTRANTS[name] for name in ("eager", "xla", AT_ONCE_NAME, "xla, two devices")}
TINY = "tiny MLP"
RATIOS = {
    "step_vs_eager": ("xla", "eager", "step_ms", WALL_STEP),
    "step_vs_compile": ("xla", "torch.compile", "step_ms", WALL_STEP),
    "first_call_vs_compile": (
        "xla",
        "torch.compile",
        "first_s",
        f"wall time of the first step, with compiling, {LESS}",
    ),
    "at_once_vs_one": (AT_ONCE_NAME, "xla", "step_ms", WALL_STEP),
    "two_devices_vs_one": ("xla, two devices", "xla", "step_ms", WALL_STEP),
    "two_devices_vs_eager": ("xla, two devices", "eager", "step_ms", WALL_STEP),
}


def measured(
    name: str, entrants: dict[str, Any], rounds: int, steps: int
) -> tuple[list[dict[str, Any]], dict[str, Ratio]]:
    """Rows and ratios of one model."""
    entry, size = MODELS[name] if name != TINY else (Entry(Tiny, _numbers), 8)
    torch.manual_seed(0)
    module, batch = entry.make(), entry.draw(size)
    running, first_s = {}, {}
    for entrant, make in entrants.items():
        started = time.perf_counter()
        running[entrant] = make(copy.deepcopy(module), batch)
        running[entrant]()
        first_s[entrant] = time.perf_counter() - started
        running[entrant]()  # the second step may still compile or allocate

    def turn(entrant: str) -> Figures:
        calls = 1 if entrant == AT_ONCE_NAME else steps
        started = time.perf_counter()
        for _ in range(calls):
            running[entrant]()
        made = calls * (AT_ONCE if entrant == AT_ONCE_NAME else 1)
        return {"step_ms": (time.perf_counter() - started) / made * 1e3, "first_s": first_s[entrant]}

    results = interleave(list(entrants), turn, rounds)
    rows = [row(f"{name}: {entrant}", results[entrant]) for entrant in entrants]
    known = {kind: pair for kind, pair in RATIOS.items() if pair[0] in entrants and pair[1] in entrants}
    return rows, {f"{name}: {kind}": ratio(results, *pair) for kind, pair in known.items()}


def host_figures(steps: int) -> Figures:
    """Cost of calls of 50 steps of a tiny MLP in microseconds per step: for the host, and for the devices."""
    module, batch = Tiny(), _numbers(8)
    optimizer = module.configure_optimizers()
    captured = capture_training(module, optimizer, batch)
    step = lower(captured)

    def several(state: Any, rates: Any, keys: Any, batches: Any) -> Any:
        def body(state: Any, arrays: Any) -> Any:
            state, loss, logs = step(state, rates, *arrays)
            return state, (loss, logs)

        return lax.scan(body, state, (keys, batches))

    program = jax.jit(several, donate_argnums=0)
    arrays = tuple(jax.numpy.stack([array] * TINY_AT_ONCE) for array in batch_arrays(captured, batch))
    keys, state = (jax.random.split(jax.random.key(0), TINY_AT_ONCE), arrays_of(state_of(module, optimizer)))
    rates = rates_of(optimizer)
    returned, whole = [], []
    for _ in range(20 + steps // TINY_AT_ONCE):
        begun = time.perf_counter()
        state, (losses, _) = program(state, rates, keys, arrays)
        returned.append(time.perf_counter() - begun)
        losses.block_until_ready()
        whole.append(time.perf_counter() - begun)
    each = 1e6 / TINY_AT_ONCE
    call, device = (statistics.median(times[20:]) * each for times in (returned, whole))
    return {
        "host_us_per_step_k50": call,
        "device_us_per_step_k50": device,
        "trainer_us_per_step_k50": _trainer_us(steps) - device,
    }


class Clock(fp.Callback):
    """Records the end of each epoch."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.at.append(time.perf_counter())


def _trainer_us(steps: int) -> float:
    """Microseconds per step of a `Trainer` with `iterations_per_loop=50`, over the second epoch."""
    loader = [_numbers(8) for _ in range(steps)]
    clock = Clock()
    trainer = fp.Trainer(
        accelerator="xla", devices=1, max_epochs=2, iterations_per_loop=TINY_AT_ONCE, logger=False, callbacks=[clock],
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Tiny(), loader)
    return (clock.at[1] - clock.at[0]) / steps * 1e6


def medians(figures: dict[str, Any]) -> dict[str, Ratio]:
    """Ratios by kind over the models that have the kind: the median and the quartiles of the models' ratios."""
    by_kind: dict[str, dict[str, Ratio]] = {}
    for name, figure in figures.items():
        model, _, kind = name.rpartition(": ")
        if kind in RATIOS:
            by_kind.setdefault(kind, {})[model] = figure
    return {f"{kind}_median": _over_models(kind, of_models) for kind, of_models in sorted(by_kind.items())}


def _over_models(kind: str, of_models: dict[str, Ratio]) -> Ratio:
    over, under, _, measure = RATIOS[kind]
    quotient = spread([each["median"] for each in of_models.values()], over, under, measure)
    return {**quotient, "rounds": min(each["rounds"] for each in of_models.values()), "models": sorted(of_models)}


def main() -> None:
    """Measure all models, or the named ones."""
    parser = models_parser(__doc__ or "", names="names of models, or `host`; all by default")
    parser.add_argument(
        "--core", action="store_true", help="eager torch, torch.compile and XLA with one step a call alone"
    )
    options = parser.parse_args()
    before = machine()
    torch.set_num_threads(int(before["usable_cores"]))
    names = options.models or ([TINY, "host"] if options.quick else [*MODELS, "host"])
    rows, ratios, figures = [], {}, {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name in names:
            if name == "host":
                figures |= host_figures(200 if options.quick else TINY_STEPS)
                continue
            entrants = QUICK if options.quick else CORE if options.core else ENTRANTS
            more_rows, more_ratios = measured(name, entrants, *((1, 1) if options.quick else (3, 3)))
            rows += more_rows
            ratios |= more_ratios
    report(
        "xla_speed", "AdamW on the CPU, all cores", {"step_ms": "ms a step", "first_s": "first step, s"}, rows, ratios,
        figures, before, ("torch", "jax", "footplate"), options.json, options.add,
    )  # fmt: skip
    if options.json:
        result = json.loads(options.json.read_text())
        over_models = medians(result["figures"])
        result["ratios"] |= {name: figure["median"] for name, figure in over_models.items()}
        result["figures"] |= over_models
        result["figures"]["models"] = len({name.split(": ")[0] for name in result["ratios"] if ": " in name})
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
