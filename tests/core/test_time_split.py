"""Time by cause: exclusive, and complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.time_split import TimeSplit

CAUSES = st.sampled_from(["input", "step", "checkpoint"])


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(CAUSES, st.floats(0, 1e3)), max_size=30))
def test_the_parts_sum_to_the_wall_time(spans):
    clock = Clock()
    times = TimeSplit("setup", clock)
    for cause, seconds in spans:
        times.switch(cause)
        clock.now += seconds
    total = times.total()
    assert sum(total.values()) == pytest.approx(clock.now)
    for cause in total:
        assert total[cause] == pytest.approx(sum(seconds for other, seconds in spans if other == cause))


def test_a_block_is_taken_out_of_the_cause_around_it_also_if_it_raises():
    clock = Clock()
    times = TimeSplit("step", clock)
    clock.now += 1.0

    def fails() -> None:
        with times.during("checkpoint"):
            clock.now += 2.0
            raise OSError

    with pytest.raises(OSError):
        fails()
    clock.now += 4.0
    assert times.total() == {"step": 5.0, "checkpoint": 2.0}
