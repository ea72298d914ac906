"""The memory of one rank: what equal blocks add, and what ranks of FSDP2 take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import ranks
from models.step_memory import measured_peak

from footplate.distributed.activation_checkpointing import checkpoint_activations
from footplate.distributed.fsdp import FSDP, repeated_blocks
from footplate.distributed.fsdp_options import FSDPStrategy
from footplate.planning.huggingface_models import configured_model
from footplate.planning.layouts import Layout
from footplate.planning.rank_step import RankSteps

CONFIGS = Path(__file__).parent / "configs"
ROWS, LENGTH = 2, 256


def llama(precision: str = "bf16-mixed", length: int = LENGTH):
    """A subject: a Llama of six layers."""
    return configured_model(CONFIGS / "llama-small.json", None, length, ROWS, None, None, precision)


@pytest.fixture(scope="module")
def steps() -> RankSteps:
    """The steps of a Llama in bfloat16, captured with three and with four layers. Tests share the captures."""
    return RankSteps(llama())


@pytest.fixture(scope="module")
def whole() -> RankSteps:
    """The same steps, captured with all six layers."""
    whole = RankSteps(llama())
    whole._list = None
    return whole


@pytest.mark.parametrize(
    "layout",
    [
        Layout("fsdp", shards=8, reshards=False, checkpoints=True),
        Layout("model_parallel", shards=2, tensor=2),
    ],
    ids=str,
)
def test_six_equal_layers_need_what_is_extended_from_three_and_four(steps, whole, layout):
    extended, counted = steps.of(layout, ROWS), whole.of(layout, ROWS)
    for name, value in vars(counted).items():
        if "kernels" not in name:
            assert getattr(extended, name) == pytest.approx(value, rel=1e-9), name
    for fused in (False, True):
        assert extended.kernels_s(1e12, 1e11, fused) == pytest.approx(counted.kernels_s(1e12, 1e11, fused))


def test_more_shards_need_less_and_weights_that_are_kept_need_more(steps):
    def peak(**options: Any) -> int:
        return steps.of(Layout("fsdp", **options), ROWS).peak_bytes

    assert peak(shards=8) < peak(shards=2)
    assert peak(shards=8) < peak(shards=8, reshards=False)
    assert peak(shards=8, checkpoints=True) < peak(shards=8)


def test_checkpointing_computes_the_blocks_again(steps):
    plain, again = (steps.of(Layout("fsdp", shards=8, checkpoints=on), ROWS) for on in (False, True))
    assert 1.1 < again.flops / plain.flops < 4 / 3


def test_a_tensor_parallel_rank_has_its_part_of_the_arithmetic_and_sends_activations(steps):
    alone, half = (steps.of(Layout("model_parallel", shards=2, tensor=size), ROWS) for size in (1, 2))
    assert half.flops == pytest.approx(alone.flops / 2)
    assert alone.forward_wire == alone.backward_wire == 0
    # In bfloat16: the embedding and two sums a layer, each sent once by a rank of two; the logits are gathered.
    hidden, logits = 2 * ROWS * LENGTH * 256, 2 * ROWS * LENGTH * 1000
    assert half.forward_wire == (1 + 2 * 6) * hidden + logits / 2
    # The gradients of the inputs of five projections a layer, and of the head.
    assert half.backward_wire == (5 * 6 + 1) * hidden


def peak_of_a_rank(strategy: FSDPStrategy, precision: str) -> int:
    """The most bytes that are alive in a rank of FSDP2, in a step after the first."""
    dist.init_process_group("gloo")
    module = llama(precision).module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        torch.nn.init.constant_(tensor, 0.01)
    if strategy.activation_checkpointing_policy:
        checkpoint_activations(list(repeated_blocks(module)))
    sharded = FSDP(strategy, torch.bfloat16 if precision == "bf16-mixed" else None)
    sharded.place(module, torch.device("cpu"))
    sharded.prepare(module)
    optimizer = module.configure_optimizers()
    optimizer.param_groups[0]["foreach"] = True
    peak = measured_peak(module, optimizer, torch.zeros(ROWS, LENGTH, dtype=torch.int64), precision)
    dist.destroy_process_group()
    return peak


@pytest.mark.parametrize(
    ("precision", "reshards", "checkpoints"),
    [("32-true", True, False), ("bf16-mixed", True, False), ("32-true", False, True)],
)
def test_two_ranks_of_fsdp_take_what_is_planned(steps, precision, reshards, checkpoints):
    policy = {"LlamaDecoderLayer"} if checkpoints else None
    kept = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
    strategy = FSDPStrategy(sharding_strategy=kept, activation_checkpointing_policy=policy)
    measured = ranks.run(peak_of_a_rank, 2, strategy, precision)
    counted = steps if precision == "bf16-mixed" else RankSteps(llama(precision))
    peak = counted.of(Layout("fsdp", shards=2, reshards=reshards, checkpoints=checkpoints), ROWS).peak_bytes
    # On a busy processor, gloo keeps buffers until the other rank is there.
    assert 0.93 < min(measured) / peak < 1.25
