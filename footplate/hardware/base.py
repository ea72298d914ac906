"""The contract of an accelerator: a kind of hardware that can train.

Each kind has a file in this folder. Your own package adds a kind through an entry point:

    [project.entry-points."footplate.accelerators"]
    npu = "my_package.npu:NPU"          # a subclass of Accelerator

Then `Trainer(accelerator="npu")`, `accelerator="auto"` and `footplate doctor` know it.
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
    """A device, for `footplate doctor`.

    Attributes:
        index: its index in `devices=[…]`.
        name: the manufacturer's name.
        memory_bytes: its total memory; None if unknown.
    """

    index: int
    name: str
    memory_bytes: int | None = None


class Accelerator(ABC):
    """A kind of hardware.

    Attributes:
        name: its name in `Trainer(accelerator=…)`.
        priority: `"auto"` chooses the usable accelerator with the highest priority.
            docs/reference/accelerators.md lists the priorities.
        precisions: the precisions that it can train in.
        process_group_backend: the backend of `torch.distributed` between its devices.
        batches_ahead: number of batches that a thread copies to a device before the step needs them; 0 if this gains
            nothing, because a copy blocks the host or the device.
        single_controller: True if one process drives all devices of its machine; otherwise each device has a process.
        owns_weights: True if training changes a copy of the weights on the device, which is fetched before code reads them.
        step: the factory of a training step for this hardware, as `"module:callable"`. The callable gets a `StepSpec` and
            returns a `Step` (`footplate/step/base.py`). It is imported when a step is built, so that an accelerator can be
            examined without it.
        callbacks: factories of callbacks for training on this hardware, each as `"module:callable"`. The callable gets the
            accelerator and returns a `Callback`. The trainer adds these callbacks to the user's.

    Examples:
        >>> class NPU(fp.Accelerator):
        ...     name = "npu"
        ...
        ...     def unavailable(self):
        ...         return "this machine has no NPU"
        ...
        ...     def devices(self):
        ...         return []
        ...
        ...     def torch_device(self, index):
        ...         return torch.device("cpu")
        >>> trainer = fp.Trainer(accelerator=NPU())
        Traceback (most recent call last):
        footplate.core.errors.ConfigError: ...
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
        """Return why it can't be used here, and the solution; None if it can.

        Be fast, and don't initialise the device: a process with an initialised device may not fork.
        """

    @abstractmethod
    def devices(self) -> list[Device]:
        """List the devices of this machine. Called only if `unavailable()` is None."""

    @abstractmethod
    def torch_device(self, index: int) -> torch.device:
        """Return the torch device of a device index."""

    def default_devices(self) -> int:
        """Return the number of devices for `devices="auto"`."""
        return len(self.devices())

    def parse_devices(self, devices: Devices) -> list[int]:
        """Parse `devices` into indices: `"auto"`, a count, `-1` (all), a list, or text such as `"0,2"`.

        Raises:
            ConfigError: there are fewer devices, an index doesn't exist, or the form is invalid.
        """
        indices = [device.index for device in self.devices()]
        listed = ", ".join(f"{self.name}:{index}" for index in indices)
        hint = f'This machine has {len(indices)} ({listed}). Use devices={len(indices)} or "auto".'

        wanted = read_devices(devices, hint)
        if wanted == "auto":
            return indices[: self.default_devices()]
        if isinstance(wanted, int):
            if wanted > len(indices):
                raise ConfigError(f"devices={devices!r}: {hint}")
            return indices if wanted == -1 else indices[:wanted]

        absent = [index for index in wanted if index not in indices]
        if absent:
            raise ConfigError(f"devices={devices!r}: no device has index {absent[0]}. {hint}")
        return list(wanted)

    def check_precision(self, precision: str) -> None:
        """Check that this hardware can train in a precision.

        Raises:
            ConfigError: `precision` is not one of `precisions`.
        """
        if precision not in self.precisions:
            raise ConfigError(
                f'precision="{precision}": {self.name} does not support it. {did_you_mean(precision, self.precisions)}'
            )

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments of the trainer, by name, that this hardware may not support.

        Raises:
            ConfigError: this hardware doesn't support one of them.
        """
        steps = arguments.get("iterations_per_loop", 1)
        if steps != 1:
            raise ConfigError(
                f'iterations_per_loop={steps!r}: accelerator="{self.name}" runs step by step. Remove it, or use '
                'accelerator="xla" or "tpu".'
            )

    def stats(self, device: torch.device) -> dict[str, float]:
        """Return current figures of a device, such as `memory_used_bytes` and `utilisation` (0 … 1), if available."""
        return {}

    def peak_flops_per_s(self, device: torch.device, precision: str) -> float | None:
        """Return the peak rate of matrix products of one device in a precision; None if it isn't known."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return versions of its driver and runtime, for `footplate doctor`."""
        return {}
