"""Randomness that a resumed run can continue.

Footplate seeds every random choice of a run from numbers that a checkpoint holds anyway. So no generator's state has to
move between processes:

    shuffling        (seed, epoch)                        data/
    augmentation     (seed, epoch, row) or (…, batch)     data/
    dropout etc.     (seed, batches so far, rank)         before each training step: `step_seeder`

A checkpoint also keeps the states of the global generators (`capture`, `restore`). Python's and NumPy's are slow to seed.
Torch's generators, on the CPU and on the device, are needed by a validation that runs after the last step.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SEED_VARIABLE = "FOOTPLATE_SEED"
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return a 63-bit seed of some numbers: equal for equal numbers, unrelated for different numbers.

    Each number is folded in with SplitMix64's finaliser (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch, and make `seed` the default of every later `Trainer`.

    Args:
        seed: 0 … 2**32-1. By default the seed that was set before, or a random one.
        workers: accepted for compatibility. Loader workers are always seeded.
        verbose: accepted for compatibility.

    Returns:
        The seed.

    Examples:
        >>> fp.seed_everything(1)
        1
    """
    if seed is None:
        seed = int(os.environ.get(SEED_VARIABLE, secrets.randbelow(2**32)))
    os.environ[SEED_VARIABLE] = str(seed)
    seed_globals(seed)
    return seed


def default_seed() -> int:
    """Return the seed of `seed_everything`, or a random one."""
    return int(os.environ.get(SEED_VARIABLE, secrets.randbelow(2**32)))


def seed_globals(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch's CPU. The augmentation of a data set draws from them."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def step_seeder(seed: int, device: torch.device) -> Callable[[int], None]:
    """Return a function that seeds torch's generators, on the CPU and on one device, for a batch number.

    It runs at every step. `torch.manual_seed` seeds all devices and takes a hundred times as long. `seed` is mixed already,
    and the generators spread neighbouring seeds themselves, so it is enough to add the batch number.
    """
    seed_host = torch.default_generator.manual_seed
    seed_device = device_seeder(device)

    def seed_step(batch: int) -> None:
        number = seed + batch
        seed_host(number)
        if seed_device is not None:
            seed_device(number)

    return seed_step


def device_seeder(device: torch.device) -> Callable[[int], Any] | None:
    """Return the function that seeds a device's own generator. None for the CPU, whose generator is the host's."""
    if device.type == "mps":
        return torch.mps.manual_seed
    generator = _device_generator(device)
    return None if generator is None else generator.manual_seed


def _device_generator(device: torch.device | None) -> torch.Generator | None:
    """Return a device's own default generator. None if it uses the CPU's, or torch knows none for it.

    A device without an index is the current one of its kind.
    """
    if device is None or device.type == "cpu":
        return None
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    # `torch.cuda`, `torch.xpu`, and the modules of plugins that keep torch's convention.
    module = getattr(torch, device.type, None)
    if module is not None and module.is_available() and hasattr(module, "init"):
        # Before this there are no generators.
        module.init()
    generators = getattr(module, "default_generators", None)
    if module is None or not generators:
        return None
    return generators[module.current_device() if device.index is None else device.index]


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, as plain values and tensors on the CPU.

    Torch's are those of the CPU and of `device`.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    generator = _device_generator(device)
    own = {} if generator is None or device is None else {device.type: generator.get_state()}
    return {
        "device": own,
        "python": [version, _as_tensor(words), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).view(np.int32)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }


@functools.lru_cache(maxsize=1)
def _as_tensor(words: tuple[int, ...]) -> torch.Tensor:
    """Return the words of Python's generator as a tensor. They seldom change from one save to the next."""
    return torch.tensor(words, dtype=torch.int64)


def restore(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Set the states that `capture` returned. The state of another kind of device is left out."""
    generator = _device_generator(device)
    if generator is not None and device is not None and device.type in states.get("device", {}):
        generator.set_state(states["device"][device.type].cpu())
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().view(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
