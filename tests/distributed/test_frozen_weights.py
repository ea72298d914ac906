"""Ranks with shards of a frozen base save what they have trained, and any number of ranks continues."""

from __future__ import annotations

from models import ranks
from models.adapted import FROZEN, Adapted, last, train

import footplate as fp
from footplate import checkpoint


def fit(directory, epochs, ckpt_path=None, base_seed=0, **arguments):
    train(Adapted(base_seed), directory, epochs, ckpt_path, **{"strategy": "fsdp", **arguments})


def saved(directory):
    state = checkpoint.load(last(directory))
    assert state["frozen_weights"].keys() == FROZEN
    assert not FROZEN & state["state_dict"].keys()
    return state


def check_same(one, other):
    assert one["frozen_weights"] == other["frozen_weights"]
    for key in {"state_dict", "current_model_state"} & one.keys():
        assert one[key].keys() == other[key].keys()
        for name, value in one[key].items():
            assert value.equal(other[key][name]), name


def averages():
    return fp.EMAWeightAveraging(decay=0.5)


def test_ranks_with_shards_continue_exactly(tmp_path):
    ranks.run(lambda: fit(tmp_path / "whole", 2, callbacks=averages()), 2)
    ranks.run(lambda: fit(tmp_path / "cut", 1, callbacks=averages()), 2)
    assert saved(tmp_path / "cut")["global_step"] == 2
    ranks.run(lambda: fit(tmp_path / "cut", 2, "last", callbacks=averages()), 2)
    check_same(saved(tmp_path / "cut"), saved(tmp_path / "whole"))


def test_one_process_goes_on_from_shards_and_ranks_from_one_process(tmp_path):
    ranks.run(lambda: fit(tmp_path, 1), 2)
    sharded = saved(tmp_path)
    fit(tmp_path, 2, "last", strategy="auto")
    assert saved(tmp_path)["frozen_weights"] == sharded["frozen_weights"]
    ranks.run(lambda: fit(tmp_path, 3, "last"), 2)
    assert saved(tmp_path)["frozen_weights"] == sharded["frozen_weights"]


def refusal(directory):
    try:
        fit(directory, 3, "last", base_seed=1)
    except fp.CheckpointError as error:
        return str(error)


def test_all_ranks_refuse_another_base(tmp_path):
    fit(tmp_path, 1, strategy="auto")
    for message in ranks.run(lambda: refusal(tmp_path), 2):
        assert "has other numbers in base.1.weight" in message
