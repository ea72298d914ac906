"""MPS: the GPU of a Mac with Apple silicon, through Metal. There is one GPU, which shares the machine's memory."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from footplate.hardware.base import Accelerator, Device


def why_not(system: str, architecture: str, macos: str, built: bool, available: bool) -> str | None:
    """Return why torch can't train on a Mac's GPU, and the solution; None if it can.

    Args:
        system: `sys.platform`.
        architecture: `platform.machine()`.
        macos: the version of macOS, such as "14.5".
        built: True if torch is built with MPS.
        available: True if torch can use MPS.
    """
    if available:
        return None
    if system != "darwin":
        return "MPS is the GPU of an Apple silicon Mac, but this machine does not run macOS."
    if architecture != "arm64":
        return (
            f"Python runs as {architecture}, but MPS needs Apple silicon. "
            "On an Apple silicon Mac, install a Python for arm64."
        )
    if not built:
        return "this torch is built without MPS. Install torch with pip on macOS to get a build with MPS."
    return f"torch finds no Metal GPU on macOS {macos}. It needs macOS 14 or newer, and no virtual machine."


class MPS(Accelerator):
    """The GPU of a Mac."""

    name = "mps"
    priority = 10
    # Metal has no float64.
    precisions = frozenset({"32-true", "16-mixed"})
    process_group_backend = "gloo"

    def unavailable(self) -> str | None:
        """Return the problem with the system, Python, torch's build or macOS, and the solution."""
        mps = torch.backends.mps
        return why_not(sys.platform, platform.machine(), platform.mac_ver()[0], mps.is_built(), mps.is_available())

    def devices(self) -> list[Device]:
        """Return the GPU, with the memory limit that Metal recommends."""
        return [Device(0, torch.backends.mps.get_name(), torch.mps.recommended_max_memory())]

    def torch_device(self, index: int) -> torch.device:
        """Return `mps:0`."""
        return torch.device("mps", index)

    def stats(self, device: torch.device) -> dict[str, float]:
        """Return the GPU memory of this process. Metal does not report utilisation."""
        return {"memory_used_bytes": float(torch.mps.driver_allocated_memory())}

    def describe(self) -> dict[str, Any]:
        """Return the version of macOS, which includes Metal."""
        return {"macOS": platform.mac_ver()[0]}
