"""Batches and results to devices: a copy that the CPU reads is complete before it is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from footplate.distributed.batch_splitting import weighted
from footplate.distributed.replica_logs import Logged, together
from footplate.hardware.transfer import to_device

CPU, META = torch.device("cpu"), torch.device("meta")


class Watched(torch.Tensor):
    """Records for each copy to a device whether it may still be in progress afterwards."""

    copies: list[bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            cls.copies.append(bool((kwargs or {}).get("non_blocking", False)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def watched():
    Watched.copies = []
    return torch.ones(()).as_subclass(Watched)


def logged(value: torch.Tensor) -> Logged:
    return Logged("x", value, False, None, None, None, "mean", False, True, 1)


@pytest.mark.parametrize("device", [CPU, META])
@pytest.mark.parametrize(
    "copy",
    [
        lambda tensor, device: to_device({"x": [tensor]}, device),
        lambda tensor, device: weighted([(tensor, 0.5)], device),
        lambda tensor, device: together([[logged(tensor)]], [1], device),
    ],
    ids=["a batch", "a loss", "a logged value"],
)
def test_only_a_copy_to_a_device_may_still_be_under_way(copy, device, watched):
    copy(watched, device)
    assert set(Watched.copies) == {device is not CPU}
