"""Checks that all ranks agree on settings and data, before anything depends on them.

Suppose that a rank has other callbacks, more batches or another checkpoint than the other ranks. At some step it waits in
an exchange that they never enter, and they wait in another one, for half an hour. So the ranks exchange these values
first. If they differ, all ranks raise an error that names the difference.
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

# A shared file system may take a moment to show another machine's file.
SEEN_WITHIN_S = 5.0


def check_alike(group: Group, settings: Mapping[str, Any], hint: str, error: type[Exception] = ConfigError) -> None:
    """Raise if two ranks disagree. All ranks call it.

    Args:
        group: the ranks.
        settings: plain values by name, in the words of the error.
        hint: tells the user what to do.
        error: the type of the error.

    Raises:
        Exception: `error`, on every rank.
    """
    if not group.is_distributed:
        return
    everyone = group.gather((socket.gethostname(), dict(settings)))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                raise error(
                    f"The ranks differ in {name}: rank 0 ({first_host}) has {first.get(name)}, rank {rank} ({host}) has "
                    f"{other.get(name)}. {hint}"
                )


def blind(group: Group, path: Path) -> str:
    """List the ranks that don't see a path that rank 0 has made, for a message; empty if all see it. All ranks call it."""
    until = time.monotonic() + SEEN_WITHIN_S
    while not (seen := path.exists()) and time.monotonic() < until:
        time.sleep(0.05)
    everyone = group.gather((socket.gethostname(), seen))
    return ", ".join(f"rank {rank} ({host})" for rank, (host, sees) in enumerate(everyone) if not sees)


def parameters_of(module: nn.Module) -> str:
    """Summarise a module's parameters and buffers. It differs where names, shapes, types or `requires_grad` do."""
    named = [*module.named_parameters(), *module.named_buffers()]
    shapes = [None if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape) for _, tensor in named]
    described = [
        (name, shape, str(tensor.dtype), tensor.requires_grad)
        for (name, tensor), shape in zip(named, shapes, strict=True)
    ]
    return f"{len(named)} tensors ({digest(described)})"


def digest(value: Any) -> str:
    """A short hash of a value. Every element of arrays and tensors counts."""
    return hashed(value)[:12]
