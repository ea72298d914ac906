import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from footplate.core.errors import ConfigError
from footplate.hardware import cpu_rates
from footplate.hardware.cpu import CPU, MAX_PROCESSES
from footplate.hardware.machine import usable_cores

DTYPES = {"32": torch.float32, "64": torch.float64, "bf16": torch.bfloat16}


def test_auto_is_one_process_since_torch_uses_all_cores_by_itself():
    assert CPU().parse_devices("auto") == [0]


def test_any_reasonable_number_of_processes_is_allowed_whatever_the_cores():
    assert CPU().parse_devices(7) == [0, 1, 2, 3, 4, 5, 6]
    assert CPU().parse_devices("4,5") == [4, 5]


def test_minus_one_is_one_process_for_each_usable_core():
    assert len(CPU().parse_devices(-1)) == max(1, math.floor(usable_cores()))


@pytest.mark.parametrize("devices", [100_000, [100_000]])
def test_an_absurd_number_of_processes_is_refused_before_any_starts(devices):
    with pytest.raises(ConfigError, match=rf"too many processes.*up to {max(MAX_PROCESSES, int(usable_cores()))}"):
        CPU().parse_devices(devices)


@pytest.mark.parametrize("precision", sorted(CPU.precisions))
def test_torch_really_trains_in_every_precision_it_announces(precision):
    kind, how = precision.split("-")
    dtype = DTYPES[kind]
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    model.to(dtype if how == "true" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model[0].weight.detach().clone()

    device = CPU().torch_device(0)
    images = torch.randn(5, 1, 8, 8, dtype=dtype if how == "true" else torch.float32, device=device)
    with torch.autocast("cpu", dtype, enabled=how == "mixed"):
        logits = model(images)
    functional.cross_entropy(
        logits.to(torch.promote_types(dtype, torch.float32)), torch.tensor([0, 1, 2, 0, 1])
    ).backward()
    optimizer.step()

    assert logits.dtype == dtype
    assert torch.isfinite(model[0].weight).all()
    assert not torch.equal(before, model[0].weight)


def test_its_figures_are_of_this_machine():
    (device,) = CPU().devices()
    figures = CPU().stats(CPU().torch_device(0))

    assert 0 < figures["memory_used_bytes"] < device.memory_bytes
    assert 0 <= figures["utilisation"] <= 1


@pytest.mark.parametrize(("seconds_of_a_product", "tries"), [(1e-5, cpu_rates.TRIES), (0.03, 4), (7.0, 3)])
def test_its_rates_are_the_best_of_many_tries_unless_these_take_long(monkeypatch, seconds_of_a_product, tries):
    clock = itertools.count(0.0, seconds_of_a_product)
    monkeypatch.setattr(cpu_rates, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    works = []
    assert cpu_rates._fastest(lambda: works.append(1)) == pytest.approx(seconds_of_a_product)
    assert len(works) == tries
