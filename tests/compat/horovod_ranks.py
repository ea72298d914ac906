"""Checks that need ranks. Many of them run in the same two processes.

    check = Checks(2)

    @check
    def an_average_is_the_default(): ...

    test_two_ranks = check.test()

Each check runs on every rank, one after the other, and is a test of its own. It must complete all its operations.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from models import ranks

import footplate.compat.horovod as hvd


class Checks:
    """Functions for `world` ranks."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._checks: list[Callable[[], None]] = []

    def __call__(self, check: Callable[[], None]) -> Callable[[], None]:
        self._checks.append(check)
        return check

    @functools.cached_property
    def _found(self) -> list[dict[str, str]]:
        return ranks.run(self._run, self._world, timeout_s=240)

    def _run(self) -> dict[str, str]:
        hvd.init()
        failures = {}
        for check in self._checks:
            try:
                check()
            except BaseException:
                failures[check.__name__] = traceback.format_exc()
            hvd.barrier()
        return failures

    def test(self) -> Any:
        """A test with a case for each check."""

        @pytest.mark.parametrize("name", [check.__name__ for check in self._checks])
        def test(name: str) -> None:
            for rank, failures in enumerate(self._found):
                assert name not in failures, f"rank {rank}:\n{failures[name]}"

        return test
