"""Checkpoints of other libraries are recognised and translated through the registry."""

from __future__ import annotations

import pytest
import torch

from footplate import checkpoint
from footplate.checkpoint import conversion
from footplate.core import foreign_checkpoints as foreign
from footplate.core.foreign_checkpoints import ForeignFormat, to_run_state

OTHER = ForeignFormat(
    name="Other",
    recognises=lambda state: "other_version" in state,
    translate=lambda state: {
        "footplate": {"format": 1, "footplate": "0", "torch": "0"},
        "made_by": f"Other {state['other_version']}",
        "epoch": 0,
        "global_step": 0,
        "state_dict": state["state_dict"],
    },
)


@pytest.fixture
def other(monkeypatch):
    monkeypatch.setattr(foreign, "_formats", list(foreign._formats))
    foreign.register(f"{__name__}:OTHER")
    foreign.register(f"{__name__}:OTHER")


def test_a_registered_format_is_recognised_and_translated(other):
    state = to_run_state({"other_version": "3", "state_dict": {}})
    assert state["made_by"] == "Other 3"
    assert foreign._formats.count(f"{__name__}:OTHER") == 1


def test_other_states_are_returned_unchanged(other):
    for state in ({"state_dict": {}}, {"footplate": {}, "other_version": "3", "state_dict": {}}):
        assert to_run_state(state) is state


def test_a_file_of_a_registered_format_becomes_a_checkpoint(other, tmp_path):
    torch.save({"other_version": "3", "state_dict": {"w": torch.ones(2)}}, tmp_path / "other.pt")
    assert conversion.convert(tmp_path / "other.pt", tmp_path / "run.ckpt") == "It holds weights only, like the source."
    assert torch.equal(checkpoint.load(tmp_path / "run.ckpt")["state_dict"]["w"], torch.ones(2))
    assert checkpoint.read_meta(tmp_path / "run.ckpt")["made_by"] == "Other 3"
