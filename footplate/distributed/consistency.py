"""What all ranks must have alike, because each of them decides by it: compared before anything depends on it.

A rank that has other callbacks, more batches or another checkpoint than the others goes its own way at some step: it waits
in an exchange that they never enter, and they in one of theirs, for half an hour. So the ranks tell each other beforehand
what they have, and where that differs, all of them raise and say what it is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from footplate.core.errors import ConfigError
from footplate.core.hashing import hashed

if TYPE_CHECKING:
    from footplate.distributed.group import Group

SEEN_WITHIN_S = 5.0  # a file system that several machines share may take a moment to show what one of them has made


def check_alike(group: Group, meant: Mapping[str, Any], hint: str, error: type[Exception] = ConfigError) -> None:
    """Compare what the ranks have; all ranks call it.

    Args:
        group: the ranks.
        meant: plain values by name, as they are to stand in a sentence.
        hint: what to do where one differs.
        error: raised then.

    Raises:
        Exception: `error`, on every rank.
    """
    if not group.is_distributed:
        return
    everyone = group.gather((socket.gethostname(), dict(meant)))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                raise error(
                    f"The ranks differ in {name}: rank 0 ({first_host}) has {first.get(name)}, rank {rank} ({host}) has "
                    f"{other.get(name)}. {hint}"
                )


def blind(group: Group, path: Path) -> str:
    """Which ranks don't see a path that rank 0 has made, for a message; nothing if all do. All ranks call it."""
    until = time.monotonic() + SEEN_WITHIN_S
    while not (seen := path.exists()) and time.monotonic() < until:
        time.sleep(0.05)
    everyone = group.gather((socket.gethostname(), seen))
    return ", ".join(f"rank {rank} ({host})" for rank, (host, sees) in enumerate(everyone) if not sees)


def parameters_of(module: nn.Module) -> str:
    """A module's parameters and buffers in a few words that are others where names, shapes, types or what learns are."""
    named = [*module.named_parameters(), *module.named_buffers()]
    shapes = [None if torch.nn.parameter.is_lazy(one) else tuple(one.shape) for _, one in named]
    described = [
        (name, shape, str(one.dtype), one.requires_grad) for (name, one), shape in zip(named, shapes, strict=True)
    ]
    return f"{len(named)} tensors ({digest(described)})"


def digest(value: Any) -> str:
    """A few characters that are others where a value is; of arrays and tensors, every element counts."""
    return hashed(value)[:12]
