"""Share of other projects' own tests that pass with Footplate: Lightning's, Petastorm's, Horovod's.

    python benchmarks/foreign_tests.py --from ../shared/foreign --json benchmarks/results/foreign_tests.json

The archives of tests aren't part of the repository. A suite without its archive is skipped. `tests/foreign` runs the
suites, and its lists classify each case. For each suite:

- `passed`: cases that pass.
- `behavioural`: cases about behaviour that Footplate means to pass. These are the cases that pass, the cases listed as
  "differs", and the cases listed as passing that failed in this run ("broken").
- `on_purpose`: behaviour that differs on purpose; a page of the docs lists it.
- `internals`: cases that test internals of the other project; `wording`: cases that differ only in a message, an
  exception's class or a warning. `behavioural` includes neither.

`SUITE_passed_share` is the number of passed cases over the number of behavioural cases. The goal for Lightning's is 0.95.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Ratio, arguments_parser, machine, report, spread

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from foreign.checking import Part, check
from foreign.running import find_archive
from foreign.suites import SUITES

COLUMNS = {
    "passed": "pass", "behavioural": "of", "broken": "broken", "on_purpose": "on purpose", "wording": "wording",
    "internals": "internals", "seconds": "s",
}  # fmt: skip


def main() -> None:
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--from", dest="archives", type=Path, required=True, help="the folder of archives")
    parser.add_argument("--workers", type=int, default=2, help="test files at a time")
    options = parser.parse_args()
    host = machine()
    rows: list[dict[str, Any]] = []
    for suite in SUITES.values():
        if find_archive(suite, options.archives) is None:
            continue
        checked = check(suite, options.archives, Part(quick=options.quick), options.workers)
        if checked is not None:
            rows.append({"name": suite.name, **count(checked.compared.counts), "seconds": round(checked.seconds)})
    if not rows:
        sys.exit(f"no suite ran: {options.archives} has no archive of a suite whose list has cases")
    figures = {f"{row['name']}_{figure}": row[figure] for row in rows for figure in COLUMNS if figure in row}
    ratios = {f"{row['name']}_passed_share": share(row) for row in rows if row["behavioural"]}
    report(
        "foreign_tests", "Other projects' tests", COLUMNS, rows, ratios, figures, host, ("torch", "footplate"),
        options.json,
    )  # fmt: skip


def count(kinds: Mapping[str, int]) -> dict[str, int]:
    """Figures of a suite, from the number of its cases of each kind."""
    passed, broken = kinds["passes"], kinds["broken"]
    return {
        "passed": passed,
        "behavioural": passed + kinds["differs"] + broken,
        "broken": broken,
        "on_purpose": kinds["on purpose"],
        "wording": kinds["wording"],
        "internals": kinds["internals"],
    }


def share(row: Mapping[str, Any]) -> Ratio:
    """Passed cases over behavioural cases, in the form of other benchmarks' ratios."""
    measure = f"the number of {row['name']}'s own test cases; more is better"
    return spread([row["passed"] / row["behavioural"]], "cases that pass", "behavioural cases", measure)


if __name__ == "__main__":
    main()
