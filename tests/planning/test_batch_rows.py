"""Batch sizes that are followed from a step with two and with four rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import footplate as fp
from footplate.planning.counted_choice import counted_choice
from footplate.planning.huggingface_models import configured_model
from footplate.planning.layouts import Layout
from footplate.planning.rank_step import RankSteps
from footplate.planning.subject import Subject
from footplate.planning.targets import target_of

CONFIGS = Path(__file__).parent / "configs"
ONE, TWO = Layout("ddp"), Layout("ddp", replicas=2)


class Net(fp.Module):
    """A step of its own, with a convolution and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 16))

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch))

    def loss(self, features: torch.Tensor) -> torch.Tensor:
        return features.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Contrastive(Net):
    """Compares each row with each other one, so its memory grows with the square of the rows."""

    def loss(self, features):
        return F.cross_entropy(features @ features.T, torch.arange(len(features)))


class Grouped(Net):
    """Computes in groups of at most four rows, so two and four rows don't tell what eight need."""

    def loss(self, features):
        group = min(len(features), 4)
        members = features.reshape(group, -1, 16)
        return (members[:, None] - members[None]).square().mean()


class Eights(Net):
    """Works with multiples of eight rows only."""

    def loss(self, features):
        return features.reshape(8, -1, 16).sum(0).square().mean()


def subject_of(module: fp.Module, free_batch: bool = False) -> Subject:
    batch = torch.empty(8, 3, 14, 14)
    return Subject(
        name="Net", module=module, batch=batch, batch_size=8, free_batch=free_batch, precision="32-true", rows=None,
        epochs=1,
    )  # fmt: skip


def assert_same(followed: Any, captured: Any) -> None:
    for name, value in vars(captured).items():
        assert getattr(followed, name) == value, name


@pytest.mark.parametrize("kind", [Net, Contrastive])
@pytest.mark.parametrize("layout", [ONE, TWO], ids=str)
def test_a_larger_batch_needs_what_is_followed_from_two_and_four_rows(kind, layout):
    steps = RankSteps(subject_of(kind()))
    assert_same(steps.of(layout, 64, captured=False), steps.of(layout, 64))
    assert steps._growing.cache_info().currsize == 1


def test_so_does_a_rank_of_tensor_parallelism_with_blocks_that_keep_no_activations(tmp_path):
    values = json.loads((CONFIGS / "llama-small.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    steps = RankSteps(configured_model(tmp_path, None, 16, 1, None, None, "bf16-mixed"))
    layout = Layout("model_parallel", shards=2, tensor=2, checkpoints=True)
    followed, captured = steps.of(layout, 6, captured=False), steps.of(layout, 6)
    wires = {"forward_wire": captured.forward_wire, "backward_wire": captured.backward_wire}
    assert {name: getattr(followed, name) for name in wires} == pytest.approx(wires)
    assert_same(replace(followed, **wires), captured)


def test_a_model_that_fails_with_few_rows_is_captured_with_its_own():
    steps = RankSteps(subject_of(Eights()))
    assert_same(steps.of(ONE, 16, captured=False), steps.of(ONE, 16))


def test_a_batch_that_was_found_needs_what_its_own_capture_needs():
    """The memory of `Grouped` grows otherwise from four rows on, so what was followed from two and four is wrong."""
    subject, target = subject_of(Grouped(), free_batch=True), target_of("A100")
    steps = RankSteps(subject)
    assert steps.of(ONE, 1024, captured=False) != steps.of(ONE, 1024)

    choice = counted_choice(subject, target, steps)
    assert choice.layout is not None
    captured = steps.of(choice.layout, choice.per_device)
    assert (choice.memory.peak, choice.flops) == (captured.peak_bytes, captured.flops)
