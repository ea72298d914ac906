"""A plain loop: training as docs/guide/training.md describes it, in torch only, for programs without random draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.program import Program, batches, configured, loss_of, network, unpacked

TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


@dataclass
class Outcome:
    """The results of one way of running a program."""

    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)  # of each batch
    rates: list[float] = field(default_factory=list)  # the first group's, in each batch
    validations: list[int] = field(default_factory=list)  # the optimizer steps taken before each
    metrics: dict[str, float] = field(default_factory=dict)  # the latest value of each name


class Loop:
    """One run of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.net = network(program).to(TYPES.get(program.precision, torch.float32))
        given: Any = configured(program, self.net)
        self.optimizer = given["optimizer"] if isinstance(given, dict) else given
        scheduler = given["lr_scheduler"] if isinstance(given, dict) else None
        self.scheduler = scheduler["scheduler"] if scheduler else None
        self.found = Outcome({})
        self.steps = 0

    def run(self) -> Outcome:
        """Train as long as the program says."""
        for epoch in range(self.program.max_epochs):
            if self.done():
                break
            self.epoch(epoch)
        self.found.weights = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        return self.found

    def done(self) -> bool:
        return self.steps == self.program.max_steps

    def epoch(self, epoch: int) -> None:
        program, outcome = self.program, self.found
        self.net[0].requires_grad_(epoch >= program.frozen_until)
        total = program.train_batches()
        logged: list[tuple[float, int]] = []
        window: list[Tensor] = []  # the weights of its batches
        for index, batch in enumerate(batches(program, program.rows, 0)[:total]):
            ends_window = (index + 1) % program.accumulate_grad_batches == 0 or index + 1 == total
            outcome.rates.append(self.optimizer.param_groups[0]["lr"])
            loss = self.train(batch, index, window, ends_window)
            outcome.losses.append(loss)
            logged.append((loss, len(unpacked(batch)[1])))
            if self.validates(epoch, index, total):
                self.validate()
            if self.done():
                break
        self.log(logged)
        if index + 1 < total:
            return  # stopped inside the epoch, which a later run can continue
        if self.scheduler is not None and program.schedule == "plateau":
            self.scheduler.step(outcome.metrics["val"])
        elif self.scheduler is not None and program.schedule == "epoch":
            self.scheduler.step()

    def train(self, batch: Any, index: int, window: list[Tensor], ends_window: bool) -> float:
        program = self.program
        with self.autocast():
            losses, weights = loss_of(program, self.net, self.converted(batch))
            total, weight = (losses * weights).sum(), weights.sum()
            loss = total / weight
        if not (program.returns == "some None" and index % 3 == 1 and not program.manual):
            if not window:
                self.optimizer.zero_grad()
            window.append(weight.double())
            (total if program.returns == "loss_sum" else loss / program.accumulate_grad_batches).backward()
        if ends_window and window:
            if program.returns == "loss_sum":
                self.divide(sum(window))
            self.step()
            window.clear()
        return float(loss.detach())

    def divide(self, weight: Any) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight

    def step(self) -> None:
        parameters = list(self.net.parameters())
        if self.program.clip == "norm":
            nn.utils.clip_grad_norm_(parameters, 0.05)
        elif self.program.clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.05)
        self.optimizer.step()
        self.steps += 1
        if self.scheduler is not None and self.program.schedule == "step":
            self.scheduler.step()

    def validates(self, epoch: int, index: int, total: int) -> bool:
        program, interval = self.program, self.program.val_check_interval
        if not program.val_rows or (epoch + 1) % program.check_val_every_n_epoch:
            return False
        every = total if interval is None else interval if isinstance(interval, int) else int(total * interval)
        return (index + 1) % every == 0

    def validate(self) -> None:
        self.net.eval()
        total, rows = 0.0, 0
        with torch.no_grad(), self.autocast():
            for x, y in map(self.converted, batches(self.program, self.program.val_rows, 1)):
                total += float(nn.functional.cross_entropy(self.net(x), y)) * len(y)
                rows += len(y)
        self.net.train()
        self.found.metrics["val"] = total / rows
        self.found.validations.append(self.steps)

    def log(self, logged: list[tuple[float, int]]) -> None:
        mean = sum(loss * rows for loss, rows in logged) / sum(rows for _, rows in logged)
        losses = [loss for loss, _ in logged]
        values = {"mean": mean, "both": mean, "sum": sum(losses), "max": max(losses), "min": min(losses)}
        self.found.metrics |= {name: values[name] for name in self.program.logs}

    def converted(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = unpacked(batch)
        return x.to(TYPES.get(self.program.precision, torch.float32)), y

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program.precision == "bf16-mixed"):
            yield
