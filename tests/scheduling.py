"""Order of the tests when pytest-xdist runs them in several processes.

Tests of one group run in one process, one after another. The group of a test is
- `ray` for the tests that start Ray, which keeps one address for the whole machine;
- `spark` for the tests that start Spark, whose processes take gigabytes;
- `slurm` for the tests that start Slurm's daemons, so that these start once;
- the test itself in the files of `INDEPENDENT`, whose tests share nothing;
- its file otherwise, so that each server that a file shares starts once.

The groups that took longest when `make record` recorded them start first. Short groups fill the end, and the processes
finish at about the same time.

Slow tests mostly wait, for servers and for processes that start. Quick tests compute. So one process begins with the groups
of quick tests, and the others begin with the groups of slow tests: together they use two cores.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection

import durations
import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ENGINES = {
    "ray": re.compile(
        r"tests/launch/test_(ray|ray_alone)\.py"
        r"|tests/(launch|jobs/backends)/test_(conformance|questions|tuning)\.py::.*\[ray\b"
        r"|tests/jobs/backends/test_ray_jobs\.py"
        r"|tests/test_notebooks\.py::.*4_ladder"
        r"|tests/test_benchmarks\.py::.*\[ray-"
    ),
    "spark": re.compile(
        r"tests/launch/test_spark\.py"
        r"|tests/(launch|jobs/backends)/test_(conformance|questions)\.py::.*\[spark\b"
        r"|tests/compat/test_petastorm\.py"
        r"|tests/test_examples\.py::test_lakehouse_goes_from_a_spark"
        r"|tests/test_notebooks\.py::.*3_lakehouse"
    ),
    "slurm": re.compile(
        r"tests/jobs/backends/test_(conformance|tuning)\.py::.*\[slurm\b"
        r"|tests/jobs/backends/test_slurm_jobs\.py"
        r"|tests/cli/test_tune\.py::test_trials_on_a_cluster"
        r"|tests/launch/test_slurm_allocation\.py"
    ),
}
INDEPENDENT = (
    "tests/test_benchmarks.py",
    "tests/test_notebooks.py",
    "tests/lab/test_engines.py",
    "tests/lab/test_training.py",
)

# Seconds of a test without a record, which took less than a second.
UNRECORDED_S = 0.1
# A group whose tests take longer than this on average counts as slow.
SLOW_GROUP_S = 0.5


def group_of(test: str) -> str:
    """Group of a test, given its node id."""
    engine = next((engine for engine, tests in ENGINES.items() if tests.match(test)), None)
    if engine is not None:
        return engine
    file = test.partition("::")[0]
    return test if file in INDEPENDENT else file


def longest_first(items: list[pytest.Item]) -> None:
    """Order the groups by their recorded seconds, longest first. Tests keep their order within a group."""
    seconds: Counter[str] = Counter()
    members: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        group = group_of(item.nodeid)
        members[group].append(item)
        seconds[group] += seconds_of([item.nodeid])
    items[:] = [item for group, _ in seconds.most_common() for item in members[group]]


def seconds_of(tests: Collection[str]) -> float:
    """Seconds that the tests with these node ids took when they were recorded."""
    recorded = durations.recorded()
    return sum(recorded.get(test, UNRECORDED_S) for test in tests)


def is_slow(group: Collection[str]) -> bool:
    """Whether the tests of a group mostly wait, given their node ids."""
    return seconds_of(group) > SLOW_GROUP_S * len(group)


class GroupScheduling(LoadScopeScheduling):
    """xdist's scheduler of scopes, with our groups as scopes, in the order of the collection."""

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a process the next group of its kind: quick for the first process, slow for the others. Then of any kind."""
        wants_slow = node is not self.nodes[0]
        of_its_kind = (name for name, tests in self.workqueue.items() if is_slow(tests) == wants_slow)
        if (group := next(of_its_kind, None)) is not None:
            self.workqueue.move_to_end(group, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
