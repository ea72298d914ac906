"""Runs foreign suites and compares them with their lists: `python -m foreign --from FOLDER`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from foreign import cases
from foreign.running import Outcome, find_archive, run, test_files
from foreign.suites import SUITES, Suite


def main(arguments: list[str] | None = None) -> int:
    """Run the suites that the arguments name; 1 if a case that is listed as passing didn't pass."""
    options = _parser().parse_args(arguments)
    failed = False
    for name in options.suite or SUITES:
        suite = SUITES[name]
        if find_archive(suite, options.archives) is None:
            print(f"{name}: no archive in {options.archives}, left out")
            continue
        failed |= not _run_suite(suite, options)
    print("Foreign tests: " + ("cases that are listed as passing did not pass." if failed else "all as listed."))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="foreign", description=__doc__)
    parser.add_argument("--from", dest="archives", type=Path, required=True, help="the folder of archives")
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="only this one; may be repeated")
    parser.add_argument("--files", nargs="*", help="only test files that contain one of these")
    parser.add_argument("--workers", type=int, default=2, help="test files at a time")
    parser.add_argument("--quick", action="store_true", help="only cases that are listed as passing")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one test file")
    parser.add_argument("--all", action="store_true", help="also cases that no list has")
    parser.add_argument("--update", action="store_true", help="rewrite the lists as the run found them")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    return parser


def _run_suite(suite: Suite, options: argparse.Namespace) -> bool:
    began = time.monotonic()
    path = cases.FOLDER / f"{suite.name}.txt"
    entries = cases.read(path) if path.exists() else {}
    files = test_files(suite, options.archives)
    if options.quick and suite.quick:
        files = [file for file in files if file in suite.quick]
    if options.files:
        files = [file for file in files if any(part in file for part in options.files)]
    if not options.all:
        listed = {case.split("::", 1)[0] for case in entries}
        files = [file for file in files if file in listed]
    meant = {case: entry for case, entry in entries.items() if case.split("::", 1)[0] in set(files)}
    if options.quick:
        meant = {case: entry for case, entry in meant.items() if entry.kind == "passes"}
    outcomes = run(suite, options.archives, files, None if options.all else meant, options.workers, options.limit)
    _report(suite, meant, outcomes, time.monotonic() - began)
    if options.json:
        found = json.loads(options.json.read_text()) if options.json.exists() else {}
        found[suite.name] = {case: vars(outcome) for case, outcome in sorted(outcomes.items())}
        options.json.write_text(json.dumps(found, indent=1))
    plain = {case: outcome.outcome for case, outcome in outcomes.items()}
    if options.update:
        rest = {case: entry for case, entry in entries.items() if case not in meant}
        heading = path.read_text().split("\n\n[", 1)[0].replace("# ", "", 1).replace("\n# ", "\n")
        cases.write(path, {**rest, **cases.updated(meant, plain)}, heading)
        return True
    return not cases.compare(meant, plain).broken


def _report(suite: Suite, entries: dict[str, cases.Entry], outcomes: dict[str, Outcome], seconds: float) -> None:
    compared = cases.compare(entries, {case: outcome.outcome for case, outcome in outcomes.items()})
    for case, what in sorted(compared.broken.items()):
        outcome = outcomes.get(case, Outcome(what))
        print(f"{suite.name}: {case} is listed as passing, and {what}: {outcome.error[:300]} {outcome.line}")
    for case in compared.mended:
        print(f"{suite.name}: {case} passes, and is listed as {cases.unfold(entries, outcomes)[case].kind}")
    counts = ", ".join(f"{compared.counts[kind]} {kind}" for kind in cases.KINDS if compared.counts[kind])
    print(f"{suite.name}: {counts or 'no case'} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
