"""CUDA: NVIDIA GPUs, and AMD GPUs if torch is built for ROCm, where torch calls them "cuda", too.

Two functions find out why a GPU can't be used. `_collect_facts` doesn't wake CUDA (see `nvml.py`). `why_not` is a pure
function that checks the facts in this order: torch's build, the driver, the driver's age, the GPUs, hidden GPUs, the age of
the GPUs. The first problem is the answer.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from footplate.hardware import nvml
from footplate.hardware.base import Accelerator, Device

_INSTALL = "Install a build of torch for CUDA: pytorch.org/get-started/locally has the command."
_NO_AMD_GPU = (
    "torch is built for ROCm but sees no AMD GPU. `rocm-smi` shows what there is; HIP_VISIBLE_DEVICES may hide it."
)


@dataclass(frozen=True)
class Facts:
    """The facts that decide if torch can use a GPU.

    Attributes:
        torch_version: such as "2.13.0+cu130".
        torch_cuda: the CUDA version that torch is built for, such as (13, 0); None for a build without CUDA.
        rocm: torch is built for AMD GPUs.
        driver: the driver, from NVML.
        no_driver: why NVML found no driver, and the solution; empty if it found one.
        visible: `CUDA_VISIBLE_DEVICES`; None when it is not set.
        count: number of GPUs that torch sees.
        oldest_capability: the lowest compute capability that torch has kernels for.
    """

    torch_version: str
    torch_cuda: tuple[int, int] | None = None
    rocm: bool = False
    driver: nvml.Driver | None = None
    no_driver: str = ""
    visible: str | None = None
    count: int = 0
    oldest_capability: tuple[int, int] = (0, 0)


def why_not(facts: Facts) -> str | None:
    """Return why torch can't train on a GPU, and the solution; None if it can."""
    if facts.rocm:
        return None if facts.count else _NO_AMD_GPU

    gpus = facts.driver.gpus if facts.driver else ()
    if facts.torch_cuda is None:
        present = f", although the driver has {_listed(gpus)}" if gpus else ""
        return f"torch {facts.torch_version} is built without CUDA{present}. {_INSTALL}"

    # A driver that is missing or too old.
    if facts.driver is None:
        return None if facts.count else facts.no_driver
    if facts.driver.cuda[0] < facts.torch_cuda[0]:
        return (
            f"driver {facts.driver.version} supports CUDA up to {_dotted(facts.driver.cuda)}, but torch "
            f"{facts.torch_version} is built for CUDA {_dotted(facts.torch_cuda)}. Update the driver, or install a "
            f"build of torch for CUDA {facts.driver.cuda[0]}."
        )

    # No GPU, or none that this process may use.
    if not gpus:
        return f"driver {facts.driver.version} finds no GPU. If this is a container, start it with the GPUs."
    if facts.count == 0:
        if facts.visible is None:
            return f"the driver has {_listed(gpus)}, but torch sees none of them. Run `nvidia-smi` for details."
        return (
            f'CUDA_VISIBLE_DEVICES="{facts.visible}" leaves none of {_listed(gpus)}. '
            f"Unset it, or use indices from 0 … {len(gpus) - 1}."
        )

    seen = nvml.visible_gpus(gpus, facts.visible)
    if seen and all(gpu.capability < facts.oldest_capability for gpu in seen):
        return (
            f"{seen[0].name} has compute capability {_dotted(seen[0].capability)}, but torch {facts.torch_version} has "
            f"kernels from {_dotted(facts.oldest_capability)} on. Install a build of torch for an older CUDA."
        )
    return None


class CUDA(Accelerator):
    """GPUs that torch calls `cuda`."""

    name = "cuda"
    priority = 20
    precisions = frozenset({"32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"})
    process_group_backend = "gloo" if sys.platform == "win32" else "nccl"
    batches_ahead = 2

    def unavailable(self) -> str | None:
        """Return the problem with torch's build, the driver or the GPUs, and the solution."""
        return why_not(_collect_facts())

    def peak_flops_per_s(self, device: torch.device, precision: str) -> float | None:
        """Look the GPU up in the catalog."""
        from footplate.catalog.peak_rates import gpu_of, products_per_s

        row = gpu_of(torch.cuda.get_device_name(device))
        return None if row is None else products_per_s(row, precision)

    def devices(self) -> list[Device]:
        """List the visible GPUs.

        On a machine with different GPUs, the names are in `nvidia-smi`'s order. CUDA's order may differ, unless
        `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set.
        """
        facts = _collect_facts()
        seen = nvml.visible_gpus(facts.driver.gpus, facts.visible) if facts.driver else []
        # The numbers differ for partitions of a GPU (MIG) and on a machine without NVML.
        if len(seen) != facts.count:
            return [Device(index, "GPU") for index in range(facts.count)]
        return [Device(index, gpu.name, gpu.memory_bytes) for index, gpu in enumerate(seen)]

    def torch_device(self, index: int) -> torch.device:
        """Return `cuda:index`."""
        return torch.device("cuda", index)

    def stats(self, device: torch.device) -> dict[str, float]:
        """Return the GPU memory used by all processes, and the share of time in which the GPU was busy (0 … 1)."""
        free, total = torch.cuda.mem_get_info(device)
        stats = {"memory_used_bytes": float(total - free)}
        try:
            stats["utilisation"] = nvml.busy(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        except nvml.NvmlError:
            return stats
        return stats

    def describe(self) -> dict[str, Any]:
        """Return the CUDA or ROCm version that torch is built for, and the driver."""
        facts = _collect_facts()
        described: dict[str, Any] = {"built for": f"ROCm {torch.version.hip}" if facts.rocm else "no CUDA"}
        if facts.torch_cuda:
            described["built for"] = f"CUDA {_dotted(facts.torch_cuda)}"
        if facts.driver:
            described["driver"] = f"{facts.driver.version} (CUDA up to {_dotted(facts.driver.cuda)})"
        return described


def _collect_facts() -> Facts:
    driver, no_driver = None, ""
    try:
        driver = nvml.find_driver()
    except nvml.NvmlError as error:
        no_driver = str(error)
    built = tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)
    return Facts(
        torch_version=torch.__version__,
        torch_cuda=(built[0], built[1]) if built else None,
        rocm=torch.version.hip is not None,
        driver=driver,
        no_driver=no_driver,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        count=_count(),
        oldest_capability=oldest_capability(torch.cuda.get_arch_list()),
    )


def _count() -> int:
    """Count the GPUs that torch sees. torch asks NVML, too, and wakes CUDA only if NVML has no answer (MIG, no driver)."""
    with warnings.catch_warnings():
        # torch warns "Can't initialize NVML". `no_driver` has a better text.
        warnings.simplefilter("ignore")
        return torch.cuda.device_count()


def oldest_capability(architectures: list[str]) -> tuple[int, int]:
    """Return the lowest compute capability among torch's architectures, such as `["sm_75", "sm_90a"]`; (0, 0) for none."""
    numbers = [int("".join(c for c in arch if c.isdecimal())) for arch in architectures if arch.startswith("sm_")]
    return divmod(min(numbers), 10) if numbers else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _listed(gpus: tuple[nvml.Gpu, ...]) -> str:
    return f"{len(gpus)} GPU(s) ({', '.join(sorted({gpu.name for gpu in gpus}))})"
