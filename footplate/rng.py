"""Randomness that can be continued.

Every random choice of a run is seeded from numbers that a checkpoint holds anyway, so no generator's state has to be
carried between processes:

    shuffling        (seed, epoch)                        data/
    augmentation     (seed, epoch, row) or (…, batch)     data/
    dropout & co.    (seed, batches so far, rank)         before each training step: `step_seeder`

Only Python's and NumPy's global generators, which are slow to seed, are kept as states: `capture` and `restore`.
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
    """A 63-bit seed of some numbers: equal for equal numbers, unrelated for any others.

    Each number is folded in through SplitMix64's finaliser (Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", OOPSLA 2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch, and make `seed` the default of every `Trainer` made from now on.

    Args:
        seed: 0 … 2**32-1; by default the one set before, or a fresh one.
        workers: accepted for Lightning's sake; loader workers are always seeded.
        verbose: accepted for Lightning's sake.

    Returns:
        The seed.
    """
    if seed is None:
        seed = int(os.environ.get(SEED_VARIABLE, secrets.randbelow(2**32)))
    os.environ[SEED_VARIABLE] = str(seed)
    seed_globals(seed)
    return seed


def default_seed() -> int:
    """The seed of `seed_everything`, or a fresh one."""
    return int(os.environ.get(SEED_VARIABLE, secrets.randbelow(2**32)))


def seed_globals(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (on every device)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch's CPU: what a data set's augmentation draws from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def step_seeder(seed: int, device: torch.device) -> Callable[[int], None]:
    """A function that seeds torch's generators, of the CPU and of one device, for a batch by its number.

    It is called at every step; `torch.manual_seed`, which seeds all devices, takes a hundred times as long. `seed` is
    mixed already, and the generators spread neighbouring seeds by themselves, so the batch's number is just added.
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
    """The function that seeds a device's own generator; None for the CPU, whose generator is the host's."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0].manual_seed
    return torch.mps.manual_seed if device.type == "mps" else None


def capture() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global CPU generators, in plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
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
    """The words of Python's generator, which seldom change from one save to the next."""
    return torch.tensor(words, dtype=torch.int64)


def restore(states: dict[str, Any]) -> None:
    """The counterpart of `capture`."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().view(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
