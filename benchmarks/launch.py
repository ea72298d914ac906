"""Time from a launch until the ranks have met, and the cost of a payload of one gigabyte.

    python benchmarks/launch.py --only local --worlds 2 --json benchmarks/results/launch.json
    python benchmarks/launch.py --only local --worlds 4 --json benchmarks/results/launch.json
    python benchmarks/launch.py --only ray --json benchmarks/results/launch.json
    python benchmarks/launch.py --only spark --json benchmarks/results/launch.json
    python benchmarks/launch.py --only payload --json benchmarks/results/launch.json

You can run the parts one after another: each adds its figures to the file. Without `--only` and `--worlds`, all parts run.

On this machine, every contender is a fresh driver process in each round. It starts N workers that form a gloo group and do
one all-reduce, twice in a row. The figure is the time until rank 0 has finished its first all-reduce:

    cold    from the start of the driver process
    warm    from the second call, in the same process

    footplate          Runner(np=-N).run
    footplate run      the command, for a script
    torchrun           the command, for the same script; a process makes no second call
    elastic_launch     torchrun's own function, called from Python
    TorchDistributor   Spark's, local_mode=True; from the call, because its session exists by then

On Ray (`launch_ray.py`) and on Spark (`launch_spark.py`) the engine already runs, and only calls are timed:

    from a call    until rank 0 has finished its first all-reduce; and until the call has returned

The last part sends an argument of 1 GiB to a worker and back: by `Runner`, and by the plain function, which makes a new
tensor of it. In both cases the result is read once. The driver's memory is its peak above the level before the argument
existed: 2 GiB are the argument and the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import launch_ray
import launch_spark
from common import LESS, QUICK_ROUNDS, Figures, Ratio, arguments_parser, interleave, machine, ratio, report, row

ROUNDS = 7
PATIENCE_S = 180
PACKAGES = ("footplate", "torch")
COLUMNS = {
    "cold_s": "cold, s", "warm_s": "warm, s", "first_s": "from a call, s", "returned_s": "until it returned, s",
    "not_rank_0": "values not of rank 0", "bare_s": "bare, s", "runner_s": "Runner, s", "driver_gib": "driver, GiB",
}  # fmt: skip

_MEET = """
import os, sys, time
def meet(place):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        with open(place, "w") as file:
            file.write(str(time.monotonic()))
    dist.destroy_process_group()
"""
_TWICE = """
if __name__ == "__main__":
    for place in sys.argv[2:]:
        with open(place + ".call", "w") as file:
            file.write(str(time.monotonic()))
        call(int(sys.argv[1]), place)
"""
_SCRIPT = f"{_MEET}\nmeet(sys.argv[2])\n"
_FOOTPLATE = f"""{_MEET}
def call(world, place):
    import footplate as fp
    fp.Runner(np=-world).run(meet, place)
{_TWICE}"""
_ELASTIC = f"""{_MEET}
def call(world, place):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=world, rdzv_backend="c10d",
                          rdzv_endpoint="127.0.0.1:0", start_method="spawn", max_restarts=0)
    elastic_launch(config, meet)(place)
{_TWICE}"""
_DISTRIBUTOR = f"""{_MEET}
def call(world, place):
    from pyspark.ml.torch.distributor import TorchDistributor
    TorchDistributor(num_processes=world, local_mode=True, use_gpu=False).run(meet, place)
from pyspark.sql import SparkSession
if __name__ == "__main__":
    SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
{_TWICE}"""

Found = tuple[list[dict[str, Any]], dict[str, Ratio]]  # rows and ratios


@dataclass(frozen=True)
class Contender:
    """A driver program.

    Attributes:
        text: the program. It takes the world size and the files that rank 0 writes once the ranks have met.
        before: the part of the command between the interpreter and the program's path.
        calls: the number of calls in which the ranks meet.
        from_call: count "cold" from its first call rather than from its start.
        needs: the package that it requires; without it the contender is skipped.
        slow: `--quick` skips it.
    """

    text: str
    before: tuple[str, ...] = ()
    calls: int = 2
    from_call: bool = False
    needs: str = "torch"
    slow: bool = False

    def command(self, path: Path, world: int, places: Sequence[Path]) -> list[str]:
        """The command of the driver."""
        before = [word.format(world=world) for word in self.before]
        return [sys.executable, *before, str(path), str(world), *map(str, places)]


@dataclass(frozen=True)
class Part:
    """A part: a function of worker counts, rounds and `quick`. It is skipped without the package `needs`."""

    measure: Callable[[Sequence[int], int, bool], Found]
    needs: str | None = None


CONTENDERS = {
    "footplate": Contender(_FOOTPLATE),
    "footplate run": Contender(_SCRIPT, ("-m", "footplate", "run", "--np", "{world}"), calls=1),
    "torchrun": Contender(_SCRIPT, ("-m", "torch.distributed.run", "--nproc-per-node", "{world}"), calls=1),
    "elastic_launch": Contender(_ELASTIC),
    "TorchDistributor": Contender(_DISTRIBUTOR, from_call=True, needs="pyspark", slow=True),
}
MEASURES = {
    "cold_s": "wall time from the start of the driver until the ranks have met",
    "warm_s": "wall time from the second call in a process until the ranks have met",
}
RATIOS = {  # name: (over, its figure, under, its figure)
    "local_cold_vs_torchrun": ("footplate", "cold_s", "torchrun", "cold_s"),
    "local_warm_vs_torchrun": ("footplate", "warm_s", "torchrun", "cold_s"),
    "local_run_vs_torchrun": ("footplate run", "cold_s", "torchrun", "cold_s"),
    "local_warm_vs_elastic_launch": ("footplate", "warm_s", "elastic_launch", "warm_s"),
    "local_warm_vs_torch_distributor": ("footplate", "warm_s", "TorchDistributor", "warm_s"),
}


def start(contender: Contender, world: int) -> Figures:
    """Run a driver. Return the seconds until its ranks have met."""
    with tempfile.TemporaryDirectory(prefix="footplate-bench-") as directory:
        folder = Path(directory)
        (folder / "driver.py").write_text(contender.text)
        met = [folder / f"met-{number}" for number in range(contender.calls)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory}
        began = time.monotonic()
        ended = subprocess.run(
            contender.command(folder / "driver.py", world, met), env=env, capture_output=True, timeout=PATIENCE_S,
            cwd=directory,
        )  # fmt: skip
        if ended.returncode != 0:
            raise RuntimeError(ended.stderr.decode()[-3000:])
        called = [float(Path(f"{path}.call").read_text()) if contender.calls > 1 else began for path in met]
        at = [float(path.read_text()) for path in met]
    cold = at[0] - (called[0] if contender.from_call else began)
    return {"cold_s": cold} | ({"warm_s": at[1] - called[1]} if contender.calls > 1 else {})


def measure(world: int, rounds: int, quick: bool) -> Found:
    """Rows and ratios of this machine for one number of workers."""
    entrants = {
        name: contender
        for name, contender in CONTENDERS.items()
        if find_spec(contender.needs) and not (quick and contender.slow)
    }
    results = interleave(list(entrants), lambda name: start(entrants[name], world), rounds)
    rows = [row(f"{name}, {world} workers", runs) for name, runs in results.items()]
    ratios: dict[str, Ratio] = {}
    for name, (over, figure, under, its) in RATIOS.items():
        if over in results and under in results:
            measure = MEASURES[figure] if figure == its else f"{MEASURES[figure]}; {under}: {MEASURES[its]}"
            ratios[f"{name}_{world}"] = ratio(results, over, under, figure, f"{measure}, {LESS}", its)
    return rows, ratios


_PAYLOAD = """
import json, resource, sys, time
import torch
import footplate as fp

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

def bump(numbers):
    return numbers + 1

def seconds(call):
    began = time.monotonic()
    assert call().min() == 2
    return time.monotonic() - began

runner = fp.Runner(np=-1)
runner.run(bump, torch.zeros(1))
before = peak()
numbers = torch.ones(int(float(sys.argv[1]) * 2**28))
through = seconds(lambda: runner.run(bump, numbers))
held = peak() - before
print(json.dumps({"bare_s": seconds(lambda: bump(numbers)), "runner_s": through, "driver_gib": held}))
"""


def payload(worlds: Sequence[int], rounds: int, quick: bool) -> Found:
    """A row with the cost of an argument of 1 GiB and a result of the same size."""
    gib = 0.1 if quick else 1.0
    runs: list[Figures] = []
    for _ in range(rounds):
        command = [sys.executable, "-c", _PAYLOAD, str(gib)]
        runs.append(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S).stdout))
    return [row(f"{gib:g} GiB there and back", runs)], {}


def local(worlds: Sequence[int], rounds: int, quick: bool) -> Found:
    """Measure every contender of this machine for each number of workers."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    for world in worlds:
        more_rows, more_ratios = measure(world, rounds, quick)
        rows, ratios = rows + more_rows, ratios | more_ratios
    return rows, ratios


PARTS: dict[str, Part] = {
    "local": Part(local),
    "ray": Part(launch_ray.measure, "ray"),
    "spark": Part(launch_spark.measure, "pyspark"),
    "payload": Part(payload),
}


def main() -> None:
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part; may be repeated")
    parser.add_argument("--worlds", type=int, action="append", help="number of workers; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    host = machine()
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    worlds = [2] if options.quick else options.worlds or [2, 4]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    packages = [*PACKAGES]
    for name in options.only or PARTS:
        part = PARTS[name]
        if part.needs is not None and find_spec(part.needs) is None:
            print(f"{name}: {part.needs} is not installed, left out")
            continue
        more_rows, more_ratios = part.measure(worlds, rounds, options.quick)
        rows, ratios = rows + more_rows, ratios | more_ratios
        packages += [part.needs] if part.needs is not None else []
    shown = {figure: heading for figure, heading in COLUMNS.items() if any(figure in row for row in rows)}
    report("launch", "Start to first all-reduce", shown, rows, ratios, {}, host, packages, options.json, add=True)


if __name__ == "__main__":
    main()
