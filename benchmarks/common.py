"""Shared parts of the timing benchmarks: arguments, paired interleaved rounds, medians with their spread, tables, JSON.

A ratio is never the quotient of two averages. In every round each entrant has its turn. The order is reversed from one
round to the next. Each round gives one quotient, and the ratio is the median of these quotients. Other load on the machine
affects all entrants alike. The quartiles beside a ratio show how well that worked.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def arguments_parser(
    description: str, quick: str = "one short round: shows that it works, no more"
) -> argparse.ArgumentParser:
    """A parser of `--json` and `--quick`, which every benchmark takes.

    Args:
        description: shown as it is by `--help`.
        quick: the help of `--quick`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def models_parser(
    description: str, name: str = "models", names: str = "names of models; all by default"
) -> argparse.ArgumentParser:
    """A parser that also takes the models to measure, and `--add`, for a benchmark that runs model by model.

    Args:
        description: shown as it is by `--help`.
        name: the name of the list of models among the parsed arguments.
        names: the help of this list.
    """
    parser = arguments_parser(description)
    parser.add_argument(name, nargs="*", help=names)
    parser.add_argument("--add", action="store_true", help="keep the figures of other models that the file has")
    return parser


def arguments(description: str) -> argparse.Namespace:
    """Parse the command line of a benchmark that takes only `--json` and `--quick`."""
    return arguments_parser(description).parse_args()


def process_context(quick: bool, *preload: str) -> BaseContext:
    """Start methods for the processes that a benchmark measures.

    A measured process is a fresh interpreter. A quick run only shows that the benchmark works, so it forks its processes.
    It imports slow packages once for all of them.

    Args:
        quick: return forks of this process rather than fresh interpreters.
        preload: the modules that a quick run imports before it forks.
    """
    import multiprocessing

    if not quick:
        return multiprocessing.get_context("spawn")
    for module in preload:
        importlib.import_module(module)
    gc.freeze()  # else a collection in a fork copies all pages of memory
    return multiprocessing.get_context("fork")


def interleave(entrants: Sequence[str], measure: Callable[[str], Figures], rounds: int) -> Rounds:
    """Measure every entrant once in each round. Every other round has the reverse order."""
    results: Rounds = {entrant: [] for entrant in entrants}
    for number in range(rounds):
        for entrant in entrants if number % 2 == 0 else reversed(entrants):
            results[entrant].append(measure(entrant))
    return results


def median(runs: list[Figures], figure: str) -> float:
    """Median of one figure over the rounds."""
    return statistics.median(run[figure] for run in runs)


def ratio(results: Rounds, over: str, under: str, figure: str, measure: str, under_figure: str | None = None) -> Ratio:
    """Compare two entrants: the quotient of a figure in each round, and the spread of these quotients.

    Args:
        results: the rounds of both.
        over: the entrant in the numerator.
        under: its peer.
        figure: the key of the figure.
        measure: what the figure measures, in words, and whether less or more is better.
        under_figure: the key of the peer's figure, if it is different.
    """
    pairs = zip(results[over], results[under], strict=True)
    return spread([a[figure] / b[under_figure or figure] for a, b in pairs], over, under, measure)


def spread(quotients: Sequence[float], of: str, against: str, measure: str) -> Ratio:
    """Median and quartiles of the quotients of two entrants, with both names and the measure."""
    low, middle, high = (float(at) for at in np.quantile(quotients, (0.25, 0.5, 0.75)))
    named = {"of": of, "against": against, "measure": measure}
    return {"median": middle, "q1": low, "q3": high, "rounds": len(quotients), **named}


def row(name: str, runs: list[Figures]) -> dict[str, Any]:
    """A row of a table: the medians of all figures, and the rounds."""
    return {"name": name, **{figure: median(runs, figure) for figure in runs[0]}, "rounds": runs}


def machine() -> dict[str, Any]:
    """The machine that gave the figures, with its current load; without host names and paths."""
    from footplate.hardware.machine import examine_machine

    examined = examine_machine()
    return {
        "cpu": examined.cpu,
        "cores": examined.cores,
        "usable_cores": examined.usable_cores,
        "memory_gb": round(examined.memory_bytes / 2**30, 1),
        "system": examined.system,
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
    """Print the tables, and write the JSON if a file is given.

    Args:
        benchmark: the name of its file.
        title: the heading of the table.
        columns: the heading of each figure that the table shows.
        rows: one for each entrant; the figure `name` is its name.
        ratios: by name, as `ratio` returns them; their medians become the JSON's `ratios`.
        figures: further contents of the JSON's `figures`, beside the spread of the ratios.
        machine: from `machine()`, called before the first round.
        packages: the distributions whose versions matter.
        path: the JSON's file.
        add: keep other rows, ratios and figures in the file, for a benchmark that runs in parts.
    """
    machine = {**machine, "load_after": os.getloadavg()[0]}
    console = Console(width=110, highlight=False)
    table = Table("", *columns.values(), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row["name"], *(_number(row.get(figure)) for figure in columns))
    console.print(title, table, "", sep="\n")
    for name, spread in ratios.items():
        console.print(f"{name:30} {spread['median']:6.3f}   (quartiles {spread['q1']:.3f} … {spread['q3']:.3f})")
        console.print(f"    {spread['of']} against {spread['against']}: {spread['measure']}")
    if path is None:
        return
    result = {
        "benchmark": benchmark,
        "ratios": {name: spread["median"] for name, spread in ratios.items()},
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
    """A file's content, updated with new rows, ratios and figures of the same names."""
    names = {row["name"] for row in now["rows"]}
    rows = [row for row in before["rows"] if row["name"] not in names] + now["rows"]
    return {**now, "rows": rows, **{key: {**before[key], **now[key]} for key in ("ratios", "figures", "versions")}}


def corrupt_checkpoints(run: Path) -> Iterator[tuple[Path, Exception]]:
    """The checkpoints of a run that claim to be complete but fail to load, each with its error."""
    from footplate import checkpoint

    for path in run.rglob(f"*{checkpoint.SUFFIX}"):
        if path.is_symlink() or not checkpoint.is_complete(path):
            continue
        try:
            checkpoint.load(path)
        except Exception as error:
            yield path, error


def let_torchvision_be_imported() -> None:
    """Declare the operators that torchvision needs at import when its compiled part can't be loaded.

    This happens beside a torch for the CPU. Lightning imports torchvision wherever it is installed.
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
