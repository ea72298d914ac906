"""The ways in which devices can share a training, and the trainer's argument for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import footplate as fp
from footplate.core.errors import ConfigError
from footplate.planning.layouts import STRATEGIES, Layout, check_strategy, rounds


@given(st.sampled_from(STRATEGIES), st.integers(0, 5), st.booleans())
def test_every_layout_has_all_devices_and_is_tried_once(strategy, power, repeats):
    devices = 2**power
    tried = [layout for layouts in rounds(strategy, devices, 8, repeats) for layout in layouts]
    assert len(set(tried)) == len(tried)
    assert all(layout.devices == devices for layout in tried)
    assert all(repeats or not layout.checkpoints for layout in tried)
    assert all(layout.tensor <= 8 for layout in tried)


def test_auto_begins_with_data_parallelism_and_ends_with_tensor_parallelism():
    first, *_, last = rounds("auto", 8, 8, True)
    assert first == [Layout("ddp", replicas=8)]
    assert last == [Layout("model_parallel", shards=1, tensor=8, checkpoints=True)]


def test_several_machines_may_have_a_copy_of_the_model_each():
    tried = [layout for layouts in rounds("fsdp", 32, 8, False) for layout in layouts]
    assert Layout("fsdp", replicas=4, shards=8) in tried


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (fp.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), Layout("fsdp", shards=8, reshards=False)),
        (
            fp.FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4)),
            Layout("fsdp", replicas=2, shards=4),
        ),
        (
            fp.ModelParallelStrategy(tensor_parallel_size=4, activation_checkpointing_policy={"Block"}),
            Layout("model_parallel", shards=2, tensor=4, checkpoints=True),
        ),
    ],
    ids=str,
)
def test_a_strategy_with_options_is_the_only_layout_and_is_written_as_it_was_given(strategy, expected):
    assert list(rounds(strategy, 8, 8, True)) == [[expected]]
    assert eval(expected.written("Block"), {"fp": fp}) == strategy


def test_a_strategy_that_a_plan_does_not_know_is_refused():
    with pytest.raises(ConfigError, match='Did you mean "fsdp"'):
        check_strategy("fdsp")


def test_a_mode_of_checkpointing_that_a_plan_does_not_know_is_refused():
    strategy = fp.FSDPStrategy(activation_checkpointing_policy={"Block"}, activation_checkpointing_mode="op")
    with pytest.raises(ConfigError, match=r"activation_checkpointing_mode='op': a plan knows \"full\" only"):
        list(rounds(strategy, 8, 8, True))
