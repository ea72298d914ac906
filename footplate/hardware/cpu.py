"""The CPU: always there, and what every other accelerator is checked against.

A "device" of the CPU is one process. torch spreads a single process over all cores by itself, so `"auto"` is one;
`devices=4` means four processes that train together as four GPUs would, which is how multi-device code is tried out
without any.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from footplate.core.errors import ConfigError
from footplate.hardware.base import Accelerator, Device
from footplate.hardware.devices import Devices, read_devices
from footplate.hardware.machine import cpu_model, usable_cores

MAX_PROCESSES = 64  # or one for each core, where there are more: beyond that a count is a slip of the pen


class CPU(Accelerator):
    """Any CPU that torch runs on."""

    name = "cpu"
    priority = 0
    precisions = frozenset({"32-true", "bf16-mixed", "bf16-true", "64-true"})
    process_group_backend = "gloo"

    def unavailable(self) -> str | None:
        """None: there is always a CPU."""
        return None

    def devices(self) -> list[Device]:
        """The processor as a whole, with the machine's memory."""
        import psutil

        return [Device(0, cpu_model(), psutil.virtual_memory().total)]

    def torch_device(self, index: int) -> torch.device:
        """`cpu`, whatever the index: all processes share the one processor."""
        return torch.device("cpu")

    def parse_devices(self, devices: Devices) -> list[int]:
        """The process slots that `devices` stands for: one for `"auto"`, one per usable core for -1.

        Raises:
            ConfigError: more processes than the larger of 64 and the number of usable cores, or no form of `devices`.
        """
        cores = max(1, math.floor(usable_cores()))
        most = max(MAX_PROCESSES, cores)
        hint = (
            f'On the CPU a device is one process: use devices="auto" for one that uses all {cores} core(s), '
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
        """Memory in use on the machine, and how busy its cores were since this thread's last call (0 … 1)."""
        import psutil

        memory = psutil.virtual_memory()
        return {
            "memory_used_bytes": float(memory.total - memory.available),
            "utilisation": psutil.cpu_percent() / 100,
        }

    def describe(self) -> dict[str, Any]:
        """The vector instructions that torch's kernels use."""
        return {"instructions": torch.backends.cpu.get_cpu_capability()}
