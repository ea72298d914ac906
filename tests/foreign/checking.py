"""Runs a suite, or a part of it, and compares the outcomes with the suite's list."""

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
    """The cases of a suite to run.

    Attributes:
        names: only test files that contain one of these; empty for all.
        quick: only cases that are listed as passing, in files with at least `Suite.quick_cases` of them.
        unlisted: also cases that the list doesn't have.
    """

    names: Sequence[str] = ()
    quick: bool = False
    unlisted: bool = False


@dataclass(frozen=True)
class Check:
    """A run of a suite beside its list.

    Attributes:
        suite: the suite.
        entries: the entries of the list that the run covers.
        outcomes: the outcome of each case.
        compared: the comparison of both.
        seconds: the duration of the run.
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
    """Run a part of a suite. Return None if it has no case.

    Args:
        suite: the suite.
        archives: the folder of archives.
        part: the cases to run.
        workers: the number of files that run at a time.
        file_s: the time limit of a file's run.
        until: the time limit of the whole run, by `time.monotonic`.
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
    # A folded entry requests all parameters of a test, including those that a line of their own excludes.
    outcomes = {case: outcome for case, outcome in outcomes.items() if case in meant or case not in entries}
    compared = cases.compare(meant, {case: outcome.outcome for case, outcome in outcomes.items()})
    return Check(suite, meant, outcomes, compared, time.monotonic() - began)


def _files(suite: Suite, archives: Path, part: Part, entries: Mapping[str, cases.Entry]) -> list[str]:
    """Files to run: the files that the list names, even if the archive lacks them, or all files of the archive."""
    files = {case.split("::", 1)[0] for case in entries}
    if part.unlisted:
        files |= set(test_files(suite, archives))
    if part.quick:
        passing: Counter[str] = Counter()
        for case, entry in entries.items():
            passing[case.split("::", 1)[0]] += entry.count if entry.kind == "passes" else 0
        files = {file for file in files if passing[file] >= suite.quick_cases}
    return sorted(file for file in files if not part.names or any(name in file for name in part.names))
