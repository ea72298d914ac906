"""Accelerators of another package: one that works, one whose hardware is absent, and one that doesn't exist.

The entry point `broken` names a class that this module does not have.
"""

from __future__ import annotations

import torch

from footplate.hardware.base import Accelerator, Device


class Toy(Accelerator):
    """Two imaginary devices, preferred over all others. The CPU does the work."""

    name = "toy"
    priority = 100
    precisions = frozenset({"32-true", "bf16-mixed"})

    def unavailable(self) -> str | None:
        return None

    def devices(self) -> list[Device]:
        return [Device(0, "Toy One", 2**30), Device(1, "Toy Two", 2**30)]

    def default_devices(self) -> int:
        return 1

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def describe(self) -> dict[str, str]:
        return {"driver": "toy-driver 7"}


class Shy(Toy):
    """Preferred even more, but its check for hardware raises an error."""

    name = "shy"
    priority = 200

    def unavailable(self) -> str | None:
        raise OSError("the shy driver did not answer")
