"""Randomness: seeds that never change between versions, and states that are restored."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import footplate as fp
from footplate.core import rng

number_lists = st.lists(st.integers(0, 2**63 - 1), max_size=4)


@pytest.fixture(autouse=True)
def generators_left_as_they_were(monkeypatch):
    before = rng.capture()
    monkeypatch.setenv(rng.SEED_VARIABLE, "0")
    monkeypatch.delenv(rng.SEED_VARIABLE)
    yield
    rng.restore(before)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_mixed_seeds_are_the_same_in_every_version():
    """If an update changed the order of data, older runs could not be resumed."""
    assert rng.mix() == 0
    assert rng.mix(0) == 8147104208329303767
    assert rng.mix(1, 2) == 6804074658870690613
    assert rng.mix(2, 1) == 8085905411993364802
    assert rng.mix(42, 7, 123456) == 4891525950164112603


@given(number_lists, number_lists)
def test_different_numbers_give_different_seeds(first, second):
    if first != second:
        assert rng.mix(*first) != rng.mix(*second)


@given(number_lists)
def test_a_seed_is_one_that_every_generator_takes(numbers):
    seed = rng.mix(*numbers)
    assert 0 <= seed < 2**63


def test_neighbouring_numbers_give_seeds_that_differ_in_about_half_of_their_bits():
    seeds = [rng.mix(1, epoch) for epoch in range(2000)]
    changed = [bin(a ^ b).count("1") for a, b in itertools.pairwise(seeds)]
    assert len(set(seeds)) == 2000
    assert 30 < sum(changed) / len(changed) < 33


def test_captured_states_come_back_for_all_three_generators():
    rng.seed_globals(3)
    np.random.standard_normal()  # leaves a cached second value, which must come back too
    state = rng.capture()
    first = (*draws(), np.random.standard_normal(), random.gauss(0, 1))
    rng.restore(state)
    assert (*draws(), np.random.standard_normal(), random.gauss(0, 1)) == first


def test_a_step_is_seeded_by_its_number_whatever_was_drawn_before():
    seed_step = rng.step_seeder(5, torch.device("cpu"))
    seed_step(10)
    first = torch.rand(3)
    torch.rand(100)
    seed_step(10)
    assert torch.equal(torch.rand(3), first)
    seed_step(11)
    assert not torch.equal(torch.rand(3), first)


def test_seed_everything_seeds_all_generators_and_later_trainers(make_trainer):
    assert fp.seed_everything(12) == 12
    first = draws()
    fp.seed_everything(12)
    assert draws() == first
    assert make_trainer(seed=None).seed == 12
    assert fp.seed_everything() == 12


def test_without_a_seed_every_trainer_has_one_of_its_own(make_trainer):
    assert make_trainer(seed=None).seed != make_trainer(seed=None).seed


def test_another_kind_of_device_has_its_generator_seeded_kept_and_restored(monkeypatch):
    """A plugin's module keeps torch's convention: `torch.NAME.default_generators`."""
    first, second = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.xpu, "default_generators", (first, second))
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    for device, generator in ((torch.device("xpu", 0), first), (torch.device("xpu"), second)):
        rng.step_seeder(7, device)(3)
        assert generator.initial_seed() == 10
        states = rng.capture(device)
        before = torch.rand(4, generator=generator)
        rng.restore(states, device)
        assert torch.equal(torch.rand(4, generator=generator), before)


def test_a_device_without_a_generator_of_its_own_has_none_to_seed():
    for name in ("cpu", "meta", "xpu"):
        assert rng.device_seeder(torch.device(name)) is None
