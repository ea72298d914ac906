"""Seeds and deterministic algorithms."""

from __future__ import annotations

import os

import torch
from models.small import Classifier, loader

from training.fits import final


def test_the_same_seed_trains_the_same_and_another_does_not(make_trainer):
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(0)
        model = Classifier()
        make_trainer(seed=seed, max_epochs=1).fit(model, loader())
        results.append(final(model))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_what_happened_before_fit_has_no_influence(make_trainer):
    results = []
    for draws in (0, 1000):
        torch.manual_seed(0)
        model = Classifier()
        torch.rand(draws)
        make_trainer(max_epochs=1).fit(model, loader())
        results.append(final(model))
    assert torch.equal(*results)


def test_deterministic_asks_torch_for_it(make_trainer):
    try:
        make_trainer(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        make_trainer(deterministic="warn")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        make_trainer(deterministic=False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert not torch.are_deterministic_algorithms_enabled()
