"""torch's own `tpu` device, as far as a machine without a TPU can test it."""

from __future__ import annotations

import pytest

from footplate.core.errors import ConfigError
from footplate.hardware.base import Device
from footplate.hardware.registry import get_accelerator
from footplate.hardware.tpu import torch_tpu
from footplate.hardware.tpu.torch_tpu import TorchTPU, why_not


def test_what_is_missing_is_named_from_the_ground_up():
    assert "no TPU is attached" in why_not(chips=0, has_package=True)
    assert "pip install torch_tpu" in why_not(chips=4, has_package=False)
    assert why_not(chips=4, has_package=True) is None


def test_without_a_tpu_it_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r'accelerator="torch_tpu" can\'t be used here: no TPU is attached'):
        get_accelerator("torch_tpu")


@pytest.fixture
def four_chips(monkeypatch):
    monkeypatch.setattr(torch_tpu, "tpu_chips", lambda: [Device(index, "TPU chip") for index in range(4)])
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_one_process_takes_one_chip(four_chips):
    assert TorchTPU().parse_devices("auto") == [0]
    assert TorchTPU().parse_devices([2]) == [2]


def test_several_chips_are_left_to_a_launcher(four_chips, monkeypatch):
    with pytest.raises(ConfigError, match=r"torchrun after torch.tpu.distributed.set_tpu_launch_env"):
        TorchTPU().parse_devices(4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert TorchTPU().parse_devices("auto") == [0, 1, 2, 3]
