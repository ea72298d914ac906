"""Runs foreign suites and compares them with their lists: `python -m foreign --from FOLDER`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from foreign import cases
from foreign.checking import Check, Part, check, list_of
from foreign.running import Outcome, find_archive
from foreign.suites import SUITES, Suite


def main(arguments: list[str] | None = None) -> int:
    """Run the suites that the arguments name. Return 1 if a case listed as passing didn't pass, or if no case ran."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends its processes
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
    """Run a suite, report, and update its list if requested. Return the problems."""
    part = Part(options.files or (), options.quick, options.all)
    checked = check(suite, options.archives, part, options.workers, options.limit, until)
    path = list_of(suite)
    if checked is None:
        count = len(cases.read(path)) if path.exists() else 0
        return f"no case was chosen: {path.name} has {count} entries, and none fits the arguments."
    _report(checked)
    if options.json:
        found = json.loads(options.json.read_text()) if options.json.exists() else {}
        found[suite.name] = {case: vars(outcome) for case, outcome in sorted(checked.outcomes.items())}
        options.json.write_text(json.dumps(found, indent=1))
    if options.update:
        entries = cases.read(path) if path.exists() else {}
        rest = {case: entry for case, entry in entries.items() if case not in checked.entries}
        plain = {case: outcome.outcome for case, outcome in checked.outcomes.items()}
        cases.write(path, {**rest, **cases.updated(checked.entries, plain)}, cases.heading(path))
        return None
    broken = checked.compared.broken
    return f"{len(broken)} cases that are listed as passing did not pass." if broken else None


def _report(checked: Check) -> None:
    name, outcomes, compared = checked.suite.name, checked.outcomes, checked.compared
    for case, what in sorted(compared.broken.items()):
        outcome = outcomes.get(case, Outcome(what))
        phase = " in its teardown" if outcome.phase == "teardown" else ""
        print(f"{name}: {case} is listed as passing, and {what}{phase}: {outcome.error[:300]} {outcome.line}")
    single = cases.unfold(checked.entries, outcomes)
    for case in compared.mended:
        print(f"{name}: {case} passes, and is listed as {single[case].kind}")
    for case in compared.unlisted:
        print(f"{name}: {case} passes, and isn't listed")
    kinds = (*cases.KINDS, "broken")
    counts = ", ".join(f"{compared.counts[kind]} {kind}" for kind in kinds if compared.counts[kind])
    print(f"{name}: {counts or 'no case'} ({checked.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
