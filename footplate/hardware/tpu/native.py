"""The second route to a TPU: a torch device of its own, `tpu`, that the package torch_tpu brings.

    accelerator="tpu"          the step captured and compiled as one program, by JAX (hardware/xla.py)
    accelerator="torch_tpu"    the eager step, as on a GPU: each operation goes to the device as torch meets it

torch_tpu 0.2.0 is for torch 2.11 to 2.15 and TPUs from v4 on. It registers its device only where a TPU is; on a machine
without one it can be imported with torch 2.13, has no devices, and `torch.device("tpu")` is unknown. That is all that has
been tried here: nothing has run on its device. JAX 0.10.2 and torch_tpu 0.2.0 want different versions of libtpu, so the two
routes belong into environments of their own (`versions.py` says so when they don't fit).

Several devices: each process has one, and its launcher must be told before it starts any of them
(`torch.tpu.distributed.set_tpu_launch_env()`), which is the user's to do; so `devices=8` is left to torchrun.
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
    """Why the device can't be used, and what would make it so.

    Args:
        chips: how many TPU chips are attached.
        has_package: whether torch_tpu is installed.
    """
    if not chips:
        return "no TPU is attached to this machine (there is neither /dev/accel0 nor /dev/vfio/0)."
    if not has_package:
        return f"the package torch_tpu is not installed. {INSTALL}"
    return None


class NativeTPU(Accelerator):
    """TPU chips as torch's own devices."""

    name = "torch_tpu"
    priority = 25
    precisions = frozenset({"32-true", "bf16-mixed", "bf16-true"})
    process_group_backend = "tpu_dist"

    def unavailable(self) -> str | None:
        """Whether it is the TPU or the package that is missing."""
        return why_not(len(tpu_chips()), importlib.util.find_spec("torch_tpu") is not None)

    def devices(self) -> list[Device]:
        """The chips of this machine, by their device files."""
        return tpu_chips()

    def default_devices(self) -> int:
        """All in a process that a launcher has started, which takes one of them; else one."""
        return len(self.devices()) if "LOCAL_RANK" in os.environ else 1

    def parse_devices(self, devices: Devices) -> list[int]:
        """See `Accelerator.parse_devices`.

        Raises:
            ConfigError: moreover, several are asked for in a process that no launcher has started.
        """
        found = super().parse_devices(devices)
        if len(found) > 1 and "LOCAL_RANK" not in os.environ:
            raise ConfigError(
                f'devices={devices!r}: accelerator="torch_tpu" has a process for each device, which must be started by '
                'torchrun after torch.tpu.distributed.set_tpu_launch_env(). In one process: accelerator="tpu".'
            )
        return found

    def torch_device(self, index: int) -> torch.device:
        """`tpu:index`; the package, which makes torch know it, is imported.

        Raises:
            ConfigError: the package has registered no device: it found no TPU.
        """
        importlib.import_module("torch_tpu")
        try:
            return torch.device("tpu", index)
        except RuntimeError as error:
            raise ConfigError(
                'accelerator="torch_tpu": the package torch_tpu has found no TPU, though device files are there. Is it in '
                "use by another process?"
            ) from error

    def describe(self) -> dict[str, Any]:
        """Versions of the package and of libtpu."""
        return {name: version for name, version in installed().items() if name in ("torch_tpu", "libtpu")}
