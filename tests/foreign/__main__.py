"""Runs foreign suites and compares them with their lists: `python -m foreign --from FOLDER`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from foreign import cases
from foreign.running import Outcome, find_archive, run, test_files
from foreign.suites import SUITES, Suite


def main(arguments: list[str] | None = None) -> int:
    """Run the suites that the arguments name; 1 if a case that is listed as passing didn't pass, or if no case ran."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends what it has started
    until = time.monotonic() + options.deadline
    problems: list[str] = []
    names = [name for name in options.suite or SUITES if find_archive(SUITES[name], options.archives) is not None]
    for name in options.suite or SUITES:
        if name not in names:
            print(f"{name}: no archive {SUITES[name].archive} in {options.archives}, left out")
    if not names:
        problems.append("no suite ran.")
    for name in names:
        problem = _run_suite(SUITES[name], options, until)
        problems += [f"{name}: {problem}"] if problem else []
    print("Foreign tests: " + (" ".join(problems) or "all as listed."))
    return int(bool(problems))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="foreign", description=__doc__)
    parser.add_argument("--from", dest="archives", type=Path, required=True, help="the folder of archives")
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="only this one; may be repeated")
    parser.add_argument("--files", nargs="*", help="only test files that contain one of these")
    parser.add_argument("--workers", type=int, default=2, help="test files at a time")
    parser.add_argument("--quick", action="store_true", help="only cases that are listed as passing")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one test file")
    parser.add_argument("--deadline", type=float, default=86400.0, help="seconds for the whole")
    parser.add_argument("--all", action="store_true", help="also cases that no list has")
    parser.add_argument("--update", action="store_true", help="rewrite the lists as the run found them")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    return parser


def _run_suite(suite: Suite, options: argparse.Namespace, until: float) -> str | None:
    """Run a suite, report, and update its list if that is asked for; returns what is wrong."""
    began = time.monotonic()
    path = cases.FOLDER / f"{suite.name}.txt"
    entries = cases.read(path) if path.exists() else {}
    files = _files(suite, options, entries)
    meant = {case: entry for case, entry in entries.items() if case.split("::", 1)[0] in files}
    if options.quick:
        meant = {case: entry for case, entry in meant.items() if entry.kind == "passes"}
    if not files or not (meant or options.all):
        return f"no case was chosen: {path.name} has {len(entries)} entries, and none fits the arguments."
    wanted = None if options.all else meant
    outcomes = run(suite, options.archives, files, wanted, options.workers, options.limit, until)
    # A folded entry asks for all parameters of a test, also for those that are left out by a line of their own.
    outcomes = {case: outcome for case, outcome in outcomes.items() if case in meant or case not in entries}
    _report(suite, meant, outcomes, time.monotonic() - began)
    if options.json:
        found = json.loads(options.json.read_text()) if options.json.exists() else {}
        found[suite.name] = {case: vars(outcome) for case, outcome in sorted(outcomes.items())}
        options.json.write_text(json.dumps(found, indent=1))
    plain = {case: outcome.outcome for case, outcome in outcomes.items()}
    if options.update:
        cases.write(path, {**_without(entries, meant), **cases.updated(meant, plain)}, cases.heading(path))
        return None
    broken = cases.compare(meant, plain).broken
    return f"{len(broken)} cases that are listed as passing did not pass." if broken else None


def _files(suite: Suite, options: argparse.Namespace, entries: Mapping[str, cases.Entry]) -> list[str]:
    """The files to run: those that the list names, also where the archive lacks them, or all that the archive has."""
    files = {case.split("::", 1)[0] for case in entries}
    if options.all:
        files |= set(test_files(suite, options.archives))
    if options.quick and suite.quick:
        files &= set(suite.quick)
    return sorted(file for file in files if not options.files or any(part in file for part in options.files))


def _without(entries: Mapping[str, cases.Entry], left_out: Mapping[str, cases.Entry]) -> dict[str, cases.Entry]:
    return {case: entry for case, entry in entries.items() if case not in left_out}


def _report(suite: Suite, entries: dict[str, cases.Entry], outcomes: dict[str, Outcome], seconds: float) -> None:
    compared = cases.compare(entries, {case: outcome.outcome for case, outcome in outcomes.items()})
    for case, what in sorted(compared.broken.items()):
        outcome = outcomes.get(case, Outcome(what))
        phase = " in its teardown" if outcome.phase == "teardown" else ""
        print(f"{suite.name}: {case} is listed as passing, and {what}{phase}: {outcome.error[:300]} {outcome.line}")
    single = cases.unfold(entries, outcomes)
    for case in compared.mended:
        print(f"{suite.name}: {case} passes, and is listed as {single[case].kind}")
    for case in compared.unlisted:
        print(f"{suite.name}: {case} passes, and isn't listed")
    kinds = (*cases.KINDS, "broken")
    counts = ", ".join(f"{compared.counts[kind]} {kind}" for kind in kinds if compared.counts[kind])
    print(f"{suite.name}: {counts or 'no case'} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
