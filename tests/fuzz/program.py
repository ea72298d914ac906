"""A random training program: the values that hypothesis draws, and the module, loaders and arguments made from them.

One `Program` runs in many ways (in a plain loop, with Footplate, interrupted and resumed, on two ranks, with XLA, with
Lightning). Every way must give the same losses, learning rates, metrics and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp

FEATURES, CLASSES = 3, 2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, betas=(0.8, 0.9), amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


@dataclass(frozen=True)
class Program:
    """The drawn values of a program. Fields with Lightning's names have Lightning's meaning."""

    seed: int
    rows: int
    batch_size: int
    hidden: int
    norm: bool  # batch norm, whose statistics are part of the state
    dropout: bool
    frozen_until: int  # the epoch in which the first layer begins to learn
    optimizer: str
    groups: bool  # the last layer has a parameter group of its own, with another learning rate
    schedule: str  # "", "step", "epoch", "plateau" (by the validation loss)
    manual: bool
    returns: str  # "tensor", "dict", "loss_sum", or "some None": every third batch is skipped
    logs: frozenset[str]
    changes_what_it_logged: bool
    precision: str
    accumulate_grad_batches: int
    clip: str  # "", "norm", "value"
    max_epochs: int
    max_steps: int
    limit_train_batches: int | None
    val_rows: int
    val_check_interval: int | float | None
    check_val_every_n_epoch: int
    data: str  # "batches" (a list), "loader", "shuffled", "table"

    def train_batches(self) -> int:
        """Number of training batches in an epoch."""
        count = -(-self.rows // self.batch_size)
        return count if self.limit_train_batches is None else min(count, self.limit_train_batches)


def tensors(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Training rows: features (rows, FEATURES) and classes (rows,). With "loss_sum", class -1 is ignored."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, FEATURES, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def batches(program: Program, rows: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """All rows in order, in batches."""
    x, y = tensors(rows, seed)
    return list(zip(x.split(program.batch_size), y.split(program.batch_size), strict=True))


def loaders(program: Program) -> tuple[Any, Any]:
    """The training and validation loaders for `fit`."""
    val = DataLoader(TensorDataset(*tensors(program.val_rows, 1)), program.batch_size) if program.val_rows else None
    x, y = tensors(program.rows, 0)
    if program.data == "batches":
        return batches(program, program.rows, 0), val
    if program.data == "table":
        table = fp.Table({"x": list(x.numpy()), "y": y.numpy()})
        return fp.Loader(table, program.batch_size, shuffle=True, seed=program.seed), val
    return DataLoader(TensorDataset(x, y), program.batch_size, shuffle=program.data == "shuffled"), val


def unpacked(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])


def network(program: Program) -> nn.Sequential:
    torch.manual_seed(program.seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(program.hidden)] if program.norm else []
    middle += [nn.Tanh()] + ([nn.Dropout(0.4)] if program.dropout else [])
    return nn.Sequential(nn.Linear(FEATURES, program.hidden), *middle, nn.Linear(program.hidden, CLASSES))


def loss_of(program: Program, net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The loss of each row and its weight. The weight is 0 for some rows if the step returns sums."""
    x, y = unpacked(batch)
    losses = nn.functional.cross_entropy(net(x), y, reduction="none")
    weights = (y + 1).to(losses.dtype) if program.returns == "loss_sum" else torch.ones_like(losses)
    return losses, weights


def module(program: Program, base: type = fp.Module, quiet: bool = False) -> Any:
    """The program's module.

    Args:
        program: the drawn values.
        base: the base class: Footplate's or Lightning's.
        quiet: record nothing, because a captured step can't.
    """

    class Drawn(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network(program)
            self.automatic_optimization = not program.manual
            self.losses: list[float] = []
            self.rates: list[float] = []
            self.validations: list[float] = []

        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch >= program.frozen_until)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses, weights = loss_of(program, self.net, batch)
            total, weight = (losses * weights).sum(), weights.sum()
            loss = total / weight
            if not quiet:
                self.losses.append(float(loss.detach()))
                self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            self._log(loss.detach(), batch)
            if program.manual:
                return self._by_hand(loss, batch_idx)
            if program.returns == "some None" and batch_idx % 3 == 1:
                return None
            returned = {"tensor": loss, "dict": {"loss": loss}, "loss_sum": {"loss_sum": total, "weight": weight}}
            return returned.get(program.returns, loss)

        def _log(self, loss: Tensor, batch: Any) -> None:
            rows = len(unpacked(batch)[1])
            if "mean" in program.logs:
                value = loss.clone()
                self.log("mean", value, on_step=False, on_epoch=True, batch_size=rows)
                if program.changes_what_it_logged:
                    value += 100.0
            if "both" in program.logs:
                self.log("both", loss, on_step=True, on_epoch=True, batch_size=rows)
            for name in ("sum", "max", "min"):
                if name in program.logs:
                    self.log(name, loss, on_step=False, on_epoch=True, reduce_fx=name, batch_size=rows)

        def _by_hand(self, loss: Tensor, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = unpacked(batch)
            self.log("val", nn.functional.cross_entropy(self.net(x), y), batch_size=len(y))

        def on_validation_epoch_end(self) -> None:
            if not quiet and not self.trainer.sanity_checking:
                self.validations.append(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            return configured(program, self.net)

    return Drawn()


def configured(program: Program, net: nn.Sequential) -> Any:
    """The return value of `configure_optimizers`."""
    first = [parameter for layer in net[:-1] for parameter in layer.parameters()]
    last = list(net[-1].parameters())
    parameters = [{"params": first}, {"params": last, "lr": 0.03}] if program.groups else [*first, *last]
    optimizer = OPTIMIZERS[program.optimizer](parameters)
    if not program.schedule:
        return optimizer
    if program.schedule == "plateau":
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": program.schedule}}


def arguments(program: Program, root: Path) -> dict[str, Any]:
    """The trainer's arguments, which Footplate and Lightning both accept."""
    clips = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": program.clip} if program.clip else {}
    return {
        "accelerator": "cpu",
        "default_root_dir": root,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "precision": program.precision,
        "max_epochs": program.max_epochs,
        "max_steps": program.max_steps,
        "accumulate_grad_batches": program.accumulate_grad_batches,
        "limit_train_batches": program.limit_train_batches,
        "val_check_interval": program.val_check_interval,
        "check_val_every_n_epoch": program.check_val_every_n_epoch,
        **clips,
    }


@st.composite
def programs(draw: Any, **fixed: Any) -> Program:
    """Valid programs. `fixed` fields have one value in all of them."""

    def one_of(name: str, *values: Any) -> Any:
        return fixed[name] if name in fixed else draw(st.sampled_from(values), label=name)

    rows = fixed["rows"] if "rows" in fixed else draw(st.integers(2, 14), label="rows")
    batch_size = one_of("batch_size", 1, 2, 3, 5)
    norm = one_of("norm", False, True) and batch_size > 1 and rows % batch_size != 1
    count = -(-rows // batch_size)
    limit = one_of("limit_train_batches", None, 1, 3)
    trained = count if limit is None else min(count, limit)
    manual = one_of("manual", False, False, True)
    val_rows = one_of("val_rows", 0, 1, 5)
    schedule = one_of("schedule", "", "step", "epoch", "plateau")
    if (schedule == "plateau" and not val_rows) or manual:
        schedule = ""  # with manual optimisation, schedulers are the user's own
    interval = one_of("val_check_interval", None, 1.0, 0.5, 1, 2)
    if schedule == "plateau" or (isinstance(interval, int) and interval > trained) or trained < 2:
        interval = None
    max_steps = one_of("max_steps", -1, -1, -1, 1, 4)
    returns = one_of("returns", "tensor", "dict", "loss_sum", "some None")
    return Program(
        seed=draw(st.integers(0, 9), label="seed"),
        rows=rows,
        batch_size=batch_size,
        hidden=one_of("hidden", 1, 4),
        norm=norm,
        dropout=one_of("dropout", False, True),
        frozen_until=one_of("frozen_until", 0, 0, 1),
        optimizer=one_of("optimizer", *OPTIMIZERS),
        groups=one_of("groups", False, True),
        schedule=schedule,
        manual=manual,
        returns="tensor" if manual else returns,
        logs=fixed.get("logs")
        or frozenset(draw(st.sets(st.sampled_from(["mean", "both", "sum", "max", "min"])), label="logs")),
        changes_what_it_logged=one_of("changes_what_it_logged", False, True),
        precision=one_of("precision", "32-true", "64-true", "bf16-mixed", "bf16-true"),
        accumulate_grad_batches=1 if manual else one_of("accumulate_grad_batches", 1, 1, 2, 3),
        clip="" if manual else one_of("clip", "", "norm", "value"),
        max_epochs=one_of("max_epochs", 1, 2, 3),
        max_steps=max_steps,
        limit_train_batches=limit,
        val_rows=val_rows,
        val_check_interval=interval,
        check_val_every_n_epoch=1 if schedule == "plateau" else one_of("check_val_every_n_epoch", 1, 2),
        data=one_of("data", "batches", "loader", "shuffled", "table"),
    )
