import pytest
import torch

from footplate.core.errors import ConfigError
from footplate.hardware.base import Accelerator
from footplate.hardware.cpu import CPU
from footplate.hardware.registry import accelerators, choose_auto, get_accelerator, why_unavailable


class Away(CPU):
    """An accelerator whose hardware is absent."""

    name = "away"

    def unavailable(self):
        return "its cable is not plugged in."


def test_an_accelerator_is_found_by_name_in_any_case():
    assert isinstance(get_accelerator("cpu"), CPU)
    assert isinstance(get_accelerator("CPU"), CPU)


def test_an_instance_is_taken_as_it_is():
    mine = CPU()

    assert get_accelerator(mine) is mine


def test_the_built_in_ones_are_listed_the_preferred_first():
    names = [accelerator.name for accelerator in accelerators()]

    assert [name for name in names if name in ("cpu", "cuda", "mps")] == ["cuda", "mps", "cpu"]


def test_auto_takes_the_best_that_is_usable():
    best = choose_auto()

    assert why_unavailable(best) is None
    assert get_accelerator("auto").name == best.name
    assert all(why_unavailable(other) for other in accelerators() if other.priority > best.priority)


@pytest.mark.parametrize(("given", "nearest"), [("cdua", "cuda"), ("auot", "auto"), ("msp", "mps")])
def test_an_unknown_name_is_answered_with_the_nearest(given, nearest):
    with pytest.raises(
        ConfigError, match=rf'accelerator="{given}".*Did you mean "{nearest}"\? There are: auto, cpu, cuda'
    ):
        get_accelerator(given)


@pytest.mark.parametrize("name", ["tpu", "TPU"])
def test_a_tpu_that_is_not_there_is_refused_with_a_way_to_try_without(name):
    with pytest.raises(ConfigError, match=r'no TPU is attached to this machine.*accelerator="xla", devices=8'):
        get_accelerator(name)


def test_what_is_asked_for_and_unavailable_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match='accelerator="away" can\'t be used here: its cable is not plugged in'):
        get_accelerator(Away())


@pytest.mark.parametrize("name", ["cuda", "mps", "gpu"])
def test_a_gpu_is_given_where_there_is_one_and_refused_with_the_reason_where_not(name):
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if there.get(name, any(there.values())):
        assert get_accelerator(name).name in ("cuda", "mps")
    else:
        with pytest.raises(ConfigError, match=f'accelerator="{name}" can\'t be used here'):
            get_accelerator(name)


@pytest.mark.parametrize("given", [None, 3, CPU])
def test_neither_name_nor_instance_is_refused(given):
    with pytest.raises(ConfigError, match="expected a name or an instance"):
        get_accelerator(given)


def test_every_built_in_one_keeps_the_contract():
    for accelerator in accelerators():
        assert isinstance(accelerator, Accelerator)
        assert accelerator.name == accelerator.name.lower()
        assert "32-true" in accelerator.precisions
