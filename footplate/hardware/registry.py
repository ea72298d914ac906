"""The registry of accelerators: the built-in ones and those of installed packages. A module is imported when it is used.

A package adds an accelerator through the entry-point group `footplate.accelerators`. The entry point's name is the
accelerator's name, so that finding a name imports only the package that owns it. If a package can't be used (its import
fails, it is not an `Accelerator`, its name is taken), it becomes a `BrokenPlugin`: never available, with its error as the
reason. So a broken package appears in `footplate doctor` and affects nothing else.
"""

from __future__ import annotations

import pkgutil
import warnings
from importlib.metadata import EntryPoint

import torch

from footplate.core.entry_points import entry_points
from footplate.core.errors import ConfigError, did_you_mean
from footplate.hardware.base import Accelerator, Device

GROUP = "footplate.accelerators"

_BUILT_IN = {
    "cpu": "footplate.hardware.cpu:CPU",
    "cuda": "footplate.hardware.cuda:CUDA",
    "mps": "footplate.hardware.mps:MPS",
    "tpu": "footplate.hardware.xla:TPU",
    "torch_tpu": "footplate.hardware.tpu.torch_tpu:TorchTPU",
    "xla": "footplate.hardware.xla:XLA",
}
# "gpu" means the first usable accelerator of these.
_GPUS = ("cuda", "mps")


class BrokenPlugin(Accelerator):
    """An accelerator of a package that can't be loaded."""

    precisions = frozenset()

    def __init__(self, entry: EntryPoint, error: str):
        self.name = entry.name  # type: ignore[misc]
        package = entry.dist.name if entry.dist else entry.value.partition(":")[0]
        self._reason = f'the package "{package}" failed to provide it ({error}). Update or uninstall the package.'

    def unavailable(self) -> str:
        """Return the package and its error."""
        return self._reason

    def devices(self) -> list[Device]:
        """Return no devices."""
        return []

    def torch_device(self, index: int) -> torch.device:
        """Raise an error, because there is no device.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f'accelerator "{self.name}" can\'t be used: {self._reason}')


def accelerators() -> list[Accelerator]:
    """List all known accelerators, usable or not, in `"auto"`'s order of preference."""
    known = [_built_in(name) for name in _BUILT_IN] + [_load(entry) for entry in entry_points(GROUP)]
    return sorted(known, key=lambda accelerator: -accelerator.priority)


def get_accelerator(accelerator: str | Accelerator) -> Accelerator:
    """Return the accelerator of a name.

    Args:
        accelerator: the name of a built-in accelerator or of an installed package's, `"gpu"` for cuda or else mps, `"auto"`
            for the best available, or an `Accelerator` of your own.

    Raises:
        ConfigError: no accelerator has this name, or it can't be used on this machine; the text has the reason and the
            solution.
    """
    if isinstance(accelerator, Accelerator):
        return _usable(accelerator)
    if not isinstance(accelerator, str):
        raise ConfigError(f"accelerator={accelerator!r}: expected a name or an instance of footplate's Accelerator.")
    name = accelerator.lower()
    if name == "auto":
        return choose_auto()
    if name == "gpu":
        return _any_gpu()
    return _usable(_by_name(name))


def choose_auto() -> Accelerator:
    """Return the usable accelerator with the highest priority. Warn about a broken package, which may be the wanted one."""
    usable = []
    for accelerator in accelerators():
        reason = why_unavailable(accelerator)
        if reason is None:
            usable.append(accelerator)
        elif isinstance(accelerator, BrokenPlugin):
            warnings.warn(f'accelerator "{accelerator.name}" is ignored: {reason}', RuntimeWarning, stacklevel=2)
    return usable[0]


def why_unavailable(accelerator: Accelerator) -> str | None:
    """Return `accelerator.unavailable()`. An exception counts as a reason, because the class may be from any package."""
    try:
        return accelerator.unavailable()
    except Exception as error:
        return f"the check for it failed ({_brief(error)})."


def _usable(accelerator: Accelerator) -> Accelerator:
    reason = why_unavailable(accelerator)
    if reason is not None:
        raise ConfigError(f'accelerator="{accelerator.name}" can\'t be used here: {reason}')
    return accelerator


def _any_gpu() -> Accelerator:
    reasons = []
    for name in _GPUS:
        accelerator = _built_in(name)
        reason = why_unavailable(accelerator)
        if reason is None:
            return accelerator
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f'accelerator="gpu" can\'t be used here. {" ".join(reasons)}')


def _by_name(name: str) -> Accelerator:
    if name in _BUILT_IN:
        return _built_in(name)
    entries = entry_points(GROUP)
    for entry in entries:
        if entry.name.lower() == name:
            return _load(entry)
    known = {"auto", "gpu", *_BUILT_IN, *(entry.name for entry in entries)}
    raise ConfigError(f'accelerator="{name}": no accelerator has this name. {did_you_mean(name, known)}')


def _built_in(name: str) -> Accelerator:
    return pkgutil.resolve_name(_BUILT_IN[name])()


def _load(entry: EntryPoint) -> Accelerator:
    if entry.name in _BUILT_IN:
        return BrokenPlugin(entry, f'"{entry.name}" is the name of a built-in accelerator')
    try:
        kind = entry.load()
        if not (isinstance(kind, type) and issubclass(kind, Accelerator)):
            return BrokenPlugin(entry, f"{entry.value} is not a subclass of footplate's Accelerator")
        if kind.name != entry.name:
            return BrokenPlugin(entry, f'{entry.value} has the name "{kind.name}", its entry point "{entry.name}"')
        return kind()
    except Exception as error:
        return BrokenPlugin(entry, _brief(error))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
