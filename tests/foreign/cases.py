"""Lists of foreign test cases: the kind of each case, and the reason.

A list is a text file with a section for each test file:

    [trainer/test_trainer.py]
    passes        test_trainer_max_steps
    passes      4 test_fit_loop[*]
    on purpose    test_profiler | docs/reference/lightning-trainer.md#arguments-of-the-trainer: profiler
    differs     2 test_timer[*] | Timer of zero duration refused

`NAME[*]` stands for all parameters of a test that have no line of their own. The number before it is the number of these
cases; a run with fewer lacks some. The kinds are:

- passes: the case passes.
- internals: the case tests internals of the other project (mocks, loops, connectors).
- on purpose: Footplate differs, and the named page documents it; after the colon are words of that section.
- wording: Footplate has another message, exception class or warning.
- differs: the behaviour differs, which is a defect; the reason names its cause.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

KINDS = ("passes", "internals", "on purpose", "wording", "differs")
FOLDER = Path(__file__).parent / "lists"
_LINE = re.compile(r"(passes|internals|on purpose|wording|differs)\s+(?:(\d+)\s+)?(\S.*?)(?:\s+\|\s+(.*))?$")


@dataclass(frozen=True)
class Entry:
    """One line of a list.

    Attributes:
        kind: one of `KINDS`.
        reason: why the case doesn't pass; empty for "passes".
        count: the number of cases of the line.
    """

    kind: str
    reason: str = ""
    count: int = 1


class MalformedList(ValueError):
    """A line of a list that can't be parsed."""


def read(path: Path) -> dict[str, Entry]:
    """Entries of a list, by case: `FILE::TEST`, `FILE::TEST[parameters]` or `FILE::TEST[*]`."""
    entries: dict[str, Entry] = {}
    file = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            file = line[1:-1]
            continue
        match = _LINE.fullmatch(line)
        if match is None or not file:
            raise MalformedList(f"{path.name}:{number}: expected KIND [COUNT] CASE [| REASON], got {line!r}")
        kind, count, name, reason = match.groups()
        if f"{file}::{name}" in entries:
            raise MalformedList(f"{path.name}:{number}: {file}::{name} is listed twice")
        entries[f"{file}::{name}"] = Entry(kind, reason or "", int(count or 1))
    return entries


def heading(path: Path) -> str:
    """The text above the first section of a list; empty if there is no list."""
    if not path.exists():
        return ""
    return path.read_text().split("\n\n[", 1)[0].strip().removeprefix("# ").replace("\n# ", "\n")


def write(path: Path, entries: Mapping[str, Entry], heading: str) -> None:
    """Write a list, sorted. The parameters of a test become one line if all of them are alike."""
    folded = fold(entries)
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    file = ""
    for case in sorted(folded):
        if case.split("::", 1)[0] != file:
            file = case.split("::", 1)[0]
            lines += ["", f"[{file}]"]
        entry = folded[case]
        count = str(entry.count) if case.endswith("[*]") else ""
        reason = f" | {entry.reason}" if entry.reason else ""
        lines.append(f"{entry.kind:<10} {count:>3} {case.split('::', 1)[1]}{reason}")
    path.write_text("\n".join(lines) + "\n")


def fold(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """One entry for all parameters of a test if all of them are alike."""
    tests: dict[str, dict[str, Entry]] = {}
    for case, entry in entries.items():
        tests.setdefault(case.split("[", 1)[0], {})[case] = entry
    folded: dict[str, Entry] = {}
    for test, cases in tests.items():
        alike = len({(entry.kind, entry.reason) for entry in cases.values()}) == 1
        if alike and len(cases) > 1:
            first = next(iter(cases.values()))
            folded[f"{test}[*]"] = Entry(first.kind, first.reason, sum(entry.count for entry in cases.values()))
        else:
            folded.update(cases)
    return folded


def unfold(entries: Mapping[str, Entry], ran: Iterable[str]) -> dict[str, Entry]:
    """An entry for each listed case that ran. The remaining cases of a folded entry stay folded."""
    by_test: dict[str, list[str]] = {}
    for case in ran:
        if case not in entries:
            by_test.setdefault(case.split("[", 1)[0], []).append(case)
    single: dict[str, Entry] = {}
    for case, entry in entries.items():
        cases = by_test.get(case.removesuffix("[*]"), []) if case.endswith("[*]") else []
        single.update({each: Entry(entry.kind, entry.reason) for each in cases})
        if entry.count > len(cases):
            single[case] = Entry(entry.kind, entry.reason, entry.count - len(cases))
    return single


@dataclass(frozen=True)
class Comparison:
    """A run beside its list.

    Attributes:
        broken: cases that are listed as passing and didn't pass, with their outcomes.
        mended: cases that pass and are listed otherwise.
        unlisted: cases that passed and aren't in the list.
        counts: the number of cases of each kind in this run; "broken" is a kind of its own.
    """

    broken: dict[str, str]
    mended: list[str]
    unlisted: list[str]
    counts: Counter[str]


def compare(entries: Mapping[str, Entry], outcomes: Mapping[str, str]) -> Comparison:
    """Compare outcomes ("passed", "failed", "skipped", "unused") with the list. A missing case didn't pass."""
    broken: dict[str, str] = {}
    mended: list[str] = []
    counts: Counter[str] = Counter()
    single = unfold(entries, _used(entries, outcomes))
    for case, entry in single.items():
        outcome = outcomes.get(case, "did not run")
        if outcome == "passed":
            counts["passes"] += entry.count
            if entry.kind != "passes":
                mended.append(case)
        elif entry.kind == "passes":
            broken[case] = outcome
            counts["broken"] += entry.count
        else:
            counts[entry.kind] += entry.count
    unlisted = [case for case, outcome in outcomes.items() if outcome == "passed" and case not in single]
    return Comparison(broken, sorted(mended), sorted(unlisted), counts)


def _used(entries: Mapping[str, Entry], outcomes: Mapping[str, str]) -> dict[str, str]:
    """Outcomes of the cases that ran with Footplate, or that have a line of their own."""
    return {case: outcome for case, outcome in outcomes.items() if outcome != "unused" or case in entries}


def updated(entries: Mapping[str, Entry], outcomes: Mapping[str, str]) -> dict[str, Entry]:
    """The list, updated with the outcomes of the run and with new cases that ran with Footplate.

    Reasons stay. A case that broke, or that is new and fails, gets a reason that a person must replace.
    """
    used = _used(entries, outcomes)
    changed = unfold(entries, used)
    for case, outcome in used.items():
        known = changed.get(case)
        if outcome == "passed":
            changed[case] = Entry("passes")
        elif known is None and outcome == "failed":
            changed[case] = Entry("differs", "not listed before; find the cause")
        elif known is not None and known.kind == "passes":
            changed[case] = Entry("differs", "passed before; find the cause")
    return changed
