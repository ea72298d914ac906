"""A lab for each test that asks for one, and the losses of a training that nothing disturbs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import template
from lab_losses import SCRIPT, STEPS, Losses, losses

from footplate.lab import Lab, why_not


@pytest.fixture
def lab() -> Iterator[Callable[[int], Lab]]:
    """Return a function that makes a lab of a number of machines. Where nobody can make one, the test fails."""
    if why := why_not():
        pytest.fail(why)
    with ExitStack() as made:
        yield lambda count: made.enter_context(Lab(count))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Losses:
    """The losses of two ranks on one machine."""
    directory = tmp_path_factory.mktemp("undisturbed")
    words = [sys.executable, "-m", "footplate", "run", "--np", "2", str(SCRIPT), str(directory), "0"]
    with template.Popen(words) as process:
        assert process.wait() == 0
    found = losses(directory)
    assert len(found) == 2 * STEPS
    assert all(len(values) == 1 for values in found.values())
    return found
