"""Runs a suite, or a part of it, and compares what it finds with the suite's list."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foreign import cases
from foreign.running import Outcome, run, test_files
from foreign.suites import Suite


@dataclass(frozen=True)
class Part:
    """Which cases of a suite to run.

    Attributes:
        names: only test files that contain one of these; none for all.
        quick: only cases that are listed as passing, in files that have `Suite.quick_cases` of them.
        unlisted: also cases that the list doesn't have.
    """

    names: Sequence[str] = ()
    quick: bool = False
    unlisted: bool = False


@dataclass(frozen=True)
class Check:
    """A run of a suite beside its list.

    Attributes:
        suite: whose.
        entries: the entries of the list that the run was to show.
        outcomes: what became of each case.
        compared: both, compared.
        seconds: how long the run took.
    """

    suite: Suite
    entries: dict[str, cases.Entry]
    outcomes: dict[str, Outcome]
    compared: cases.Comparison
    seconds: float


def list_of(suite: Suite) -> Path:
    """The suite's list."""
    return cases.FOLDER / f"{suite.name}.txt"


def check(
    suite: Suite, archives: Path, part: Part, workers: int = 2, file_s: float = 3600.0, until: float = float("inf")
) -> Check | None:
    """Run a part of a suite; None if it has no case.

    Args:
        suite: whose.
        archives: the folder of archives.
        part: which cases.
        workers: how many files run at a time.
        file_s: after how long a file's run is ended.
        until: when all must have ended, by `time.monotonic`.
    """
    began = time.monotonic()
    path = list_of(suite)
    entries = cases.read(path) if path.exists() else {}
    files = _files(suite, archives, part, entries)
    meant = {case: entry for case, entry in entries.items() if case.split("::", 1)[0] in files}
    if part.quick:
        meant = {case: entry for case, entry in meant.items() if entry.kind == "passes"}
    if not files or not (meant or part.unlisted):
        return None
    outcomes = run(suite, archives, files, None if part.unlisted else meant, workers, file_s, until)
    # A folded entry asks for all parameters of a test, also for those that are left out by a line of their own.
    outcomes = {case: outcome for case, outcome in outcomes.items() if case in meant or case not in entries}
    compared = cases.compare(meant, {case: outcome.outcome for case, outcome in outcomes.items()})
    return Check(suite, meant, outcomes, compared, time.monotonic() - began)


def _files(suite: Suite, archives: Path, part: Part, entries: Mapping[str, cases.Entry]) -> list[str]:
    """The files to run: those that the list names, also where the archive lacks them, or all that the archive has."""
    files = {case.split("::", 1)[0] for case in entries}
    if part.unlisted:
        files |= set(test_files(suite, archives))
    if part.quick:
        passing: Counter[str] = Counter()
        for case, entry in entries.items():
            passing[case.split("::", 1)[0]] += entry.count if entry.kind == "passes" else 0
        files = {file for file in files if passing[file] >= suite.quick_cases}
    return sorted(file for file in files if not part.names or any(name in file for name in part.names))
