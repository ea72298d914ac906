"""What the three data benchmarks share: data sets in every loader's format, interleaved rounds, tables and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
ENVS = HERE / "peers" / ".venvs"
FIGURES = ("steady", "whole", "first_batch_s", "rows_per_cpu_s", "peak_mb")


@dataclass(frozen=True)
class Entrant:
    """A loader with one tuning: its function in `peers/data_loaders.py`, its environment, its workers."""

    name: str
    function: str
    env: str | None = None
    workers: int = 2

    @property
    def python(self) -> str:
        return sys.executable if self.env is None else str(ENVS / self.env / "bin" / "python")

    def there(self) -> bool:
        return Path(self.python).exists()


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="little data, two rounds: shows that it works, no more")
    parser.add_argument("--rows", type=int, help="how many rows")
    parser.add_argument("--rounds", type=int, help="how many interleaved rounds")
    parser.add_argument(
        "--seconds", type=float, help="how long each loader runs in a round, at least (one pass, at least)"
    )
    parser.add_argument("--data", type=Path, help="keep the data sets here, and use them again")
    return parser.parse_args()


def run(
    entrants: Iterable[Entrant], directory: Path, batch: int, rounds: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    """Every entrant once in each round, so that whatever else the machine does falls on all alike."""
    entrants = [
        entrant for entrant in entrants if entrant.there() or print(f"{entrant.name}: no environment, left out")
    ]
    found: dict[str, list[dict[str, float]]] = {entrant.name: [] for entrant in entrants}
    for number in range(rounds):
        for entrant in entrants if number % 2 == 0 else reversed(entrants):
            figures = once(entrant, directory, batch, seconds)
            if figures:
                found[entrant.name].append(figures)
                print(f"round {number} {entrant.name:28} {figures['steady']:12,.0f} rows/s", flush=True)
    return {name: runs for name, runs in found.items() if runs}


def once(entrant: Entrant, directory: Path, batch: int, seconds: float = 0) -> dict[str, float] | None:
    command = [entrant.python, str(HERE / "peers" / "data_loaders.py"), entrant.function, str(directory), str(batch)]
    try:
        done = subprocess.run(
            [*command, str(entrant.workers), str(seconds)], capture_output=True, text=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        print(f"{entrant.name}: stopped after 15 minutes")
        return None
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return json.loads(line.removeprefix("FIGURES "))
    print(f"{entrant.name}: failed\n{done.stderr[-1500:]}")
    return None


def how_long(options: argparse.Namespace) -> tuple[int, float]:
    """Rounds, and seconds of a loader in each, as asked for."""
    rounds = options.rounds or (2 if options.quick else 5)
    default = 0.0 if options.quick else 30.0
    return rounds, default if options.seconds is None else options.seconds


def median(runs: list[dict[str, float]], figure: str) -> float:
    return statistics.median(run[figure] for run in runs)


def ratio(found: dict[str, list[dict[str, float]]], over: str, under: str, figure: str) -> dict[str, float]:
    """The median of the rounds' own ratios, and their spread."""
    pairs = [a[figure] / b[figure] for a, b in zip(found[over], found[under], strict=False)]
    return {"median": statistics.median(pairs), "least": min(pairs), "most": max(pairs), "rounds": len(pairs)}


def best(
    found: dict[str, list[dict[str, float]]], peers: Iterable[str], figure: str, least: bool = False
) -> str | None:
    there = [name for name in peers if name in found]
    choose = min if least else max
    return choose(there, key=lambda name: median(found[name], figure)) if there else None


def report(
    benchmark: str, found: dict[str, list[dict[str, float]]], ratios: dict[str, dict[str, float]], path: Path | None
) -> None:
    """Print the table for people, and write the JSON."""
    print(f"\n{'':28} {'steady/s':>12} {'whole/s':>12} {'first s':>8} {'per cpu s':>12} {'peak MB':>8}  steady min-max")
    rows = []
    for name, runs in found.items():
        row = {figure: median(runs, figure) for figure in FIGURES}
        rows.append({"loader": name, **row, "rows": runs[0]["rows"], "runs": runs})
        spread = f"{min(r['steady'] for r in runs):,.0f}-{max(r['steady'] for r in runs):,.0f}"
        print(
            f"{name:28} {row['steady']:12,.0f} {row['whole']:12,.0f} {row['first_batch_s']:8.2f} "
            f"{row['rows_per_cpu_s']:12,.0f} {row['peak_mb']:8,.0f}  {spread}"
        )
    print()
    for name, figures in ratios.items():
        print(f"{name:28} {figures['median']:6.2f}  ({figures['least']:.2f}-{figures['most']:.2f})")
    if path is not None:
        result: dict[str, Any] = {
            "benchmark": benchmark,
            "ratios": {name: figures["median"] for name, figures in ratios.items()},
            "figures": ratios,
            "rows": rows,
            "machine": machine(),
            "versions": {name: version(name) for name in ("torch", "pyarrow", "deltalake", "numpy")},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def with_data(kept: Path | None, make: Callable[[Path], None], body: Callable[[Path], None]) -> None:
    """Make the data sets (unless they were kept), and remove them afterwards (unless they are to be kept)."""
    directory = kept or Path(tempfile.mkdtemp(prefix="footplate-bench-"))
    try:
        if not (directory / "complete").exists():
            directory.mkdir(parents=True, exist_ok=True)
            make(directory)
            (directory / "complete").touch()
        body(directory)
    finally:
        if kept is None:
            shutil.rmtree(directory, ignore_errors=True)
