"""The bookkeeping of `KeptCheckpoints`, compared with a sort of everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from footplate.callbacks.kept_checkpoints import KeptCheckpoints

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(SCORES, st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_the_best_are_kept_and_of_equal_ones_the_first(scores, save_top_k, mode):
    kept = KeptCheckpoints(save_top_k, mode)
    for index, score in enumerate(scores):
        superseded = kept.superseded()
        if kept.accepts(score):
            before = dict(kept.scores)
            kept.add(str(index), score)
            dropped = [before[path] for path in before.keys() - kept.scores.keys()]
            assert dropped == ([before[superseded]] if superseded else [])

    sign = 1 if mode == "min" else -1
    best = sorted(range(len(scores)), key=lambda index: (sign * scores[index], index))[:save_top_k]
    assert sorted(kept.scores.values()) == sorted(scores[index] for index in best)
    assert kept.scores[kept.best()] == scores[best[0]]


@given(st.integers(0, 12), st.sampled_from([-1, 0, 1, 3]))
def test_without_a_score_the_latest_are_kept(count, save_top_k):
    kept = KeptCheckpoints(save_top_k, "min")
    for index in range(count):
        if kept.accepts(None):
            kept.add(str(index), None)

    latest = [str(index) for index in range(count)]
    assert list(kept.scores) == (latest if save_top_k == -1 else latest[max(0, count - save_top_k) :])
    if kept.scores:
        assert kept.best() == latest[-1]


def test_a_path_that_is_saved_again_becomes_the_latest():
    kept = KeptCheckpoints(2, "min")
    for path in ("a", "b", "a"):
        kept.add(path, None)
    assert list(kept.scores) == ["b", "a"]
