"""Shared parts of the data benchmarks: data sets in every loader's format, and measurements that add up over runs.

Every entrant is a process of its own (`peers/data_loaders.py`) in its own environment, and has one turn in each round (see
`common.interleave` for the reason). Each figure carries the number of its round, so you can run a benchmark in parts:

    python data_images.py --data D --json F --rounds 2                  two rounds of all, on all kinds of data
    python data_images.py --data D --json F --add --kind photos         five more, of one kind of data
    python data_images.py --data D --json F --add --only footplate ray  five more, of some entrants

Ratios use the rounds in which both entrants had a turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
from common import LESS, MORE, Figures, Ratio, Rounds, median

HERE = Path(__file__).parent
ENVS = HERE / "peers" / ".venvs"
COLUMNS = {
    "steady": "steady/s",
    "whole": "whole/s",
    "first_batch_s": "first batch, s",
    "rows_per_cpu_s": "rows per CPU s",
    "peak_mb": "peak MB",
}
MEASURES = {
    "steady": f"rows a second, the first batch of each pass left out, {MORE}",
    "whole": f"rows a second over whole passes, {MORE}",
    "first_batch_s": f"wall time until the first batch, {LESS}",
    "peak_mb": f"peak memory, {LESS}",
}
PACKAGES = ("footplate", "torch", "pyarrow", "deltalake", "numpy", "opencv-python-headless")


@dataclass(frozen=True)
class Entrant:
    """A loader with one tuning: its function in `peers/data_loaders.py`, environment, workers, and input folder."""

    name: str
    function: str
    env: str | None = None
    workers: int = 2
    reads: str | None = None
    streams: bool = True  # False: decodes a whole pass before its first batch, so that its steady rate says nothing

    @property
    def python(self) -> str:
        return sys.executable if self.env is None else str(ENVS / self.env / "bin" / "python")

    def exists(self) -> bool:
        return Path(self.python).exists()


def parse(description: str, kinds: Sequence[str]) -> argparse.Namespace:
    """Parse the options. `options.kinds` are the kinds of data to measure."""
    parser = common.arguments_parser(description, "little data, two rounds: shows that it works, no more")
    parser.add_argument("--add", action="store_true", help="add to the rounds that the file has")
    parser.add_argument("--kind", dest="kinds", nargs="+", choices=kinds, default=list(kinds), help="kinds of data")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only entrants whose name has one of these words")
    parser.add_argument("--rows", type=int, help="number of rows")
    parser.add_argument("--rounds", type=int, help="number of interleaved rounds")
    parser.add_argument("--seconds", type=float, help="least time of each loader in a round; at least one pass")
    parser.add_argument("--data", type=Path, help="directory that keeps the data sets for other runs")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.seconds = options.seconds if options.seconds is not None else (0.0 if options.quick else 30.0)
    return options


def chosen(entrants: Iterable[Entrant], only: Sequence[str] | None) -> list[Entrant]:
    """Entrants that the options choose and whose environment exists."""
    wanted = [
        entrant
        for entrant in entrants
        if only is None or any(word in re.findall(r"\w+", entrant.name) for word in only)
    ]
    return [entrant for entrant in wanted if entrant.exists() or print(f"{entrant.name}: no environment, left out")]


def measure(
    entrants: Sequence[Entrant], directory: Path, batch: int, options: argparse.Namespace, first: int
) -> Rounds:
    """Run the rounds that the options ask for, numbered from `first`.

    An entrant that fails or times out has no figures in that round.
    """
    results: Rounds = {entrant.name: [] for entrant in entrants}
    for number in range(first, first + options.rounds):
        for entrant in entrants if number % 2 == 0 else reversed(entrants):
            load = os.getloadavg()[0]
            figures = once(entrant, directory, batch, options.seconds, options.quick)
            if figures:
                results[entrant.name].append({**figures, "round": number, "load_before": load})
                print(f"round {number} {entrant.name:32} {figures['steady']:12,.0f} rows/s", flush=True)
    return {name: runs for name, runs in results.items() if runs}


def once(entrant: Entrant, directory: Path, batch: int, seconds: float = 0, quick: bool = False) -> Figures | None:
    """Run one turn with the files already in memory, so that the disk doesn't count."""
    if entrant.reads is not None:
        _read_files(directory / entrant.reads)
    arguments = (entrant.function, str(directory), batch, entrant.workers, seconds)
    limit_s = 60 + 4 * seconds
    if quick and entrant.env is None:
        return _in_fork(entrant.name, arguments, limit_s)
    command = [entrant.python, str(HERE / "peers" / "data_loaders.py"), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"{entrant.name}: stopped after {limit_s:.0f} s")
        return None
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return json.loads(line.removeprefix("FIGURES "))
    print(f"{entrant.name}: failed\n{done.stderr[-1500:]}")
    return None


def _in_fork(name: str, arguments: tuple[Any, ...], limit_s: float) -> Figures | None:
    """Run one turn in a fork of this process."""
    context: Any = common.process_context(True, "peers.data_loaders", "footplate.data.loader")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send_figures, args=(sending, arguments))
    process.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(limit_s) else None
    except EOFError:
        print(f"{name}: failed")
        return None
    finally:
        process.kill()
        process.join()


def _send_figures(connection: Connection, arguments: tuple[Any, ...]) -> None:
    from peers import data_loaders

    connection.send(data_loaders.measure(*arguments))


def _read_files(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(2**24):
                    pass


def continued(
    before: Rounds, entrants: Iterable[Entrant], directory: Path, batch: int, options: argparse.Namespace
) -> Rounds:
    """Measure the rounds that the options ask for, and append them to earlier rounds."""
    taken = measure(chosen(entrants, options.only), directory, batch, options, next_round(before))
    return merged(before, taken)


def earlier(path: Path | None, add: bool) -> dict[str, Rounds]:
    """Rounds that a file already has, by kind of data."""
    results: dict[str, Rounds] = {}
    if add and path is not None and path.exists():
        for row in json.loads(path.read_text())["rows"]:
            results.setdefault(row["kind"], {})[row["loader"]] = row["rounds"]
    return results


def next_round(rounds: Rounds) -> int:
    """Number of the round after these."""
    return 1 + max((int(run["round"]) for runs in rounds.values() for run in runs), default=-1)


def merged(before: Rounds, after: Rounds) -> Rounds:
    """Join two sets of rounds."""
    return {name: before.get(name, []) + after.get(name, []) for name in {**before, **after}}


def paired(results: Rounds, over: str, under: str | None, figure: str) -> Ratio | None:
    """`common.ratio` over the rounds that both entrants have; None for fewer than two rounds."""
    if under is None or over not in results or under not in results:
        return None
    turns = {name: {run["round"]: run for run in results[name]} for name in (over, under)}
    both = sorted(turns[over].keys() & turns[under].keys())
    pairs = {name: [turns[name][number] for number in both] for name in (over, under)}
    return common.ratio(pairs, over, under, figure, MEASURES[figure]) if len(both) > 1 else None


def best(results: Rounds, peers: Iterable[Entrant], figure: str, least: bool = False) -> str | None:
    """Name of the peer with the best median of a figure, among peers with more than one turn that have the figure."""
    streaming = [peer for peer in peers if peer.streams or figure != "steady"]
    measured = [peer.name for peer in streaming if len(results.get(peer.name, ())) > 1]
    choose = min if least else max
    return choose(measured, key=lambda name: median(results[name], figure)) if measured else None


def report(
    benchmark: str,
    title: str,
    results: dict[str, Rounds],
    ratios: dict[str, Ratio | None],
    machine: dict[str, object],
    path: Path | None,
    columns: dict[str, str] = COLUMNS,
) -> None:
    """Print the tables, and write the JSON.

    Args:
        benchmark: the name of its file.
        title: the heading of the tables.
        results: the rounds, by kind of data.
        ratios: by name; None values are left out.
        machine: from `common.machine()`.
        path: the JSON's file.
        columns: the heading of each figure.
    """
    rows = [
        {"name": f"{kind}: {loader}", "kind": kind, "loader": loader}
        | {figure: median(runs, figure) for figure in (*columns, "rows")}
        | {"rounds": runs}
        for kind, rounds in results.items()
        for loader, runs in rounds.items()
    ]
    spreads = {name: spread for name, spread in ratios.items() if spread is not None}
    common.report(benchmark, title, columns, rows, spreads, {}, machine, PACKAGES, path)


@contextmanager
def data_directory(kept: Path | None):
    """Directory of the data sets: the given one, or a temporary one."""
    directory = kept or Path(tempfile.mkdtemp(prefix="footplate-bench-"))
    try:
        yield directory
    finally:
        if kept is None:
            shutil.rmtree(directory, ignore_errors=True)


def data_set(directory: Path, make: Callable[..., None], *arguments: Any) -> Path:
    """Return the directory of a data set, and make the data set if it isn't complete.

    It is made in a fork. Threads of pyarrow and Delta then don't exist in this process, which a quick run forks.

    Args:
        directory: the directory.
        make: writes the data set into the directory, and then the file "complete".
        arguments: of `make`, after the directory.
    """
    if (directory / "complete").exists():
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    process = multiprocessing.get_context("fork").Process(target=make, args=(directory, *arguments))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"The data set wasn't made: exit status {process.exitcode}")
    return directory


def peers_formats(directory: Path, formats: dict[str, str]) -> None:
    """Write the peers' own formats with the peers, each in its environment."""
    for name, env in formats.items():
        python = ENVS / env / "bin" / "python"
        if python.exists():
            subprocess.run([str(python), str(HERE / "peers" / "data_formats.py"), str(directory), name], check=True)
