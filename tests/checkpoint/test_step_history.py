"""The history of steps, over random runs: it names the batches that made a step, or says that it doesn't know them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.checkpoint.step_history import Position, StepHistory, hash_weights
from footplate.core.errors import ConfigError

PIECES = st.lists(
    st.tuples(
        st.integers(1, 9),  # batches to train
        st.sampled_from(["on", "resume", "end epoch", "skip", "other ranks", "other accumulation"]),
    ),
    min_size=1,
    max_size=12,
)


@dataclass
class Simulated:
    """A run of plain numbers, which notes its history as the training loop does."""

    total: int
    accumulate: int
    ranks: int = 1
    epoch: int = 0
    batch_idx: int = 0
    batches: int = 0
    global_step: int = 0
    window: int = 0
    history: StepHistory = field(default_factory=StepHistory)
    loader: Any = field(default_factory=object)
    steps: dict[int, tuple[int, range, int]] = field(default_factory=dict)
    has_skipped: bool = False

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.batch_idx, self.batches, self.global_step)

    def note(self) -> None:
        self.history.note(
            self.position, self.total, self.accumulate, self.ranks, self.loader, lambda loader: {"kind": "table"}
        )

    def train(self, skipped: bool = False) -> None:
        """Train on one batch. A skipped batch adds nothing to its window."""
        if self.batch_idx == 0:
            self.note()
        first = self.batch_idx // self.accumulate * self.accumulate
        self.window += not skipped
        self.has_skipped = self.has_skipped or skipped
        self.batch_idx, self.batches = self.batch_idx + 1, self.batches + 1
        if (self.batch_idx % self.accumulate == 0 or self.batch_idx == self.total) and self.window:
            self.global_step += 1
            self.window = 0
            self.steps[self.global_step] = self.epoch, range(first, self.batch_idx), self.ranks
        if self.batch_idx == self.total:
            self.next_epoch()

    def next_epoch(self) -> None:
        self.epoch, self.batch_idx, self.window = self.epoch + 1, 0, 0

    def resume(self) -> None:
        """Begin again from a checkpoint of this moment."""
        state = json.loads(json.dumps(self.history.state_dict()))
        self.history, self.loader = StepHistory(), object()
        self.history.load_state_dict(state)
        self.note()


@given(total=st.integers(1, 7), accumulate=st.integers(1, 3), pieces=PIECES)
def test_the_batches_of_every_step_are_found_unless_some_made_no_step(total, accumulate, pieces):
    run = Simulated(total, accumulate)
    for batches, event in pieces:
        for _ in range(batches):
            run.train()
        if event == "resume":
            run.resume()
        elif event == "other ranks":
            run.ranks += 1
            run.resume()
        elif event == "skip":
            run.train(skipped=True)
        elif event == "other accumulation" and run.batch_idx == 0:
            run.accumulate = run.accumulate % 3 + 1
        elif event == "end epoch" and run.batch_idx and not run.window:
            run.next_epoch()

    by_step, unknown = {}, []
    for step in run.steps:
        try:
            batches = run.history.find(step, run.position)
        except ConfigError:
            unknown.append(step)
            continue
        by_step[step] = batches.epoch, range(batches.first, batches.stop), batches.ranks
        assert not batches.planned
    assert by_step == {step: run.steps[step] for step in by_step}
    assert run.has_skipped or not unknown


def test_regular_epochs_need_one_stretch():
    run = Simulated(total=10, accumulate=3)
    for _ in range(1000):
        run.train()
        if run.batches % 37 == 0:
            run.resume()
    assert len(run.history.state_dict()["stretches"]) == 1
    assert run.history.find(10**6, run.position).planned


@pytest.mark.parametrize(
    ("total", "accumulate", "text"),
    [(float("inf"), 1, "how many batches an epoch has"), (5, 0, "optimises manually")],
)
def test_steps_that_follow_no_rule_are_an_error(total, accumulate, text):
    history = StepHistory()
    history.note(Position(0, 0, 0, 0), total, accumulate, 1, object(), lambda loader: {})
    with pytest.raises(ConfigError, match=text):
        history.find(1, Position(0, 3, 3, 3))


def test_a_checkpoint_of_an_earlier_version_has_no_history():
    history = StepHistory()
    history.load_state_dict({})
    with pytest.raises(ConfigError, match="earlier version"):
        history.find(1, Position(0, 3, 3, 3))
    history.note(Position(0, 3, 3, 3), 10, 1, 1, object(), lambda loader: {"kind": "table"})
    with pytest.raises(ConfigError, match="begins after step 3"):
        history.find(3, Position(0, 3, 3, 3))
    assert history.find(4, Position(0, 3, 3, 3)).first == 3


def test_the_hash_of_weights_tells_one_bit_and_leaves_out_tensors_without_bytes():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    before = hash_weights(module)
    assert before == hash_weights(module) != ""
    module[0].weight.detach().view(torch.int16)[1, 2] ^= 1
    assert hash_weights(module) != before
    assert hash_weights(torch.nn.LazyLinear(2)) == hash_weights(torch.nn.Linear(2, 2, device="meta")) == ""
