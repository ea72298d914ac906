"""Findings of a study, in sentences."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from footplate.scaling.findings import core_notes, read
from footplate.scaling.results import Size, Spread, Training, stops_paying, summarise
from scaling.test_results import trained

figures = st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.floats(0.1, 1000), min_size=1)


def with_phases(np: int, step: float, data: float, batches: int = 100) -> Training:
    phases = {"step": step, "data": data, "validation": 0.0, "other": 0.0}
    return Training(np, 0, seconds=step + data, samples=800, batches=batches, phases=phases)


@given(figures)
def test_it_names_the_size_where_adding_stops_paying_exactly_where_there_is_one(times):
    sizes = trained(times)
    end, said = stops_paying(sizes), read(sizes)
    assert ("stops paying" in said) == (end is not None)
    if end is not None:
        assert f"stops paying at {end.np}:" in said
    elif len(sizes) > 1:
        assert f"pays up to {max(times)}" in said


@given(figures, st.sets(st.sampled_from([16, 32])))
def test_every_size_that_failed_is_named_with_its_reason(times, failed):
    sizes = (*trained(times), *(Size(np, 1.0, failures=(f"reason {np}",)) for np in sorted(failed)))
    said = read(sizes)
    for np in failed:
        assert f"np={np} failed: reason {np}." in said
    assert ("failed" in said) == bool(failed)


def test_efficiency_and_amdahls_share_are_said():
    said = read(trained({1: 10.0, 2: 6.0, 4: 4.0}))  # a fifth is serial
    assert said.startswith("4 processes took 4 s, and 1 took 10 s: efficiency 0.62. Adding processes pays up to 4")
    assert "20% of the work is serial, so no number of processes is more than 5.0 times as fast as 1." in said


def test_nothing_serial_and_nothing_but_serial_are_said_without_a_division_by_zero():
    assert "none of the work is serial" in read(trained({1: 10.0, 2: 4.9}))
    assert "the whole of the work is serial" in read(trained({1: 10.0, 2: 11.0}))


def test_it_says_where_the_time_went_and_how_a_step_has_grown():
    sizes = summarise([with_phases(1, 8.0, 2.0), with_phases(2, 6.0, 2.0, batches=50)], {1: 1.0, 2: 2.0})
    said = read(sizes)
    assert "Of the time of 2 processes, 75% went into steps, 25% into waiting for batches" in said
    assert "a step took 1.50 times as long as with 1, because of the exchange of gradients" in said


def test_a_step_that_is_no_slower_is_called_so():
    sizes = summarise([with_phases(1, 8.0, 2.0), with_phases(2, 4.0, 1.0, batches=50)], {1: 1.0, 2: 2.0})
    assert "a step took as long as with 1." in read(sizes)


def test_losses_are_compared_by_what_repeats_differ_by():
    one, two = (replace(size, done=3) for size in trained({1: 10.0, 2: 6.0}))
    one = replace(one, loss=Spread(0.30, 0.31, 0.32))
    near, far = replace(two, loss=Spread(0.31, 0.33, 0.34)), replace(two, loss=Spread(0.4, 0.41, 0.42))
    assert "val_loss ended at 0.33 with 2 and 0.31 with 1, within the difference between repeats." in read((one, near))
    assert "more than repeats differ" in read((one, far))
    assert "the difference may be chance" in read((one, replace(far, done=1)))


def test_a_loss_that_is_no_number_is_told_with_the_learning_rate():
    one, two = trained({1: 10.0, 2: 6.0})
    said = read((one, replace(two, lr_factor=2.0, diverged=1)))
    assert "With np=2, val_loss was not finite at the end of 1 of 1 trainings. Its learning rate was 2 times" in said


def test_with_one_size_there_is_nothing_to_compare():
    assert "nothing to compare" in read(trained({2: 5.0}))


def test_with_none_it_says_so():
    assert read((Size(1, 1.0, failures=("MemoryError",)),)) == "No training succeeded. np=1 failed: MemoryError."


def test_processes_that_share_cores_are_told_of():
    sizes = trained({1: 10.0, 2: 6.0, 4: 6.0})
    assert core_notes(sizes, cores=2) == ("4 processes share 2 cores.",)
    assert core_notes(sizes, cores=None) == ()


def test_a_base_that_computes_on_all_cores_is_told_of():
    one, two = trained({1: 10.0, 2: 9.0})
    (note,) = core_notes((replace(one, threads=2), two), cores=2)
    assert "all of 2 cores" in note
    assert "OMP_NUM_THREADS=1" in note


def test_cores_are_no_matter_on_other_devices():
    assert core_notes(tuple(replace(size, device="cuda") for size in trained({1: 10.0, 4: 3.0})), cores=2) == ()
