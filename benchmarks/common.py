"""What the benchmarks of time share: arguments, paired interleaved rounds, medians with their spread, tables, JSON.

A ratio is never the quotient of two averages. In every round each entrant has its turn, in an order that is turned round
from one round to the next; each round gives one quotient; the ratio is the median of these. Whatever else the machine
does falls on all entrants alike, and the quartiles beside a ratio say how well that worked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

QUICK_ROUNDS = 1

Figures = dict[str, float]
Rounds = dict[str, list[Figures]]  # entrant → its figures, round by round
Ratio = dict[str, Any]  # as `spread` returns it

LESS, MORE = "less is better", "more is better"
CPU_STEP = f"processor time of a step, {LESS}"
WALL_STEP = f"wall time of a step, {LESS}"
MET = f"wall time from a call until the ranks have met, {LESS}"
RETURNED = f"wall time from a call until it returns, {LESS}"


def arguments_parser(description: str) -> argparse.ArgumentParser:
    """A parser of `--json` and `--quick`, which every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, no more")
    return parser


def arguments(description: str) -> argparse.Namespace:
    """What the command line says, for a benchmark that takes no more than that."""
    return arguments_parser(description).parse_args()


def process_context(quick: bool, *preload: str) -> BaseContext:
    """Start methods for the processes that a benchmark measures.

    A measured process is a fresh interpreter. A quick run shows only that the benchmark works, so it forks its processes
    from a fork server that has imported what is slow, once for all of them.

    Args:
        quick: return the fork server rather than fresh interpreters.
        preload: the modules that the fork server imports.
    """
    import multiprocessing

    if not quick:
        return multiprocessing.get_context("spawn")
    # The fork server ignores this process's `sys.path`, and skips modules that it doesn't find.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload])
    return context


def interleave(entrants: Sequence[str], measure: Callable[[str], Figures], rounds: int) -> Rounds:
    """Measure every entrant once in each round, in turned order in every other one."""
    found: Rounds = {entrant: [] for entrant in entrants}
    for number in range(rounds):
        for entrant in entrants if number % 2 == 0 else reversed(entrants):
            found[entrant].append(measure(entrant))
    return found


def median(runs: list[Figures], figure: str) -> float:
    """The median of one figure over the rounds."""
    return statistics.median(run[figure] for run in runs)


def ratio(found: Rounds, over: str, under: str, figure: str, measure: str, under_figure: str | None = None) -> Ratio:
    """Compare two entrants: the quotient of a figure in each round, and the spread of these quotients.

    Args:
        found: the rounds of both.
        over: the entrant that is compared.
        under: its peer.
        figure: the figure's key.
        measure: what the figure measures, in words, and whether less or more of it is better.
        under_figure: the peer's key, where it is another one.
    """
    pairs = zip(found[over], found[under], strict=True)
    return spread([a[figure] / b[under_figure or figure] for a, b in pairs], over, under, measure)


def spread(quotients: Sequence[float], of: str, against: str, measure: str) -> Ratio:
    """The median and the quartiles of quotients of two entrants, with the names of both and what is compared."""
    low, middle, high = (float(at) for at in np.quantile(quotients, (0.25, 0.5, 0.75)))
    named = {"of": of, "against": against, "measure": measure}
    return {"median": middle, "q1": low, "q3": high, "rounds": len(quotients), **named}


def row(name: str, runs: list[Figures]) -> dict[str, Any]:
    """A row of a table: the medians of all figures, and the rounds."""
    return {"name": name, **{figure: median(runs, figure) for figure in runs[0]}, "rounds": runs}


def machine() -> dict[str, Any]:
    """What the figures were taken on, with the load at this moment; no names and no paths."""
    from footplate.hardware.machine import examine_machine

    found = examine_machine()
    return {
        "cpu": found.cpu,
        "cores": found.cores,
        "usable_cores": found.usable_cores,
        "memory_gb": round(found.memory_bytes / 2**30, 1),
        "system": found.system,
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def report(
    benchmark: str,
    title: str,
    columns: dict[str, str],
    rows: list[dict[str, Any]],
    ratios: dict[str, Ratio],
    figures: dict[str, Any],
    machine: dict[str, Any],
    packages: Iterable[str],
    path: Path | None,
    add: bool = False,
) -> None:
    """Print the tables for people, and write the JSON if a file is given.

    Args:
        benchmark: its file's name.
        title: stands above the table.
        columns: for each figure of a row that the table shows, its heading.
        rows: one for each entrant; the figure `name` is its name.
        ratios: by name, as `ratio` returns them; their medians become the JSON's `ratios`.
        figures: what else the JSON's `figures` hold, beside the spread of the ratios.
        machine: from `machine()`, called before the first round.
        packages: the distributions whose versions matter.
        path: the JSON's file.
        add: keep what the file has of other rows, ratios and figures, for a benchmark that is run in parts.
    """
    machine = {**machine, "load_after": os.getloadavg()[0]}
    console = Console(width=110, highlight=False)
    table = Table("", *columns.values(), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row["name"], *(_number(row.get(figure)) for figure in columns))
    console.print(title, table, "", sep="\n")
    for name, found in ratios.items():
        console.print(f"{name:30} {found['median']:6.3f}   (quartiles {found['q1']:.3f} … {found['q3']:.3f})")
        console.print(f"    {found['of']} against {found['against']}: {found['measure']}")
    if path is None:
        return
    result = {
        "benchmark": benchmark,
        "ratios": {name: found["median"] for name, found in ratios.items()},
        "figures": {**ratios, **figures},
        "rows": rows,
        "machine": machine,
        "versions": {name: version(name) for name in packages},
    }
    if add and path.exists():
        result = joined(json.loads(path.read_text()), result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A file's content with what was found now in place of what it had of the same name."""
    names = {row["name"] for row in now["rows"]}
    rows = [row for row in before["rows"] if row["name"] not in names] + now["rows"]
    return {**now, "rows": rows, **{key: {**before[key], **now[key]} for key in ("ratios", "figures", "versions")}}


def let_torchvision_be_imported() -> None:
    """Declare the operators at which torchvision's import stops where its compiled part can't be loaded.

    So it is beside a torch for the CPU; Lightning imports torchvision wherever it is installed.
    """
    import importlib.util
    from pathlib import Path

    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        for file in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(file))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if 0 < abs(value) < 0.005:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
