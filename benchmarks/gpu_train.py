"""Training on one GPU: Footplate beside raw torch loops, Lightning and Accelerate, and the share of the GPU's rates.

    python benchmarks/gpu_train.py --json benchmarks/results/gpu_train.json
    python benchmarks/gpu_train.py --accelerator cpu --quick        shows on any machine that it works

ResNet-50, GPT-2 (124 million weights, 1,024 tokens), ViT-B/16 and a tiny MLP train on batches that are ready on the GPU.
`footplate xla` is the exception: its batches are on the CPU, so its steps include their copy. Every loop trains in its own
process. It waits in the batch iterator while other loops have their turns (`gpu_turns.py`). A turn begins with steps that
are not timed, and the GPU is synchronised before the clocks are read. The processes of a model start together. While those
of the first model start, other processes compile the other models, and fill the caches of the compilers.

Footplate's monitor is on, as it is by default. Its first looks at a step are in the warm-up. The time to its next look
doesn't include pauses.

`ready s` is the time until a loop is warm, with compiling, without imports. `peak GB` is `max_memory_allocated` of the
process, with three ready batches. `MFU` is the share of the matrix rate measured in the same run; `of peak` that of the
catalog's rate. Floating-point operations are counted by torch in a forward and backward pass. `resnet50_table` is ResNet-50
trained on a Parquet table of JPEGs through Footplate's loader, beside the same module with bytes that are ready on the GPU.
`plan_memory_error` compares the memory that a plan predicts with the peak of `footplate eager`, with one batch.

A loop that fails is named with its error, and the others go on. The file is written after every model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import LESS, MORE, QUICK_ROUNDS, Figures, Ratio, machine, median, models_parser, ratio, report, spread
from gpu_counts import count_flops, make_table, measure_card, predict_memory
from gpu_turns import Child, Turn, calculate, forks, settings_of_children, train, warm_up
from gpu_variants import AFTER, COMPILE_FIRST, LOOPS, MODELS, NEEDS_CUDA, SMALL, TABLE, Model, loops_of

RATE = f"rate of steps, {MORE}"
RATIOS = {
    "footplate_vs_raw_eager": ("footplate eager", "raw eager"),
    "footplate_vs_raw_compiled": ("footplate compiled", "raw compiled"),
    "footplate_cudagraphs_vs_raw_cudagraphs": ("footplate cudagraphs", "raw cudagraphs"),
    "footplate_step_vs_raw_step": ("footplate step", "raw step"),
    "footplate_graph_vs_raw_graph": ("footplate graph", "raw graph"),
    "footplate_graph_vs_lightning": ("footplate graph", "lightning eager"),
    "footplate_xla_vs_raw_compiled": ("footplate xla", "raw compiled"),
    "footplate_vs_lightning": ("footplate eager", "lightning eager"),
    "footplate_vs_lightning_compiled": ("footplate compiled", "lightning compiled"),
    "footplate_vs_accelerate": ("footplate eager", "accelerate eager"),
    "table_vs_ready_batches": ("from the table", "ready batches"),
}
PLAN = "plan_memory_error"
AT_LEAST = {
    "footplate_vs_raw_eager": 0.99,
    "footplate_vs_raw_compiled": 0.98,
    "footplate_step_vs_raw_step": 0.98,
    "footplate_vs_lightning": 1.0,
    "mlp: footplate_graph_vs_lightning": 4.0,
}
AT_MOST = {PLAN: 0.1}
COLUMNS = {
    "step_ms": "ms a step",
    "cpu_ms": "CPU ms",
    "items_per_s": "items/s",
    "vs_first": "× first",
    "mfu": "MFU",
    "of_peak": "of peak",
    "peak_gb": "peak GB",
    "input": "input",
    "ready_s": "ready s",
}
PACKAGES = (
    "torch",
    "footplate",
    "lightning",
    "accelerate",
    "torchvision",
    "transformers",
    "jax",
    "opencv-python-headless",
)
NOT_PLANNED = (TABLE, "mlp")  # a workspace of cuBLAS is a thousand times the memory of the MLP
WARM_STEPS = 20
READY_S = {"first": 120.0, "later": 75.0}  # the limits for starting and compiling
QUICK = ["mlp", "gpt_124m", TABLE]  # the models of a quick run, if none is named
LEAST_S = 25.0  # a model isn't begun with less time left
TURN_LIMIT_S = 30.0
PICTURES = {False: 2000, True: 64}  # different pictures of the table, by `--quick`


# The run


@dataclass
class Result:
    """What is known of one model."""

    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    planned_bytes: float | None = None
    flops: float | None = None


class Run:
    """The processes of one run, and what they have measured.

    Args:
        options: the arguments of the command line.
        directory: a directory for the caches of compilers, the output of processes, and the table.
    """

    def __init__(self, options: Namespace, directory: Path) -> None:
        self.options = options
        self.models = SMALL if options.quick else MODELS
        self.until = time.perf_counter() + options.limit
        self.machine = machine()
        self.card: dict[str, Any] = {}
        self.results: dict[str, Result] = {}
        self.left_out: list[str] = []
        self.extra_errors: dict[str, str] = {}
        self._table = directory / "table"
        self._logs = directory
        self._context = forks()
        self._children: list[Child] = []

    def kill(self) -> None:
        """Kill all processes that still run."""
        for child in self._children:
            child.kill()

    def measure(self) -> None:
        """Measure the card, and then model by model. Report after each."""
        names = self.options.models or (QUICK if self.options.quick else list(self.models))
        self._measure_card()
        plans = {
            name: self._calculate(f"plan of {name}", predict_memory, self.models[name], self._gpu())
            for name in names
            if name not in NOT_PLANNED
        }
        flops = {
            name: self._calculate(f"flops of {name}", count_flops, self.models[name], self.options.accelerator)
            for name in names
        }
        pictures = PICTURES[self.options.quick]
        table = self._calculate("table", make_table, str(self._table), pictures) if TABLE in names else None

        for number, name in enumerate(names):
            left_s = self.until - time.perf_counter()
            if left_s < (0 if self.options.quick else LEAST_S):
                self.left_out = names[number:]
                break
            self._say(f"{name}: {left_s:.0f} s left")
            if name == TABLE and table is not None and self._answer(table, 60.0) is None:
                continue
            result = self.results[name] = Result()
            self._measure_model(name, result, compile_first=names[1:] if number == 0 else [])
            result.flops = self._answer(flops[name], 5.0)
            if name in plans:
                result.planned_bytes = self._answer(plans[name], 10.0)
            write_report(self)
        if self.left_out:
            write_report(self)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _measure_card(self) -> None:
        arguments = (self.options.accelerator, self.options.quick)
        card = self._answer(self._calculate("card", measure_card, *arguments), 60.0)
        if card is None:
            import multiprocessing

            self._say("forks can't use the GPU: going on with fresh interpreters")
            self._context = multiprocessing.get_context("spawn")
            card = self._answer(self._calculate("card again", measure_card, *arguments), 60.0)
        self.card = card or {}

    def _gpu(self) -> str:
        """Return the catalog's name of this GPU."""
        from footplate.catalog.peak_rates import gpu_of

        row = gpu_of(self.card.get("gpu", ""))
        return row.short if row else "H100"

    def _calculate(self, name: str, function: Callable[..., Any], *arguments: Any) -> Child:
        child = Child(name, self._context, calculate, (function, arguments), self._logs)
        self._children.append(child)
        return child

    def _answer(self, child: Child, timeout_s: float) -> Any:
        answer = child.receive(timeout_s)
        if child.error:
            self.extra_errors[child.name] = child.error
        child.kill()
        return answer

    def _start(self, name: str, loop: str) -> Child:
        arguments = (loops_of(name)[loop], self.models[name], self.options.accelerator, self._table)
        child = Child(f"{name}: {loop}", self._context, train, arguments, self._logs)
        self._children.append(child)
        return child

    def _measure_model(self, name: str, result: Result, compile_first: list[str]) -> None:
        wanted = [loop for loop in loops_of(name) if loop not in self.options.without]
        if self.options.accelerator == "cpu":
            wanted = [loop for loop in wanted if loop not in NEEDS_CUDA]
        children = {loop: self._start(name, loop) for loop in wanted}
        others, after = self._compilations(compile_first)
        if self.options.accelerator == "cpu":
            after["raw cudagraphs"] = "raw compiled"  # it has the same programs there

        limit_s = READY_S["first" if compile_first else "later"] if self.options.accelerator == "cuda" else 240.0
        ready_until = min(time.perf_counter() + limit_s, self.until)
        warm_up(
            {**children, **others}, {**AFTER, **after}, Turn(lead=WARM_STEPS, steps=1, first=True), ready_until, set(others)
        )  # fmt: skip
        self.extra_errors |= {each.name: each.error for each in others.values() if each.error}
        self._say(f"{name}: ready, {self.until - time.perf_counter():.0f} s left")

        try:
            self._take_turns(self.models[name], children, result)
        finally:
            for loop, child in children.items():
                child.kill()
                if child.error:
                    result.errors[loop] = child.error
                elif child.figures and result.rounds.get(loop):
                    for figures in result.rounds[loop]:
                        figures["ready_s"] = child.figures[0]["ready_s"]

    def _compilations(self, models: list[str]) -> tuple[dict[str, Child], dict[str, str]]:
        """Start loops of other models that fill the caches of the compilers. Each kind compiles one model after another."""
        others: dict[str, Child] = {}
        after: dict[str, str] = {}
        if self.options.accelerator != "cuda":
            return others, after
        for kind in COMPILE_FIRST:
            if kind in self.options.without:
                continue
            before = ""
            for name in models:
                if name == TABLE:
                    continue
                key = f"{name}: {kind}"
                others[key] = self._start(name, kind)
                after[key] = before
                before = key
        return others, after

    def _take_turns(self, model: Model, children: dict[str, Child], result: Result) -> None:
        alive = [loop for loop, child in children.items() if not child.error]
        if not alive:
            return
        quick = self.options.quick
        result.steps = self._steps_of(model, children[alive[0]], 0.02 if quick else self.options.turn or model.turn_s)
        turn = Turn(model.lead, result.steps)
        rounds: dict[str, list[Figures]] = {loop: [] for loop in alive}
        for number in range(QUICK_ROUNDS if quick else model.rounds):
            if number and time.perf_counter() > self.until:
                break
            for loop in alive if number % 2 == 0 else reversed(alive):
                if children[loop].error:
                    continue
                children[loop].send(turn)
                figures = children[loop].receive(TURN_LIMIT_S)
                if figures is not None:
                    rounds[loop].append(_per_step(figures, result.steps, model))
        result.rounds = {loop: runs for loop, runs in rounds.items() if not children[loop].error and runs}

    def _steps_of(self, model: Model, child: Child, turn_s: float) -> int:
        """Return the number of steps of a turn, from the rate of one loop."""
        steps, step_s = 5, 0.0
        while steps < 10**5:
            child.send(Turn(model.lead, steps))
            figures = child.receive(TURN_LIMIT_S)
            if figures is None:
                break
            step_s = figures["wall_s"] / steps
            if figures["wall_s"] > turn_s / 5:
                break
            steps *= 5
        return max(3, round(turn_s / step_s)) if step_s else 10


def _per_step(figures: Figures, steps: int, model: Model) -> Figures:
    """Return the figures of a turn, as the table has them."""
    found = {
        "step_ms": figures["wall_s"] / steps * 1e3,
        "cpu_ms": figures["cpu_s"] / steps * 1e3,
        "steps_per_s": steps / figures["wall_s"],
        "items_per_s": steps * model.rows * model.items / figures["wall_s"],
        "cores": figures["cpu_s"] / figures["wall_s"],
        "ready_s": figures["ready_s"],
    }
    # Ready batches are input too while the clocks are read.
    if "threads" in figures:
        found["input"] = figures["input_s"] / figures["wall_s"]
    if "peak_bytes" in figures:
        found["peak_gb"] = figures["peak_bytes"] / 1e9
    found |= {name: figures[name] for name in ("step_bytes", "threads") if name in figures}
    return found


# The report


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows of the table: the loops with their medians, or with their error."""
    rows = []
    for name, result in run.results.items():
        first = next(iter(result.rounds.values()), [])
        for loop in loops_of(name):
            row: dict[str, Any] = {"name": f"{name}: {loop}"}
            if loop in result.errors:
                rows.append({**row, "error": result.errors[loop]})
                continue
            runs = result.rounds.get(loop)
            if not runs:
                continue
            row |= {figure: median(runs, figure) for figure in runs[0]}
            row["vs_first"] = row["steps_per_s"] / median(first, "steps_per_s")
            if result.flops and run.models[name].precision != "32-true":
                rate = result.flops * row["steps_per_s"] / 1e12
                row["mfu"] = rate / run.card["matmul_tflops"] if "matmul_tflops" in run.card else None
                row["of_peak"] = rate / run.card["peak_tflops"] if run.card.get("peak_tflops") else None
            rows.append({**row, "rounds": runs})
    return rows


def ratios_of(name: str, result: Result) -> dict[str, Ratio]:
    """Return the ratios of one model."""
    found = {}
    for kind, (over, under) in RATIOS.items():
        pair = [result.rounds.get(loop, []) for loop in (over, under)]
        if all(pair) and len(pair[0]) == len(pair[1]):
            found[f"{name}: {kind}"] = ratio(result.rounds, over, under, "steps_per_s", RATE)
    eager = result.rounds.get("footplate eager")
    if result.planned_bytes and eager and "step_bytes" in eager[0]:
        measured = eager[-1]["step_bytes"]
        error = abs(result.planned_bytes - measured) / measured
        found[f"{name}: {PLAN}"] = spread(
            [error], "plan", "footplate eager", f"relative error of the peak memory, {LESS}"
        )
    return found


def worst_of(ratios: dict[str, Ratio]) -> dict[str, Ratio]:
    """Return for each kind the ratio of the model that has the worst one."""
    by_kind: dict[str, list[Ratio]] = {}
    for name, quotient in ratios.items():
        model, _, kind = name.partition(": ")
        by_kind.setdefault(kind, []).append({**quotient, "model": model})
    return {
        kind: (max if kind in AT_MOST else min)(of_models, key=lambda each: each["median"])
        for kind, of_models in by_kind.items()
    }


def verdicts(ratios: dict[str, Ratio]) -> dict[str, str]:
    """Compare the ratios with the goals."""
    found = {}
    for goals, sign, is_met in ((AT_LEAST, "≥", float.__ge__), (AT_MOST, "≤", float.__le__)):
        for name, goal in goals.items():
            if name in ratios:
                met = "met" if is_met(float(ratios[name]["median"]), goal) else "missed"
                found[name] = f"{ratios[name]['median']:.3f} {sign} {goal}: {met}"
    return found


def write_report(run: Run) -> None:
    """Print the tables of all models until now, and write the JSON."""
    options = run.options
    ratios: dict[str, Ratio] = {}
    for name, result in run.results.items():
        ratios |= ratios_of(name, result)
    earlier: dict[str, Ratio] = {}
    if options.add and options.json and options.json.exists():
        figures = json.loads(options.json.read_text())["figures"]
        earlier = {name: each for name, each in figures.items() if ": " in name}
    worst = worst_of({**earlier, **ratios})
    goals = verdicts({**ratios, **worst})

    rows = rows_of(run)
    others = {
        "models": {name: _about(run.models[name], result) for name, result in run.results.items()},
        "goals": goals,
        "other_errors": run.extra_errors,
        "left_out": run.left_out,
    }
    report(
        "gpu_train", f"Training on {run.card.get('gpu', run.machine['cpu'])}", COLUMNS, rows, worst,
        {**ratios, **others}, {**run.machine, **run.card}, _installed(PACKAGES), options.json, options.add,
    )  # fmt: skip
    if options.json:
        written = json.loads(options.json.read_text())
        written["ratios"] |= {name: quotient["median"] for name, quotient in ratios.items()}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    _print_more(run, rows, ratios, goals)


def _about(model: Model, result: Result) -> dict[str, Any]:
    """Return the facts of a model that all its loops share."""
    return {
        "rows": model.rows,
        "precision": model.precision,
        "steps_of_a_turn": result.steps,
        "flops_of_a_step": result.flops,
        "planned_gb": result.planned_bytes and result.planned_bytes / 1e9,
    }


def _print_more(run: Run, rows: list[dict[str, Any]], ratios: dict[str, Ratio], goals: dict[str, str]) -> None:
    """Print the ratios of each model, the errors, the goals and the card, a line each."""
    print("\nby model:")
    for name, quotient in ratios.items():
        print(f"{name:52} {quotient['median']:6.3f}   ({quotient['q1']:.3f} … {quotient['q3']:.3f})")
    for row in rows:
        if "threads" in row:
            print(f"{row['name']}: {row['threads']:.0f} threads, {row['cores']:.1f} cores busy in the whole process")
    errors = {**{row["name"]: row["error"] for row in rows if "error" in row}, **run.extra_errors}
    for name, error in errors.items():
        print(f"failed: {name}: {error}")
    for name, verdict in goals.items():
        print(f"goal: {name}: {verdict}")
    print("card: " + ", ".join(f"{name} {value:,.1f}" for name, value in run.card.items() if isinstance(value, float)))
    if run.left_out:
        print(f"left out, no time: {', '.join(run.left_out)}")
    sys.stdout.flush()


def _installed(packages: tuple[str, ...]) -> list[str]:
    def is_installed(package: str) -> bool:
        try:
            return bool(version(package))
        except PackageNotFoundError:
            return False

    return [package for package in packages if is_installed(package)]


def parse() -> Namespace:
    parser = models_parser(
        __doc__ or "",
        names=f"names of models ({', '.join(MODELS)}); by default all, or with --quick {', '.join(QUICK)}",
    )
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda", help="where to train")
    parser.add_argument(
        "--limit", type=float, default=400.0, help="seconds; models that aren't begun by then are left out"
    )
    parser.add_argument("--turn", type=float, help="seconds of a turn; by default as the model has it")
    parser.add_argument(
        "--without", nargs="+", default=[], choices=list(LOOPS), metavar="LOOP", help="loops to leave out"
    )
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"no such models: {', '.join(sorted(unknown))}. There are {', '.join(MODELS)}.")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="footplate-bench-", ignore_cleanup_errors=True) as directory:
        os.environ.update(
            settings_of_children(directory, compile_threads=4), XDG_CACHE_HOME=directory, TORCH_WARM_POOL="0",
            PYTORCH_NVML_BASED_CUDA_CHECK="1",  # imports that ask for CUDA must not start it before a fork
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
        )  # fmt: skip
        if options.accelerator == "cpu":
            os.environ["JAX_PLATFORMS"] = "cpu"
        run = Run(options, Path(directory))
        try:
            run.measure()
        finally:
            run.kill()


if __name__ == "__main__":
    main()
