"""The advice that follows from measurements. `test_advice.py` has trainings that are slow in these ways."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.monitoring.evidence import Compilation, Evidence, LoaderFacts
from footplate.monitoring.rules import MOST, RULES, advise
from footplate.monitoring.summary import summarise

SECONDS = {"input": 0.0, "forward": 3.0, "backward": 6.0, "optimizer": 1.0}
FAST = Evidence(SECONDS, batches=1000, rows=32)


def evidence(**changes):
    return dataclasses.replace(FAST, **changes)


def only(measured):
    (advice,) = advise(measured)
    return advice


def waiting(share, **loader):
    step_s = 10.0 * (1 - share)
    facts = {"kind": "table", "workers": 2, "busy": 0.98, "decodes": ("image",), "cores": 8}
    return evidence(seconds={"input": 10.0 * share, "forward": step_s}, loader=LoaderFacts(**{**facts, **loader}))


def test_a_training_without_a_flaw_gets_no_advice():
    assert advise(FAST) == []


def test_slow_decoding_names_the_column_the_threads_and_what_to_set():
    advice = only(waiting(0.6))
    assert str(advice) == (
        "60% of the time waits for input: decoding `image` is the limit (2 threads, 98% busy). Set num_threads=8, or "
        "cache=. Up to 2.5×."
    )


def test_a_transform_that_holds_pythons_lock_needs_processes():
    assert "Set num_workers=8" in str(only(waiting(0.6, transform=True, decodes=(), computing=0.5)))
    assert "Set num_threads=8" in str(only(waiting(0.6, transform=True, decodes=(), computing=0.99)))


def test_threads_that_are_idle_mean_that_reading_is_the_limit():
    assert "reading the table is the limit (2 threads, 10% busy)" in str(only(waiting(0.6, busy=0.1)))
    assert "reading the table is the limit" in str(only(waiting(0.6, decodes=(), busy=None)))


def test_a_loader_that_uses_all_cores_is_told_so():
    assert "Do less for each row" in str(only(waiting(0.6, workers=8, decodes=(), transform=True, busy=0.95)))


def test_a_dataloader_with_too_few_workers():
    assert "4 worker processes" in str(only(waiting(0.6, kind="torch", workers=4)))


@given(st.floats(0.21, 0.99), st.integers(1, 64))
def test_a_dataloader_without_workers_gains_at_most_the_wait(share, cores):
    advice = only(waiting(share, kind="torch", workers=0, cores=cores))
    assert advice.rule == "loader_without_workers"
    assert f"num_workers={cores}" in advice.text
    assert 1.0 < (advice.gain or 0.0) <= 1 / (1 - share) + 1e-9


def test_reads_of_values_cost_time_on_a_device_only():
    measured = evidence(reads={"/home/me/model.py:31": 3, "/home/me/model.py:40": 1})
    assert advise(measured) == []
    assert str(only(dataclasses.replace(measured, device="cuda"))).startswith(
        "model.py:31 reads a value from the device 3 times"
    )


def test_forms_of_batches_are_named():
    measured = evidence(compilations=tuple(Compilation("training_step", f"({n}, 8)", 2.0) for n in range(4)))
    advice = only(measured)
    assert "training_step was compiled 4 times, 8.0 s in total: for (0, 8); (1, 8); (2, 8)" in str(advice)
    assert advice.gain == pytest.approx(5.0)


def test_a_gpu_that_waits_for_the_host_gets_a_larger_batch():
    assert only(evidence(device="cuda", launching=0.95)).rule == "small_for_gpu"
    assert advise(evidence(device="cuda", launching=0.3)) == []


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (("/home/me/model.py:31", "/home/me/model.py:36"), "between model.py:31 and model.py:36"),
        (("/home/me/model.py:31", "/home/me/model.py:31"), "at model.py:31"),
        (("", "/home/me/model.py:36"), "before model.py:36"),
        (("/home/me/model.py:31", ""), "after model.py:31"),
    ],
)
def test_python_in_a_step_is_named_by_the_lines_around_it(lines, where):
    measured = evidence(pauses={lines: 0.5, ("", "/home/me/other.py:1"): 0.1})
    assert str(only(measured)) == (
        f"50% of a step is Python code {where} that runs no operation of torch: NumPy, a loop over rows, a file. Do "
        "it in the loader, whose workers run beside the step, or write it with torch. Up to 2.0×."
    )
    assert only(dataclasses.replace(measured, device="cuda")).gain is None
    assert advise(dataclasses.replace(measured, pauses={lines: 0.1})) == []


def test_devices_that_wait_for_the_next_program_get_more_steps_in_a_call():
    measured = evidence(device="xla", seconds={"step": 7.0, "dispatch": 3.0})
    assert str(only(measured)) == (
        "30% of the time the devices wait for the host to start the next program: a step is too short for it. Set "
        "iterations_per_loop=10, or a larger one, or raise batch_size. Up to 1.4×."
    )
    assert advise(evidence(device="xla", seconds={"step": 9.0, "dispatch": 1.0})) == []


@given(st.dictionaries(st.integers(0, 7), st.floats(0.1, 100.0), min_size=2))
def test_a_rank_is_slow_if_it_needs_longer_than_the_usual_one(own_s):
    slowest = max(own_s, key=lambda rank: own_s[rank])
    usual = sorted(seconds for rank, seconds in own_s.items() if rank != slowest)
    advice = advise(evidence(own_s=own_s))
    if own_s[slowest] < 1.2 * usual[0]:
        assert advice == []
    elif own_s[slowest] >= 1.2 * usual[-1]:
        assert str(advice[0]).startswith(f"Rank {slowest} needs ")


def test_bfloat16_gains_no_more_than_the_products_can():
    # Products are 40% of ten seconds at the peak, and four times as fast in bfloat16.
    measured = evidence(flops=4e9, peak_flops_per_s=1e12, bfloat16_flops_per_s=4e12)
    assert only(measured).gain == pytest.approx(1 / (0.6 + 0.1))
    assert advise(dataclasses.replace(measured, precision="bf16-mixed")) == []
    assert advise(dataclasses.replace(measured, bfloat16_flops_per_s=1.1e12)) == []


@given(
    st.dictionaries(
        st.sampled_from(["input", "forward", "backward", "optimizer", "logging", "checkpoint", "callbacks"]),
        st.floats(0, 1e4),
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**5),
    st.integers(0, 100),
)
def test_any_evidence_gives_at_most_five_pieces_of_advice_and_gains_above_one(seconds, batches, operations, saves):
    measured = evidence(
        seconds=seconds, batches=batches, operations=operations, operation_s=5e-6, least_step_s=1e-3, saves=saves,
        log_every_n_steps=1,
        hooks=("Slow",), pauses={("a.py:1", ""): 0.3}, by_line={"a.py:1": operations}, visits={"a.py:1": operations},
        loader=LoaderFacts("torch", cores=2),
    )  # fmt: skip
    advice = advise(measured)
    assert len(advice) <= MOST
    assert all(item.gain is None or item.gain >= 1.0 for item in advice)
    assert [item.gain or 0.0 for item in advice] == sorted((item.gain or 0.0 for item in advice), reverse=True)
    assert summarise(measured, advice)


def test_every_rule_has_a_docstring_and_a_name_of_its_own():
    assert all(rule.__doc__ for rule in RULES)


def test_the_summary_shows_the_largest_parts_first():
    measured = evidence(
        seconds={"input": 6.1, "backward": 3.0, "step": 0.9, "logging": 0.001}, samples=32_000, memory_bytes=2**31
    )
    assert summarise(measured, advise(measured))[:2] == [
        "Time of 1,000 batches, 10.0 s: input 61%, backward 30%, rest of the step 9%.",
        "3,200 samples/s, 2.15 GB of memory.",
    ]
