"""XLA: a training step compiled as one program, by JAX, for a TPU or, to try it out, for the CPU.

One process drives all devices of its machine: the loaders have one rank, and its batch is split over the devices.
Several machines have a process each, which is a rank for the loaders; see `footplate/hardware/xla_processes.py`.

    Trainer(accelerator="tpu")                  all TPU cores of this machine; devices=8, devices=[5] as usual
    Trainer(accelerator="xla")                  what JAX prefers: the TPU, or else a GPU, or else the CPU
    Trainer(accelerator="xla", devices=8)       on a machine without a TPU: eight virtual devices of the CPU

How many virtual devices there are is settled when JAX starts, which the trainer does; who has started JAX before says
how many with `jax.config.update("jax_num_cpu_devices", 8)` or `XLA_FLAGS=--xla_force_host_platform_device_count=8`.

Nothing here has run on a TPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from footplate.core.errors import ConfigError
from footplate.core.optional import require
from footplate.distributed.world import World
from footplate.hardware.base import Accelerator, Device
from footplate.hardware.devices import Devices, read_devices
from footplate.hardware.machine import cpu_model
from footplate.hardware.packages import installed_version
from footplate.hardware.xla_processes import join

MOST_VIRTUAL = 64


class XLA(Accelerator):
    """The devices that JAX prefers: the TPU, or virtual devices of the CPU."""

    name = "xla"
    priority = -10
    precisions = frozenset({"32-true", "bf16-mixed", "bf16-true", "64-true"})
    batches_ahead = 2
    single_controller = True
    owns_weights = True
    step = "footplate.step.xla.runtime.xla_step:make_step"
    callbacks = ("footplate.callbacks.pitfalls:watch",)

    def unavailable(self) -> str | None:
        """The reason why JAX can't be used: it isn't installed."""
        if importlib.util.find_spec("jax") is None:
            return 'JAX is not installed. Install it with: pip install "footplate[xla]"'
        return None

    def devices(self) -> list[Device]:
        """TPU chips, or the processor as one device. JAX is not started."""
        return tpu_chips() or [Device(0, f"{cpu_model()}, through XLA")]

    def torch_device(self, index: int) -> torch.device:
        """`cpu`: torch's tensors of the module and of batches stay on the host."""
        return torch.device("cpu")

    def parse_devices(self, devices: Devices) -> list[int]:
        """The indices of the requested devices in JAX's list. Starts JAX.

        Raises:
            ConfigError: there are fewer devices, or JAX was started with fewer virtual devices.
        """
        join(jax(), os.environ)
        if tpu_chips():
            return _among(self.name, len(jax().local_devices()), devices)
        hint = f"Virtual devices of the CPU: a count up to {MOST_VIRTUAL}, or indices below it."
        wanted = read_devices(devices, hint)
        least = 1 if wanted in ("auto", -1) else wanted if isinstance(wanted, int) else max(wanted) + 1
        if not isinstance(least, int) or least > MOST_VIRTUAL:
            raise ConfigError(f"devices={devices!r}: too many. {hint}")
        count = _start(least)
        if count < least:
            raise ConfigError(
                f"devices={devices!r}: JAX was started before with {count} device(s), and can't get more now. Make "
                "the Trainer before anything uses JAX (an earlier Trainer with fewer devices does), or set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={least} in the program's environment."
            )
        return [0] if wanted == "auto" else _among(self.name, count, devices)

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments of the trainer that these accelerators don't support.

        Raises:
            ConfigError: such an argument is given.
        """
        hints = {
            "strategy": (
                "auto",
                'all devices train data parallel in this process; leave it out, or use "fsdp" to shard the weights too',
            ),
            "num_nodes": (
                1,
                "start the program on each machine (torchrun --nnodes=… --nproc-per-node=1), then set it",
            ),
            "compile": (False, "every step is compiled; leave it out"),
            "detect_anomaly": (False, "it watches torch's backward pass, which doesn't run here"),
            "deterministic": (None, "it is a setting of torch, which computes nothing here; leave it out"),
            "min_devices": (None, "this process drives all devices; leave it out"),
        }
        allowed = {"strategy": "fsdp", "num_nodes": World.from_environ().size}
        for argument, (only, hint) in hints.items():
            value = arguments.get(argument, only)
            if value not in (only, allowed.get(argument)) and value is not False:
                raise ConfigError(f'{argument}={value!r} doesn\'t go with accelerator="{self.name}": {hint}.')

    def peak_flops_per_s(self, device: torch.device, precision: str) -> float | None:
        """Look the TPU up in the catalog. None on the CPU: its virtual devices share one processor."""
        from footplate.catalog.peak_rates import tpu_products_per_s

        return tpu_products_per_s(jax().local_devices()[0].device_kind, precision)

    def describe(self) -> dict[str, Any]:
        """The versions of JAX, and of the TPU's compiler if it is installed."""
        versions = {package: installed_version(package) for package in ("jax", "jaxlib", "libtpu")}
        return {package: version for package, version in versions.items() if version is not None}


class TPU(XLA):
    """The TPU cores of this machine."""

    name = "tpu"
    priority = 30

    def unavailable(self) -> str | None:
        """The reason why the TPU can't be used: no TPU, no compiler for it, or no JAX."""
        if not tpu_chips():
            return (
                "no TPU is attached to this machine (there is neither /dev/accel0 nor /dev/vfio/0). To try the same "
                'program on the CPU: accelerator="xla", devices=8.'
            )
        if importlib.util.find_spec("libtpu") is None:
            return 'libtpu is not installed. Install it with: pip install "jax[tpu]"'
        return super().unavailable()

    def parse_devices(self, devices: Devices) -> list[int]:
        """See `XLA.parse_devices`.

        Raises:
            ConfigError: also if JAX has found no TPU.
        """
        indices = super().parse_devices(devices)
        platform = jax().devices()[0].platform
        if platform != "tpu":
            raise ConfigError(
                f'accelerator="tpu": JAX runs on "{platform}". Is the TPU in use by another process, or JAX_PLATFORMS set? '
                "`footplate doctor` shows the versions of jax and libtpu, which must go together."
            )
        return indices


def tpu_chips(dev: Path = Path("/dev")) -> list[Device]:
    """The TPU chips, found by their device files. No driver is called."""
    chips = list(dev.glob("accel[0-9]*"))
    # Without libtpu, /dev/vfio belongs to something else.
    if not chips and importlib.util.find_spec("libtpu") is not None:
        chips = list(dev.glob("vfio/[0-9]*"))
    return [Device(index, "TPU chip") for index in range(len(chips))]


def cache_directory(environ: Mapping[str, str]) -> Path:
    """The directory of compiled programs, kept for the next run: in `XDG_CACHE_HOME`, or in `~/.cache`."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "footplate" / "xla"


def jax() -> Any:
    """Import JAX, or raise an error that names the extra."""
    return require("jax", "xla", 'accelerator="xla"')


def _start(least: int) -> int:
    """Start JAX on the CPU with at least `least` devices, if it isn't running; return its number of devices."""
    running = jax()
    flagged = re.search(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    promised = max(int(flagged.group(1)) if flagged else 1, running.config.jax_num_cpu_devices)
    try:
        if least > promised:
            running.config.update("jax_num_cpu_devices", least)
        if running.config.jax_platforms is None and importlib.util.find_spec("libtpu") is not None:
            # libtpu may be installed only to compile. It would look for a TPU.
            running.config.update("jax_platforms", "cpu")
    except RuntimeError:
        # JAX is running, so its configuration is fixed.
        pass
    return len(running.local_devices())


def _among(name: str, count: int, devices: Devices) -> list[int]:
    """The indices of the requested devices, among `count` devices."""
    hint = f'There are {count} here ({name}:0 to {name}:{count - 1}). Use devices={count} or "auto".'
    wanted = read_devices(devices, hint)
    indices = (
        list(range(count)) if wanted in ("auto", -1) else list(range(wanted)) if isinstance(wanted, int) else wanted
    )
    if max(indices) >= count:  # type: ignore[type-var]
        raise ConfigError(f"devices={devices!r}: {hint}")
    return list(indices)  # type: ignore[arg-type]
