"""Models and training loops for `gpu_train.py`: the same model, optimizer, precision and batches in every loop.

Each loop takes a model, its turns and a directory for its files. The turns (`gpu_turns.py`) are an iterable of batches with
a length, whose iterator also keeps the time. A loop trains until its process is killed. All loops use AdamW, which is fused
on a GPU. Mixed precision is bfloat16. *Compiled* loops compile the network, forward and backward. Loss and optimizer stay
eager. *Step* loops compile the loss and the optimizer, too. *Graph* loops replay the eager step as one CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from common import let_torchvision_be_imported
from step_variants import OFF, network
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpu_turns import Turns

READ_EVERY = 50  # steps from one reading of the loss to the next
CLASSES = 1000
GRAPHS = {"mode": "reduce-overhead"}

Loop = Callable[["Model", "Turns", Path], None]


@dataclass(frozen=True)
class Model:
    """A model to train, and how it is measured.

    Attributes:
        make: makes the network.
        draw: draws a batch of a number of rows: the network's input and the classes.
        rows: the rows of a batch.
        precision: "bf16-mixed" or "32-true".
        channels_last: the memory format of network and images, where torch computes.
        items: what is counted of a row: 1 image, or a number of tokens.
        rounds: the number of turns of each loop.
        turn_s: the time of a turn.
        lead: the steps at the beginning of each turn that are not timed.
        image_size: pixels of an image; 0 for other batches.
    """

    make: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    rows: int
    precision: str = "bf16-mixed"
    channels_last: bool = False
    items: int = 1
    rounds: int = 5
    turn_s: float = 0.35
    lead: int = 2
    image_size: int = 0

    def network(self, device: str) -> nn.Module:
        """Make the network on a device, always with the same weights."""
        torch.manual_seed(0)
        net = self.make().to(device)
        return net.to(memory_format=torch.channels_last) if self.channels_last else net  # type: ignore[call-overload]

    def batches(self, device: str, number: int) -> list[tuple[Tensor, Tensor]]:
        """Make some different batches on a device."""
        torch.manual_seed(1)
        made = [self.draw(self.rows) for _ in range(number)]
        return [(self._laid_out(x.to(device)), y.to(device)) for x, y in made]

    def autocast(self, device: str) -> Any:
        """Return the context of a forward pass in this precision."""
        if self.precision == "32-true":
            return contextlib.nullcontext()
        return torch.autocast(device, torch.bfloat16)

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.is_floating_point() else x


class Words(nn.Module):
    """A language model of transformers that returns only the logits."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        fixed: dict[str, Any] = {"use_cache": False, "attn_implementation": "sdpa"}
        no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, **fixed, **no_dropout))

    def forward(self, words: Tensor) -> Tensor:
        return self.net(words).logits


class FromBytes(nn.Module):
    """A classifier of images that come as bytes."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = make()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net((pixels.contiguous(memory_format=torch.channels_last).float() - 127.5) / 64)


def optimizer(net: nn.Module, device: str) -> torch.optim.Optimizer:
    """Make the optimizer of every loop."""
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device == "cuda")


def loss_of(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the cross entropy of all rows, or of all words of all rows."""
    return F.cross_entropy(logits.flatten(0, -2), classes.flatten())


def module(base: Any, net: Any, device: str) -> Any:
    """The same module for Footplate and Lightning."""

    class Trained(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
            loss = loss_of(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self, device)

    return Trained()


# The models


def torchvision_model(name: str) -> nn.Module:
    let_torchvision_be_imported()
    import torchvision

    return getattr(torchvision.models, name)()


def _small_resnet() -> nn.Module:
    let_torchvision_be_imported()
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1])


def _small_vit() -> nn.Module:
    let_torchvision_be_imported()
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32)


def images(size: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, size, size), torch.randint(0, CLASSES, (rows,))


def _bytes(size: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8), torch.randint(0, CLASSES, (rows,))


def words(vocabulary: int, length: int, rows: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, vocabulary, (rows, length))
    return words, words.roll(-1, 1)


def _numbers(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 32), torch.randint(0, 10, (rows,))


TABLE = "resnet50_table"
_RESNET = functools.partial(torchvision_model, "resnet50")
_MLP = Model(network, _numbers, 32, precision="32-true", rounds=15, turn_s=0.12, lead=20)
_WHOLE_TABLE = {"channels_last": True, "rounds": 2, "turn_s": 3.0, "lead": 24}

MODELS: dict[str, Model] = {
    "resnet50": Model(_RESNET, functools.partial(images, 224), 128, channels_last=True, image_size=224),
    "mlp": _MLP,
    "gpt_124m": Model(Words, functools.partial(words, 50257, 1024), 8, items=1024),
    TABLE: Model(
        functools.partial(FromBytes, _RESNET), functools.partial(_bytes, 224), 128, image_size=224, **_WHOLE_TABLE
    ),
    "vit_b_16": Model(functools.partial(torchvision_model, "vit_b_16"), functools.partial(images, 224), 64, image_size=224),
}  # fmt: skip
SMALL: dict[str, Model] = {
    "resnet50": Model(_small_resnet, functools.partial(images, 32), 4, channels_last=True, image_size=32),
    "mlp": _MLP,
    "gpt_124m": Model(
        functools.partial(Words, vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2),
        functools.partial(words, 100, 16), 2, items=16,
    ),
    TABLE: Model(
        functools.partial(FromBytes, _small_resnet), functools.partial(_bytes, 32), 4, image_size=32, **_WHOLE_TABLE
    ),
    "vit_b_16": Model(_small_vit, functools.partial(images, 32), 4, image_size=32),
}  # fmt: skip
"""The same names with tiny networks, for a quick run."""


# The loops


def raw(options: dict[str, Any] | None, model: Model, turns: Turns, directory: Path) -> None:
    net = model.network(turns.device)
    adamw = optimizer(net, turns.device)
    forward = net if options is None else torch.compile(net, **options)
    for step, (x, y) in enumerate(turns):
        adamw.zero_grad()
        with model.autocast(turns.device):
            loss = loss_of(forward(x), y)
        loss.backward()
        adamw.step()
        if step % READ_EVERY == 0:
            loss.item()


def raw_step(model: Model, turns: Turns, directory: Path) -> None:
    """Compile the whole step as one would write it: forward, backward, optimizer."""
    net = model.network(turns.device)
    adamw = optimizer(net, turns.device)

    @torch.compile
    def train(x: Tensor, y: Tensor) -> Tensor:
        with model.autocast(turns.device):
            loss = loss_of(net(x), y)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    for step, (x, y) in enumerate(turns):
        loss = train(x, y)
        if step % READ_EVERY == 0:
            loss.item()


def raw_graph(model: Model, turns: Turns, directory: Path) -> None:
    """Capture the whole step as one CUDA graph, as torch's documentation does."""
    net = model.network(turns.device)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True, capturable=True)

    def train(x: Tensor, y: Tensor) -> Tensor:
        adamw.zero_grad()
        with model.autocast(turns.device):
            loss = loss_of(net(x), y)
        loss.backward()
        adamw.step()
        return loss.detach()

    batches = iter(turns)
    x, y = (each.clone() for each in next(batches))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(x, y)
    for step, (new_x, new_y) in enumerate(batches):
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        if step % READ_EVERY == 0:
            loss.item()


def _footplate_trainer(model: Model, turns: Turns, directory: Path, **settings: Any) -> Any:
    import footplate as fp

    trainer = fp.Trainer(
        **{"accelerator": turns.device, "devices": 1, "precision": model.precision, "max_epochs": 1, **settings},
        log_every_n_steps=READ_EVERY, default_root_dir=directory, **OFF,
    )  # fmt: skip
    turns.trainer = trainer
    return trainer


def footplate(options: Any, model: Model, turns: Turns, directory: Path) -> None:
    import footplate as fp

    trainer = _footplate_trainer(model, turns, directory, compile=options)
    trainer.fit(module(fp.Module, model.network("cpu"), turns.device), turns)


def footplate_xla(model: Model, turns: Turns, directory: Path) -> None:
    import jax

    import footplate as fp

    if turns.accelerator == "cuda" and jax.local_devices()[0].platform != "gpu":
        raise RuntimeError(f"JAX has no GPU, but {jax.local_devices()[0].platform}.")
    trainer = _footplate_trainer(model, turns, directory, accelerator="xla")
    trainer.fit(module(fp.Module, model.network("cpu"), turns.device), turns)


def footplate_from_table(model: Model, turns: Turns, directory: Path) -> None:
    """Train on a table of JPEGs. The loader isn't wrapped, so that it prefetches; a callback stops the loop instead."""
    import footplate as fp
    from footplate.data import Loader

    class Stop(fp.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            turns.step()

    loader = Loader(
        fp.Table(str(turns.table)), model.rows, shuffle=True, drop_last=True, image_size=model.image_size
    )  # fmt: skip
    turns.facts = lambda: {"threads": float(loader.threads)}
    trainer = _footplate_trainer(model, turns, directory, max_epochs=-1, callbacks=[Stop()])
    trainer.fit(module(fp.Module, model.network("cpu"), turns.device), loader)


def lightning(options: dict[str, Any] | None, model: Model, turns: Turns, directory: Path) -> None:
    let_torchvision_be_imported()
    import lightning.pytorch as pl

    trainer = pl.Trainer(
        accelerator={"cuda": "gpu"}.get(turns.device, turns.device), devices=1, precision=model.precision,  # type: ignore[arg-type]
        max_epochs=1, log_every_n_steps=READ_EVERY, default_root_dir=directory, **OFF,
    )  # fmt: skip
    net = model.network("cpu")
    trainer.fit(
        module(pl.LightningModule, net if options is None else torch.compile(net, **options), turns.device), turns
    )


def accelerate(model: Model, turns: Turns, directory: Path) -> None:
    from accelerate import Accelerator

    runtime = Accelerator(cpu=turns.device == "cpu", mixed_precision="no" if model.precision == "32-true" else "bf16")
    plain = model.network(turns.device)
    net, adamw = runtime.prepare(plain, optimizer(plain, turns.device))
    for step, (x, y) in enumerate(turns):
        adamw.zero_grad()
        loss = loss_of(net(x), y)
        runtime.backward(loss)
        adamw.step()
        if step % READ_EVERY == 0:
            loss.item()


LOOPS: dict[str, Loop] = {
    "raw eager": functools.partial(raw, None),
    "footplate eager": functools.partial(footplate, False),
    "lightning eager": functools.partial(lightning, None),
    "accelerate eager": accelerate,
    "raw compiled": functools.partial(raw, {}),
    "footplate compiled": functools.partial(footplate, True),
    "lightning compiled": functools.partial(lightning, {}),
    "raw cudagraphs": functools.partial(raw, GRAPHS),
    "footplate cudagraphs": functools.partial(footplate, GRAPHS),
    "raw step": raw_step,
    "footplate step": functools.partial(footplate, "step"),
    "raw graph": raw_graph,
    "footplate graph": functools.partial(footplate, "cudagraphs"),
    "footplate xla": footplate_xla,
}
NEEDS_CUDA = ("raw graph", "footplate graph")
TABLE_LOOPS: dict[str, Loop] = {
    "ready batches": functools.partial(footplate, False),
    "from the table": footplate_from_table,
}
AFTER = {
    "footplate eager": "raw eager",
    "lightning eager": "footplate eager",
    "accelerate eager": "lightning eager",
    "footplate compiled": "raw compiled",
    "lightning compiled": "footplate compiled",
    "footplate cudagraphs": "raw cudagraphs",
    "footplate step": "raw step",
    "raw graph": "accelerate eager",
    "footplate graph": "raw graph",
    "from the table": "ready batches",
}
"""The loop that a loop waits for at its first steps. So they don't all need the GPU's memory at once, and no two loops
compile the same network at the same time."""
COMPILE_FIRST = ("raw compiled", "raw cudagraphs", "raw step", "footplate xla")


def loops_of(name: str) -> dict[str, Loop]:
    """Return the loops that train a model."""
    return TABLE_LOOPS if name == TABLE else LOOPS
