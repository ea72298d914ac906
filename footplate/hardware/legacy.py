"""Older spellings of the hardware arguments, for older scripts and tutorials.

    Trainer(gpus=2)               →  Trainer(accelerator="gpu", devices=2)
    Trainer(gpus=0)               →  Trainer(accelerator="cpu")
    Trainer(tpu_cores=8)          →  Trainer(accelerator="tpu", devices=8)
    Trainer(tpu_cores=[5])        →  Trainer(accelerator="tpu", devices=[5])
    XLA_USE_BF16=1 python …       →  Trainer(precision="bf16-true")

Each older spelling gives a `FutureWarning` with the current one. An index in a list is not changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError
from footplate.hardware.devices import Devices

if TYPE_CHECKING:
    from footplate.hardware.base import Accelerator

# From _announce up to the script: a _from_… function, modernise, Trainer.__init__, the script.
_STACK = 5
_GPU_NAMES = ("auto", "gpu", "cuda", "mps")


def modernise(
    accelerator: str | Accelerator,
    devices: Devices,
    precision: str | None,
    gpus: Devices | None,
    tpu_cores: Devices | None,
    environ: Mapping[str, str],
) -> tuple[str | Accelerator, Devices, str | None]:
    """Translate the older spellings. Arguments without an older spelling are returned unchanged.

    Call it directly from `Trainer.__init__`, so that the warning points to the line of the user's script.

    Args:
        accelerator: the current argument; `"auto"` if not given.
        devices: the current argument; `"auto"` if not given.
        precision: the current argument; None if not given.
        gpus: the older argument: a count, -1 for all, a list or text; None if not given.
        tpu_cores: the older argument: 1, 8, a list of one core, or text; None if not given.
        environ: the environment variables, for `XLA_USE_BF16`, which an explicit `precision` overrides.

    Returns:
        accelerator, devices, precision.

    Raises:
        ConfigError: an older argument repeats or contradicts another argument.
    """
    if gpus is not None and tpu_cores is not None:
        raise ConfigError(f"gpus={gpus!r} and tpu_cores={tpu_cores!r} are both given: use one of them.")
    if gpus is not None:
        accelerator, devices = _from_gpus(gpus, accelerator, devices)
    if tpu_cores is not None:
        accelerator, devices = _from_tpu_cores(tpu_cores, accelerator, devices)
    if precision is None:
        precision = _from_environ(environ)
    return accelerator, devices, precision


def _from_gpus(gpus: Devices, accelerator: str | Accelerator, devices: Devices) -> tuple[str | Accelerator, Devices]:
    old = f"gpus={gpus!r}"
    _refuse_both(old, devices)
    if gpus in (0, "0", [], ""):
        _refuse_other(old, accelerator, ("auto", "cpu"))
        _announce(old, 'accelerator="cpu"')
        return "cpu", devices
    _refuse_other(old, accelerator, _GPU_NAMES)
    if accelerator == "auto":
        accelerator = "gpu"
    _announce(old, f'accelerator="{_name(accelerator)}", devices={gpus!r}')
    return accelerator, gpus


def _from_tpu_cores(
    cores: Devices, accelerator: str | Accelerator, devices: Devices
) -> tuple[str | Accelerator, Devices]:
    old = f"tpu_cores={cores!r}"
    _refuse_both(old, devices)
    _refuse_other(old, accelerator, ("auto", "tpu"))
    if accelerator == "auto":
        accelerator = "tpu"
    _announce(old, f'accelerator="tpu", devices={cores!r}')
    return accelerator, cores


def _from_environ(environ: Mapping[str, str]) -> str | None:
    value = environ.get("XLA_USE_BF16", "0")
    if value.lower() not in ("1", "true"):
        return None
    _announce(f"XLA_USE_BF16={value}", 'precision="bf16-true"')
    return "bf16-true"


def _refuse_both(old: str, devices: Devices) -> None:
    if devices != "auto":
        raise ConfigError(f"{old} and devices={devices!r} are both given: use devices=, which replaces the other.")


def _refuse_other(old: str, accelerator: str | Accelerator, fitting: tuple[str, ...]) -> None:
    if _name(accelerator) not in fitting:
        raise ConfigError(
            f'{old} contradicts accelerator="{_name(accelerator)}": use accelerator=, and set the number with devices=.'
        )


def _name(accelerator: str | Accelerator) -> str:
    return accelerator if isinstance(accelerator, str) else accelerator.name


def _announce(old: str, new: str) -> None:
    warnings.warn(f"{old} is an older spelling of {new}. Use the new one.", FutureWarning, stacklevel=_STACK)
