"""A cloud's notices that it will take a machine away, watched while a run trains.

    notices.py   the contract, the watching threads, requests to a metadata server
    google.py    Compute Engine: spot machines, maintenance
    amazon.py    EC2: spot machines
    azure.py     Azure: spot machines, maintenance

A notice counts as SIGTERM: the loop finishes the step, saves the run, and exits with 143. Its supervisor then starts it
on another machine. To add a cloud, write a subclass of `Notices`, and name it in `CLOUDS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from footplate.training.preemption.amazon import EC2
from footplate.training.preemption.azure import Azure
from footplate.training.preemption.google import ComputeEngine
from footplate.training.preemption.notices import Notices, watching_clouds

__all__ = ["CLOUDS", "Notices", "watching"]

CLOUDS: tuple[type[Notices], ...] = (ComputeEngine, EC2, Azure)


@contextlib.contextmanager
def watching(end: Callable[[str], None]) -> Iterator[None]:
    """Call `end(reason)` in a thread when the cloud announces the end of this machine, inside a `with` block."""
    present = [cloud for cloud in (kind() for kind in CLOUDS) if cloud.is_present()]
    with watching_clouds(present, end):
        yield
