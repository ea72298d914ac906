"""The CPU: always available, and the reference for every other accelerator.

A "device" of the CPU is a process. torch uses all cores in a single process, so `"auto"` is one process. `devices=4` means
four processes that train together as four GPUs do. Use it to test code for several devices without GPUs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from footplate.core.errors import ConfigError
from footplate.hardware.base import Accelerator, Device
from footplate.hardware.devices import Devices, read_devices
from footplate.hardware.machine import cpu_model, usable_cores

# A larger count is probably a typing error, unless there are more cores.
MAX_PROCESSES = 64


class CPU(Accelerator):
    """Any CPU that torch runs on."""

    name = "cpu"
    priority = 0
    precisions = frozenset({"32-true", "bf16-mixed", "bf16-true", "64-true"})
    process_group_backend = "gloo"

    def unavailable(self) -> str | None:
        """Return None: there is always a CPU."""
        return None

    def devices(self) -> list[Device]:
        """Return the processor as one device, with the machine's memory."""
        import psutil

        return [Device(0, cpu_model(), psutil.virtual_memory().total)]

    def peak_flops_per_s(self, device: torch.device, precision: str) -> float | None:
        """Measure the rate of all usable cores, in a third of a second at the first call."""
        from footplate.hardware import cpu_rates

        return cpu_rates.flops_per_s(torch.bfloat16 if precision.startswith("bf16") else torch.float32)

    def torch_device(self, index: int) -> torch.device:
        """Return `cpu` for every index, because all processes share the processor."""
        return torch.device("cpu")

    def parse_devices(self, devices: Devices) -> list[int]:
        """Parse `devices` into process indices: one for `"auto"`, one for each usable core for -1.

        Raises:
            ConfigError: there are more processes than the larger of 64 and the number of usable cores, or the form is
                invalid.
        """
        cores = max(1, math.floor(usable_cores()))
        most = max(MAX_PROCESSES, cores)
        hint = (
            f'On the CPU, a device is a process: use devices="auto" for one process with all {cores} core(s), '
            f"or a count up to {most}."
        )
        wanted = read_devices(devices, hint)
        if wanted == "auto":
            return [0]
        if isinstance(wanted, int):
            wanted = tuple(range(cores if wanted == -1 else wanted))
        if max(wanted) >= most:
            raise ConfigError(f"devices={devices!r}: too many processes. {hint}")
        return list(wanted)

    def stats(self, device: torch.device) -> dict[str, float]:
        """Return the used memory of the machine, and the utilisation of its cores since this thread's last call (0 … 1)."""
        import psutil

        memory = psutil.virtual_memory()
        return {
            "memory_used_bytes": float(memory.total - memory.available),
            "utilisation": psutil.cpu_percent() / 100,
        }

    def describe(self) -> dict[str, Any]:
        """Return the vector instructions of torch's kernels."""
        return {"instructions": torch.backends.cpu.get_cpu_capability()}
