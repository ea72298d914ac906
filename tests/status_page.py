"""The results in docs/status.md: `make tables` fills the page from the record in passed.json.

The last cell of a row names the tests that show it, separated by commas, without tests/ and .py:

    training                         all files of a folder
    compat/test_lightning_*          some files of a folder
    launch/test_conformance (ray)    the tests of an engine in a file
    none                             in words: nothing shows it

`filled` writes links and results into the cell, and the table of hardware and versions. It reads its own output, so that it
fills a page again after a new record.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from passed import ROOT, Environment, Run, recorded

DOCS = ROOT / "docs" / "status.md"
NONE = "none"
NOT_RECORDED = "not recorded"
ROW = re.compile(r"^(\| (?!what |---).+ \| .+ \| )(.+)( \|)$", re.MULTILINE)
LINK = re.compile(r"\[`([^`]+)`\]\([^)]+\)")
# Such as "CPU 1,234: ", before the names.
RESULT = re.compile(r"(?:^|(?<=; ))[^:]+: ")
ENVIRONMENTS = re.compile(r"(<!-- environments -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(text: str) -> dict[str, list[str]]:
    """The names of the tests of each row, by what the row is about."""
    page = text.partition("<!-- environments -->")[0]
    return {row[1].split(" | ")[0].removeprefix("| "): names_in(row[2]) for row in ROW.finditer(page)}


def names_in(cell: str) -> list[str]:
    """The names in a cell, with or without links and results."""
    names = RESULT.sub("", LINK.sub(r"\1", cell))
    return [] if names == NONE else re.split("[,;] ", names)


def files_of(name: str) -> list[Path]:
    """The test files that a name stands for."""
    path = name.partition(" ")[0]
    return [file for file in (ROOT / "tests").rglob("test_*.py") if matches(path, file.relative_to(ROOT).as_posix())]


def matches(name: str, part: str) -> bool:
    """Whether a part of the suite, as in the record, belongs to the tests that a name stands for."""
    path, _, engine = name.partition(" ")
    file, part_engine = part.removeprefix("tests/").split(".py", 1)
    return (fnmatch(file, path) or file.startswith(f"{path}/")) and (not engine or engine[1:-1] in part_engine)


def filled(text: str) -> str:
    """The page, with the results of the record."""
    environments = recorded()
    page, mark, rest = text.partition("<!-- environments -->")
    page = ROW.sub(lambda row: row[1] + cell(names_in(row[2]), environments) + row[3], page)
    return ENVIRONMENTS.sub(lambda block: block[1] + table(environments) + block[2], page + mark + rest)


def cell(names: list[str], environments: list[Environment]) -> str:
    """The cell of a row: how many tests passed on which hardware, and links to them."""
    if not names:
        return NONE
    runs: defaultdict[str, list[Run]] = defaultdict(list)  # by hardware
    for environment in environments:
        for part, run in environment.runs.items():
            if any(matches(name, part) for name in names):
                runs[environment.hardware].append(run)
    have_run = [name for name in names if any(matches(name, part) for each in environments for part in each.runs)]
    groups = {
        "; ".join(f"{hardware} {total(passed)}" for hardware, passed in runs.items()): have_run,
        NOT_RECORDED: [name for name in names if name not in have_run],
    }
    return "; ".join(f"{result}: {', '.join(map(link, listed))}" for result, listed in groups.items() if listed)


def total(runs: Collection[Run]) -> str:
    """How many tests of these runs passed, and how many failed if any did."""
    failed = sum(run.failed for run in runs)
    return f"{sum(run.passed for run in runs):,}" + (f" ({failed:,} failed)" if failed else "")


def link(name: str) -> str:
    """A link to the tests that a name stands for."""
    path = name.partition(" ")[0]
    folder, _, file = path.rpartition("/")
    if (ROOT / "tests" / path).is_dir():
        return f"[`{name}`](../tests/{path})"
    return f"[`{name}`](../tests/{folder})" if "*" in file else f"[`{name}`](../tests/{path}.py)"


def table(environments: list[Environment]) -> str:
    """The table of the environments."""
    lines = ["| hardware | system and versions | when | tests that passed |", "| --- | --- | --- | --- |"]
    for each in environments:
        versions = ", ".join([each.system, *(f"{name} {version}" for name, version in each.versions.items())])
        dates = sorted({run.date for run in each.runs.values()})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines.append(f"| {each.hardware} | {versions} | {when} | {total(each.runs.values())} |")
    return "\n".join(lines) + "\n"
