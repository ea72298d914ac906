"""The contract of an accelerator: one kind of hardware that can train.

One file of this folder implements it for each kind. A package of your own adds a kind through an entry point:

    [project.entry-points."footplate.accelerators"]
    npu = "my_package.npu:NPU"          # a subclass of Accelerator

and `Trainer(accelerator="npu")`, `accelerator="auto"` and `footplate doctor` know it from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from footplate.core.errors import ConfigError, did_you_mean
from footplate.hardware.devices import Devices, read_devices


@dataclass(frozen=True)
class Device:
    """One device as `footplate doctor` shows it.

    Attributes:
        index: what `devices=[…]` is given.
        name: what its maker calls it.
        memory_bytes: its memory, all of it; None where that can't be told.
    """

    index: int
    name: str
    memory_bytes: int | None = None


class Accelerator(ABC):
    """One kind of hardware.

    Class attributes:
        name: what `Trainer(accelerator=…)` is given.
        priority: `"auto"` takes the usable accelerator of the highest priority (cpu 0, mps 10, cuda 20).
        precisions: the precisions it can train in.
        process_group_backend: what `torch.distributed` uses between its devices.
        batches_ahead: how many batches are put onto a device ahead of the step, by a thread of their own; 0 where that
            gains nothing, since a copy holds up either the host or the device.
        single_controller: whether a process drives all devices of its machine; else there is a process for each.
        owns_weights: whether training changes a copy of the weights on the device, which is fetched before anybody looks.
        step: what makes a training step for this hardware, as `"module:callable"`. The callable gets a `StepSpec` and
            returns a `Step` (`footplate/step/base.py`). It is imported when a step is built, so that an accelerator can be
            looked at without it.
        callbacks: what makes callbacks that watch training on this hardware, each as `"module:callable"`. The callable
            gets the accelerator and returns a `Callback`. The trainer adds them to the user's.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 5
    precisions: ClassVar[frozenset[str]] = frozenset({"32-true"})
    process_group_backend: ClassVar[str] = "gloo"
    batches_ahead: ClassVar[int] = 0
    single_controller: ClassVar[bool] = False
    owns_weights: ClassVar[bool] = False
    step: ClassVar[str] = "footplate.step.eager:EagerStep"
    callbacks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it can't be used here and what would make it so; None when it can. Cheap, and without side effects."""

    @abstractmethod
    def devices(self) -> list[Device]:
        """The devices of this machine; only asked when `unavailable()` is None."""

    @abstractmethod
    def torch_device(self, index: int) -> torch.device:
        """The torch device of a device index."""

    def default_devices(self) -> int:
        """How many devices `devices="auto"` takes."""
        return len(self.devices())

    def parse_devices(self, devices: Devices) -> list[int]:
        """The device indices that `devices` stands for: `"auto"`, a count, `-1` (all), a list, or text such as `"0,2"`.

        Raises:
            ConfigError: more devices than there are, an index that is not there, or a form that means nothing.
        """
        found = [device.index for device in self.devices()]
        listed = ", ".join(f"{self.name}:{index}" for index in found)
        hint = f'This machine has {len(found)} ({listed}). Use devices={len(found)} or "auto".'

        wanted = read_devices(devices, hint)
        if wanted == "auto":
            return found[: self.default_devices()]
        if isinstance(wanted, int):
            if wanted > len(found):
                raise ConfigError(f"devices={devices!r}: {hint}")
            return found if wanted == -1 else found[:wanted]
        absent = [index for index in wanted if index not in found]
        if absent:
            raise ConfigError(f"devices={devices!r}: no device has index {absent[0]}. {hint}")
        return list(wanted)

    def check_precision(self, precision: str) -> None:
        """Refuse a precision that this hardware can't train in.

        Raises:
            ConfigError: `precision` is not one of `precisions`.
        """
        if precision not in self.precisions:
            raise ConfigError(
                f'precision="{precision}": {self.name} does not train in it. {did_you_mean(precision, self.precisions)}'
            )

    def check_arguments(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments of the trainer, by their names, that mean nothing on this hardware.

        Raises:
            ConfigError: one of them does.
        """
        steps = given.get("iterations_per_loop", 1)
        if steps != 1:
            raise ConfigError(
                f'iterations_per_loop={steps!r}: accelerator="{self.name}" runs step by step. Leave it out, or use '
                'accelerator="xla" or "tpu".'
            )

    def stats(self, device: torch.device) -> dict[str, float]:
        """Live figures of a device, such as `memory_used_bytes` and `utilisation` (0 … 1); those that can be had."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Versions of the driver and runtime behind it, for `footplate doctor`."""
        return {}
