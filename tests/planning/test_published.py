"""The least times of plans, beside speeds that others have published: none may be beaten, and none is far away.

torchtitan: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan, table 1, on H100s with slower memory (2.4
TB/s) and 500 W. It keeps some activations of each block; a plan knows only blocks that keep all or none, and its blocks
keep none here. MaxText's figures are the utilization of peak rates by a model's own arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from footplate.planning.choices import Choice
from footplate.planning.counted_choice import choice_of
from footplate.planning.huggingface_models import configured_model
from footplate.planning.layouts import Layout
from footplate.planning.rank_step import RankSteps
from footplate.planning.targets import target_of

CONFIGS = Path(__file__).parent / "configs"
LENGTH, ROWS, FACTOR = 8192, 2, 2.5


class Model:
    """A model whose steps are counted once for all targets."""

    def __init__(self, name: str) -> None:
        self.subject = configured_model(CONFIGS / f"{name}.json", None, LENGTH, 1, None, None, "bf16-mixed")
        self._steps = RankSteps(self.subject)

    def on(self, target: str, size: int, compiled: bool = True) -> Choice:
        hardware = target_of(target)
        layout = Layout("fsdp", shards=hardware.devices, checkpoints=True)
        step = self._steps.of(layout, size)
        return choice_of(replace(self.subject, compile=compiled), hardware, layout, size, step, None)

    def utilization(self, target: str, size: int) -> float:
        """The model's own arithmetic in a step, as a part of what the devices could do in the least time."""
        choice, config = self.on(target, size), self.subject.module.net.config
        weights = sum(p.numel() for p in self.subject.module.parameters()) - config.vocab_size * config.hidden_size
        attention = config.num_hidden_layers * config.hidden_size * LENGTH  # causal, so half of all pairs
        flops = 6 * (weights + attention) * size * LENGTH
        return flops / choice.roofline.step_s / choice.target.flops_per_s("bf16-mixed")


@pytest.fixture(scope="module")
def llama_8b() -> Model:
    return Model("llama-3-8b")


@pytest.mark.slow
@pytest.mark.parametrize(("published", "compiled"), [(5762, False), (6667, True)], ids=["eager", "compiled"])
def test_torchtitan_trains_llama_8b_on_eight_h100s_slower_than_the_least_time(llama_8b, published, compiled):
    choice = llama_8b.on("H100x8", ROWS, compiled)
    assert choice.fits
    assert published < choice.samples_per_second * LENGTH / 8 < FACTOR * published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "published"), [("llama-3-8b", "v6e-256", 0.455), ("llama-3-70b", "v5p-512", 0.65)]
)
def test_maxtext_uses_less_of_its_tpus_than_the_least_time_would(llama_8b, name, target, published):
    model = llama_8b if name == "llama-3-8b" else Model(name)
    assert published < model.utilization(target, ROWS) < min(1.0, FACTOR * published)
