"""What the NVIDIA driver says of its GPUs, asked without waking CUDA.

NVML is the library behind `nvidia-smi` and comes with the driver. Asking it opens no CUDA context, so a process that
only looks may still fork workers that use the GPU; a process that has initialised CUDA may not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver knows it.

    Attributes:
        name: such as "NVIDIA H100 80GB HBM3".
        uuid: such as "GPU-5a9c…".
        memory_bytes: all of its memory.
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
        cuda: the newest CUDA version that it runs, such as (13, 0).
        gpus: all GPUs, whether or not `CUDA_VISIBLE_DEVICES` hides them.
    """

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


class NvmlError(Exception):
    """NVML is not there, or answered with an error; the text says which and what to do."""


def find_driver() -> Driver:
    """Ask the driver what it is and which GPUs it drives.

    Raises:
        NvmlError: no driver is installed, or it does not answer.
    """
    with _session() as nvml:
        version = _text(nvml, "nvmlSystemGetDriverVersion")
        cuda, count = ctypes.c_int(), ctypes.c_uint()
        _call(nvml, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))  # 12040 is 12.4
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        gpus = tuple(_gpu(nvml, index) for index in range(count.value))
        return Driver(version, (cuda.value // 1000, cuda.value % 1000 // 10), gpus)


def busy(uuid: str) -> float:
    """The share of the last sampling period (0 … 1) in which a kernel ran on the GPU.

    Raises:
        NvmlError: no such GPU, or it does not report its use.
    """
    with _session() as nvml:
        handle = ctypes.c_void_p()
        _call(nvml, "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return _busy(nvml, handle)


def use(index: int) -> tuple[float, int]:
    """A GPU by its number in `nvidia-smi`: as `busy`, and the bytes of its memory that are taken.

    Raises:
        NvmlError: no such GPU, or it does not report its use.
    """
    with _session() as nvml:
        handle = ctypes.c_void_p()
        _call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        return _busy(nvml, handle), _memory(nvml, handle).used


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order, read as CUDA reads it.

    Each entry is an index or the beginning of a UUID; the first that names no GPU ends the list, and one that is named
    twice empties it.

    Args:
        gpus: all GPUs.
        visible: the variable's value; None when it is not set.
    """
    if visible is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named(entry.strip(), gpus)
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def _named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matches = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _busy(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> float:
    rates = _Rates()
    _call(nvml, "nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
    return rates.gpu / 100


def _memory(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> _Memory:
    memory = _Memory()
    _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return memory


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
    memory = _memory(nvml, handle)
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    name, uuid = _text(nvml, "nvmlDeviceGetName", handle), _text(nvml, "nvmlDeviceGetUUID", handle)
    return Gpu(name, uuid, memory.total, (major.value, minor.value))


@contextmanager
def _session() -> Iterator[ctypes.CDLL]:
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        raise NvmlError(
            f"no NVIDIA driver is installed ({_LIBRARY} is not found). Install it; in a container, start it with the "
            "GPUs, as `docker run --gpus all` does."
        ) from None
    _call(nvml, "nvmlInit_v2")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _text(nvml: ctypes.CDLL, function: str, *arguments: object) -> str:
    buffer = ctypes.create_string_buffer(96)
    _call(nvml, function, *arguments, buffer, len(buffer))
    return buffer.value.decode()


def _call(nvml: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = getattr(nvml, function)(*arguments)
    if code != 0:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        reason = nvml.nvmlErrorString(code).decode()
        raise NvmlError(
            f"the NVIDIA driver does not answer {function} ({reason}). See whether `nvidia-smi` works; after an update "
            "of the driver, restart the machine."
        )
