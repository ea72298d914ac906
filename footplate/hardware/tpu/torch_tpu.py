"""The second way to use a TPU: torch's own device `tpu`, which the package torch_tpu adds.

    accelerator="tpu"          the step captured and compiled as one program, by JAX (hardware/xla.py)
    accelerator="torch_tpu"    the eager step, as on a GPU: torch sends each operation to the device

torch_tpu 0.2.0 is for torch 2.11 to 2.15 and TPUs from v4 on. It registers its device only on a machine with a TPU. On a
machine without one, it imports with torch 2.13, has no devices, and `torch.device("tpu")` is unknown. Nothing else was
tested, and nothing has run on its device. JAX 0.10.2 and torch_tpu 0.2.0 need different versions of libtpu, so each needs
an environment of its own (`versions.py` warns about a mismatch).

With several devices, each process has one. Before a launcher starts the processes, you must call
`torch.tpu.distributed.set_tpu_launch_env()`, so `devices=8` requires torchrun.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from footplate.core.errors import ConfigError
from footplate.hardware.base import Accelerator, Device
from footplate.hardware.devices import Devices
from footplate.hardware.tpu.versions import installed
from footplate.hardware.xla import tpu_chips

INSTALL = "Install it, in an environment without JAX's libtpu: pip install torch_tpu"


def why_not(chips: int, has_package: bool) -> str | None:
    """Return why the device can't be used, and the solution; None if it can be used.

    Args:
        chips: number of attached TPU chips.
        has_package: True if torch_tpu is installed.
    """
    if not chips:
        return "no TPU is attached to this machine (there is neither /dev/accel0 nor /dev/vfio/0)."
    if not has_package:
        return f"the package torch_tpu is not installed. {INSTALL}"
    return None


class TorchTPU(Accelerator):
    """TPU chips as devices of torch."""

    name = "torch_tpu"
    priority = 25
    precisions = frozenset({"32-true", "bf16-mixed", "bf16-true"})
    process_group_backend = "tpu_dist"

    def unavailable(self) -> str | None:
        """Return if the TPU or the package is missing."""
        return why_not(len(tpu_chips()), importlib.util.find_spec("torch_tpu") is not None)

    def devices(self) -> list[Device]:
        """List the chips of this machine, from their device files."""
        return tpu_chips()

    def default_devices(self) -> int:
        """Return all devices in a process that a launcher started, which uses one of them; otherwise 1."""
        return len(self.devices()) if "LOCAL_RANK" in os.environ else 1

    def parse_devices(self, devices: Devices) -> list[int]:
        """See `Accelerator.parse_devices`.

        Raises:
            ConfigError: as there, or several devices are wanted in a process that no launcher started.
        """
        indices = super().parse_devices(devices)
        if len(indices) > 1 and "LOCAL_RANK" not in os.environ:
            raise ConfigError(
                f'devices={devices!r}: accelerator="torch_tpu" needs a process for each device. Start them with '
                'torchrun after torch.tpu.distributed.set_tpu_launch_env(), or use accelerator="tpu" in one process.'
            )
        return indices

    def torch_device(self, index: int) -> torch.device:
        """Return `tpu:index`. The package is imported first, because it registers the device.

        Raises:
            ConfigError: the package found no TPU and registered no device.
        """
        importlib.import_module("torch_tpu")
        try:
            return torch.device("tpu", index)
        except RuntimeError as error:
            raise ConfigError(
                'accelerator="torch_tpu": the package torch_tpu found no TPU, although its device files exist. Check if '
                "another process uses it."
            ) from error

    def describe(self) -> dict[str, Any]:
        """Return the versions of torch_tpu and libtpu."""
        return {name: version for name, version in installed().items() if name in ("torch_tpu", "libtpu")}
