"""MPS: the GPU of a Mac with Apple silicon, through Metal. One GPU, which shares the machine's memory."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from footplate.hardware.base import Accelerator, Device


def why_not(system: str, architecture: str, macos: str, built: bool, available: bool) -> str | None:
    """Why torch can't train on a Mac's GPU here and what would make it so; None when it can.

    Args:
        system: `sys.platform`.
        architecture: `platform.machine()`.
        macos: the version of macOS, such as "14.5".
        built: torch is built with MPS.
        available: torch finds MPS usable.
    """
    if available:
        return None
    if system != "darwin":
        return "MPS is the GPU of an Apple silicon Mac, and this machine does not run macOS."
    if architecture != "arm64":
        return (
            f"Python runs as {architecture}, and MPS needs Apple silicon. "
            "On an Apple silicon Mac, install a Python for arm64."
        )
    if not built:
        return "this torch is built without MPS. The builds that pip installs on macOS have it."
    return f"torch finds no Metal GPU on macOS {macos}. It needs macOS 14 or newer, and a machine that isn't virtual."


class MPS(Accelerator):
    """The GPU of a Mac."""

    name = "mps"
    priority = 10
    precisions = frozenset({"32-true", "16-mixed"})  # Metal has no float64
    process_group_backend = "gloo"

    def unavailable(self) -> str | None:
        """Whether it is the system, the Python, the build of torch or the age of macOS."""
        mps = torch.backends.mps
        return why_not(sys.platform, platform.machine(), platform.mac_ver()[0], mps.is_built(), mps.is_available())

    def devices(self) -> list[Device]:
        """The one GPU, with the memory that Metal recommends to stay within."""
        return [Device(0, torch.backends.mps.get_name(), torch.mps.recommended_max_memory())]

    def torch_device(self, index: int) -> torch.device:
        """`mps:0`."""
        return torch.device("mps", index)

    def stats(self, device: torch.device) -> dict[str, float]:
        """Memory that this process holds on the GPU; Metal tells nothing of how busy it is."""
        return {"memory_used_bytes": float(torch.mps.driver_allocated_memory())}

    def describe(self) -> dict[str, Any]:
        """The version of macOS, which brings Metal."""
        return {"macOS": platform.mac_ver()[0]}
