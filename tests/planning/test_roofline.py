"""The least time of a step."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.planning.roofline import ROOFS, roofline

patient = settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no defect
amounts = st.floats(min_value=1, max_value=1e18)


@patient
@given(amounts, amounts, amounts, amounts, amounts, amounts)
def test_the_longest_of_the_three_is_the_step(flops, nbytes, wire, compute, memory, link):
    times = roofline(flops, nbytes, wire, flops_per_s=compute, bytes_per_s=memory, wire_bytes_per_s=link)
    seconds = {"compute": flops / compute, "memory": nbytes / memory, "interconnect": wire / link}
    assert times.step_s == max(seconds.values())
    assert times.roof in ROOFS
    assert seconds[times.roof] == times.step_s


def test_without_a_rate_for_computing_there_is_no_time():
    times = roofline(1e12, 1e9, 0, flops_per_s=None, bytes_per_s=1e12, wire_bytes_per_s=None)
    assert times.step_s is None
    assert times.roof is None
    assert times.memory_s == 1e-3


def test_without_a_rate_for_sending_the_step_is_reckoned_without_it():
    times = roofline(1e12, 1e9, 1e9, flops_per_s=1e12, bytes_per_s=1e12, wire_bytes_per_s=None)
    assert times.interconnect_s is None
    assert times.step_s == 1.0


def test_one_device_alone_sends_nothing():
    assert roofline(1, 1, 0, flops_per_s=1, bytes_per_s=1, wire_bytes_per_s=None).interconnect_s == 0
