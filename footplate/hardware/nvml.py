"""GPUs of this machine, as the NVIDIA driver reports them, without waking CUDA.

NVML is the library behind `nvidia-smi`. It comes with the driver, and the package nvidia-ml-py (module `pynvml`) calls it.
A query opens no CUDA context, so a process that only looks may still fork workers that use the GPU. A process that has
initialised CUDA may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it.

    Attributes:
        name: such as "NVIDIA H100 80GB HBM3".
        uuid: such as "GPU-5a9c…".
        memory_bytes: its total memory.
        capability: its compute capability, such as (9, 0).
    """

    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The driver and its GPUs, in the order of `nvidia-smi`.

    Attributes:
        version: such as "580.65.06".
        cuda: the newest CUDA version that the driver supports, such as (13, 0).
        gpus: all GPUs, including those that `CUDA_VISIBLE_DEVICES` hides.
    """

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


class NvmlError(Exception):
    """NVML is missing or returned an error. The text says which, and what to do."""


def find_driver() -> Driver:
    """Ask the driver for its version and its GPUs.

    Raises:
        NvmlError: no driver is installed, or the driver does not answer.
    """
    with _session() as pynvml:
        version = _call(pynvml.nvmlSystemGetDriverVersion)
        # NVML writes CUDA 12.4 as 12040.
        cuda = _call(pynvml.nvmlSystemGetCudaDriverVersion_v2)

        handles = [_call(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(_call(pynvml.nvmlDeviceGetCount))]
        gpus = tuple(
            Gpu(
                name=_call(pynvml.nvmlDeviceGetName, handle),
                uuid=_call(pynvml.nvmlDeviceGetUUID, handle),
                memory_bytes=_call(pynvml.nvmlDeviceGetMemoryInfo, handle).total,
                capability=_call(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
            )
            for handle in handles
        )
        return Driver(version, (cuda // 1000, cuda % 1000 // 10), gpus)


def busy(uuid: str) -> float:
    """Return the share of the last sampling period (0 … 1) in which a kernel ran on the GPU.

    Raises:
        NvmlError: there is no such GPU, or it does not report its use.
    """
    with _session() as pynvml:
        handle = _call(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        return _call(pynvml.nvmlDeviceGetUtilizationRates, handle).gpu / 100


def use(index: int) -> tuple[float, int]:
    """Return the busy share (see `busy`) and the used memory in bytes of a GPU, by its number in `nvidia-smi`.

    Raises:
        NvmlError: there is no such GPU, or it does not report its use.
    """
    with _session() as pynvml:
        handle = _call(pynvml.nvmlDeviceGetHandleByIndex, index)
        busy_percent = _call(pynvml.nvmlDeviceGetUtilizationRates, handle).gpu
        return busy_percent / 100, _call(pynvml.nvmlDeviceGetMemoryInfo, handle).used


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Select the GPUs that `CUDA_VISIBLE_DEVICES` names, in its order, by CUDA's own rules.

    Each entry is an index or the beginning of a UUID. The list ends at the first entry that names no GPU. If two entries
    name the same GPU, the result is empty.

    Args:
        gpus: all GPUs.
        visible: the variable's value; None when it is not set.
    """
    if visible is None:
        return list(gpus)

    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _find_gpu(entry.strip(), gpus)
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def _find_gpu(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


@contextmanager
def _session() -> Iterator[Any]:
    """Open NVML for a few queries and close it again. The value is the module `pynvml`."""
    import pynvml

    _call(pynvml.nvmlInit)
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of pynvml; its errors become `NvmlError`."""
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError_LibraryNotFound:  # pyright: ignore[reportAttributeAccessIssue]
        raise NvmlError(
            "no NVIDIA driver is installed (its library NVML is not found). Install it; in a container, start it with "
            "the GPUs, as `docker run --gpus all` does."
        ) from None
    except pynvml.NVMLError as error:
        reason = str(error).rstrip(".")
        raise NvmlError(
            f"the NVIDIA driver does not answer {function.__name__} ({reason}). Check that `nvidia-smi` works. If the "
            "driver was just updated, restart the machine."
        ) from None
