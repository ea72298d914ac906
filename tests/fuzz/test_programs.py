"""Random training programs, each run in several ways that must agree.

    plain loop, written out from the documentation      bit for bit
    interrupted anywhere and resumed                     bit for bit
    two ranks, XLA, Lightning, compiled as a whole       to rounding

`make fuzz` draws other programs than the suite does, for a given time (`fuzz/__main__.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ranks
from step.recorded_graph import let_cpu_have_graphs

import footplate as fp
from footplate.step import compiled_step
from footplate.training import monitor
from fuzz.plain import Loop, Outcome
from fuzz.program import Program, arguments, loaders, module, programs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _looks_at_every_step() -> Iterator[None]:
    """Let the monitor time every step, and examine one. That must not change a bit either."""
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(monitor, "LOOK_S", 0.0)
        patch.setattr(monitor, "STEPS_BETWEEN_LOOKS", 0)
        yield


@contextmanager
def folder() -> Iterator[Path]:
    """A directory for one example; a test's own would be the same for all examples."""
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def outcome(model: Any, trainer: Any) -> Outcome:
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(weights, model.losses, model.rates, model.validations, metrics)


def trained(program: Program, root: Path, quiet: bool = False, **given: Any) -> Outcome:
    """Run a program with Footplate."""
    model = module(program, quiet=quiet)
    trainer = fp.Trainer(**{**arguments(program, root), "seed": program.seed, **given})
    trainer.fit(model, *loaders(program))
    return outcome(model, trainer)


def exactly(actual: Outcome, wanted: Outcome) -> None:
    assert actual.rates == wanted.rates
    assert actual.losses == wanted.losses
    assert actual.validations == wanted.validations
    assert {name: actual.metrics[name] for name in wanted.metrics} == pytest.approx(
        wanted.metrics, rel=1e-12, nan_ok=True
    )
    for name, value in wanted.weights.items():
        assert torch.equal(actual.weights[name], value), name


def nearly(actual: Outcome, wanted: Outcome, tolerance: float) -> None:
    for name, value in wanted.weights.items():
        torch.testing.assert_close(
            actual.weights[name].double(), value.double(), rtol=tolerance, atol=tolerance, msg=name
        )
    assert actual.metrics.keys() == wanted.metrics.keys()
    for name, value in wanted.metrics.items():
        assert actual.metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name


@settings(max_examples=100)
@given(program=programs(dropout=False, data="batches"))
def test_a_program_does_what_the_plain_loop_does(program: Program) -> None:
    with folder() as root:
        exactly(trained(program, root), Loop(program).run())


class Cut(Exception):
    """Ends a run in the middle."""


class CutsOff(fp.Callback):
    """Raises in one of its hooks, after a given number of calls."""

    def __init__(self, hook: str, count: int) -> None:
        self.left = count
        setattr(self, hook, self._count)

    def _count(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Cut


HOOKS = [  # not those inside of a step before its backward pass: what the forward pass has logged can't be undone
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_optimizer_step",
    "on_validation_batch_end",
    "on_train_epoch_end",
    "on_validation_end",
    "on_train_epoch_start",
]


@settings(max_examples=50)
@given(program=programs(), hook=st.sampled_from(HOOKS), count=st.integers(0, 9))
def test_a_program_that_is_cut_off_anywhere_continues_bit_for_bit(program: Program, hook: str, count: int) -> None:
    with folder() as root:
        whole = trained(program, root / "whole")
        first = module(program)
        given = {**arguments(program, root / "cut"), "seed": program.seed, "enable_checkpointing": True}
        with suppress(Cut):
            fp.Trainer(**given, callbacks=[CutsOff(hook, count)]).fit(first, *loaders(program))
        model = module(program)
        trainer = fp.Trainer(**given)
        if (root / "cut" / "checkpoints").exists():
            trainer.fit(model, *loaders(program), ckpt_path="last")
            resumed = outcome(model, trainer)
            assert resumed.losses == whole.losses[len(whole.losses) - len(resumed.losses) :]
            for name, value in whole.weights.items():
                assert torch.equal(resumed.weights[name], value), name
            assert {name: value for name, value in resumed.metrics.items() if name in whole.metrics} == pytest.approx(
                {name: value for name, value in whole.metrics.items() if name in resumed.metrics},
                rel=1e-12,
                nan_ok=True,
            )


# Rows of a table that don't make a batch for every rank are left out, so there are none here.
def on_ranks(program: Program, root: Path) -> Outcome:
    return trained(program, root, devices=2, strategy="ddp")


@settings(max_examples=8)
@given(
    program=st.sampled_from(["dict", "some None"])
    .flatmap(
        lambda returns: programs(
            dropout=False,
            norm=False,
            precision="64-true",
            optimizer="momentum",
            batch_size=2,
            logs=frozenset({"mean"}),
            val_check_interval=None,
            returns=returns,
            manual=False,
        )
    )
    .filter(lambda program: program.data != "batches" and (program.data != "table" or program.rows % 4 == 0))
)
def test_two_ranks_learn_what_one_does_with_twice_the_batch(program: Program) -> None:
    with folder() as root:
        wanted = trained(dataclasses.replace(program, batch_size=4), root / "one")
        for of_rank in ranks.run(functools.partial(on_ranks, program, root / "two"), 2):
            assert of_rank.rates == wanted.rates
            assert of_rank.validations == wanted.validations
            nearly(of_rank, wanted, 1e-9)


@settings(max_examples=4)
@given(program=programs(dropout=False, precision="64-true", manual=False, frozen_until=0, optimizer="momentum"))
def test_xla_learns_what_torch_does(program: Program) -> None:
    with folder() as root:
        nearly(
            trained(program, root / "xla", quiet=True, accelerator="xla", devices=1),
            trained(program, root / "cpu"),
            1e-9,
        )


@settings(max_examples=6)
@given(program=programs(precision="64-true", manual=False), as_graphs=st.booleans())
def test_a_step_compiled_as_a_whole_learns_what_the_eager_step_does(program: Program, as_graphs: bool) -> None:
    """Traced only, on the CPU: a compilation takes seconds. The graphs are recorded operations."""
    with folder() as root, pytest.MonkeyPatch().context() as patch:
        wanted = trained(program, root / "eager", quiet=True)
        patch.setitem(compiled_step.BACKENDS, "step", "eager")
        if as_graphs:
            let_cpu_have_graphs(patch)
        # A compiled step has learning rates in single precision, and Adam's powers of the betas.
        tolerance = 1e-6 if program.optimizer in ("sgd", "momentum") else 1e-4
        nearly(trained(program, root / "step", quiet=True, compile="step"), wanted, tolerance)


@settings(max_examples=25)
@given(
    program=programs(dropout=False, data="loader", max_steps=-1).filter(
        lambda program: program.returns in ("tensor", "dict")
    )
)
def test_lightning_learns_the_same(program: Program) -> None:
    with folder() as root:
        model = module(program, pl.LightningModule)
        trainer = pl.Trainer(**arguments(program, root / "lightning"), devices=1)
        trainer.fit(model, *loaders(program))
        wanted = outcome(model, trainer)
        ours = trained(program, root / "footplate")
        assert ours.losses == pytest.approx(wanted.losses, rel=1e-6)
        assert ours.rates == pytest.approx(wanted.rates)
        assert ours.validations == wanted.validations
        nearly(ours, wanted, 1e-6 if program.precision != "bf16-true" else 1e-2)
