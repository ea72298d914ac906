"""Steps compiled as a whole on a CPU: `compile="step"` beside the same step compiled by hand.

    python benchmarks/compile_step.py --json benchmarks/results/compile_step.json

A small GPT (4 layers of 256, 4 × 128 tokens) and ResNet-18 (8 images of 64 pixels), in float32, with AdamW. *Step* loops
compile forward, loss, backward and optimizer. *Compiled* loops compile the network alone. Each loop trains in its own
process, and waits in the batch iterator while other loops have their turns, as in `gpu_train.py`. That file measures the
same on a GPU.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from common import MORE, QUICK_ROUNDS, Figures, Rounds, arguments, machine, median, ratio, report
from gpu_turns import Child, Turn, forks, settings_of_children, train, warm_up
from gpu_variants import LOOPS, SMALL, Model, Words, images, torchvision_model, words
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

WANTED = ("raw eager", "raw compiled", "lightning compiled", "raw step", "footplate step")
QUICK = ("raw eager", "raw step", "footplate step")
MODELS: dict[str, Model] = {
    "gpt": Model(
        functools.partial(Words, vocab_size=512, n_positions=128, n_embd=256, n_layer=4, n_head=8),
        functools.partial(words, 512, 128), 4, precision="32-true", items=128,
    ),
    "resnet18": Model(
        functools.partial(torchvision_model, "resnet18"), functools.partial(images, 64), 8, precision="32-true",
        image_size=64,
    ),
}  # fmt: skip
RATIOS = {
    "vs_raw_compiled": ("footplate step", "raw step"),
    "vs_network_compiled": ("footplate step", "raw compiled"),
    "vs_lightning_compiled": ("footplate step", "lightning compiled"),
}
COLUMNS = {"step_ms": "ms a step", "cpu_ms": "CPU ms", "vs_first": "× first", "ready_s": "ready s"}
ROUNDS, TURN_S, LEAD = 10, 2.0, 3


def measure(name: str, model: Model, quick: bool, logs: Path) -> Rounds:
    """Train a model by all loops in turns; return the figures of each loop's turns."""
    context, wanted = forks(), QUICK if quick else WANTED
    children = {
        loop: Child(f"{name}: {loop}", context, train, (LOOPS[loop], model, "cpu", logs), logs) for loop in wanted
    }
    # Each begins when the one before is ready, so that no two compile at the same time.
    after = dict(zip(wanted[1:], wanted, strict=False))
    try:
        warm_up(children, after, Turn(lead=LEAD, steps=5, first=True), time.perf_counter() + 600.0, set())
        slowest_s = max(child.figures[0]["wall_s"] for child in children.values()) / 5
        turn = Turn(LEAD, 3 if quick else max(5, round(TURN_S / slowest_s)))
        rounds: Rounds = {loop: [] for loop in wanted}
        for number in range(QUICK_ROUNDS if quick else ROUNDS):
            for loop in wanted if number % 2 == 0 else wanted[::-1]:
                rounds[loop].append(_turn_of(children[loop], turn))
        return rounds
    finally:
        for child in children.values():
            child.kill()


def _turn_of(child: Child, turn: Turn) -> Figures:
    child.send(turn)
    figures = child.receive(120.0)
    if figures is None:
        raise RuntimeError(f"{child.name}: {child.error}")
    step_ms, cpu_ms = (figures[clock] / turn.steps * 1e3 for clock in ("wall_s", "cpu_s"))
    return {"step_ms": step_ms, "cpu_ms": cpu_ms, "steps_per_s": 1e3 / step_ms, "ready_s": figures["ready_s"]}


def main() -> None:
    options = arguments(__doc__ or "")
    ratios: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="footplate-bench-", ignore_cleanup_errors=True) as directory:
        settings = settings_of_children(directory, compile_threads=1 if options.quick else 2)
        if options.quick:
            settings["TORCHINDUCTOR_CACHE_DIR"] = default_cache_dir()  # torch's own, which other programs have filled
        os.environ.update(settings)
        models = {"mlp": SMALL["mlp"]} if options.quick else MODELS
        for name, model in models.items():
            rounds = measure(name, model, options.quick, Path(directory))
            first = median(rounds[WANTED[0]], "steps_per_s")
            for loop, runs in rounds.items():
                figures = {figure: median(runs, figure) for figure in runs[0]}
                rows.append(
                    {"name": f"{name}: {loop}", **figures, "vs_first": figures["steps_per_s"] / first, "rounds": runs}
                )
            for kind, (over, under) in RATIOS.items():
                if under not in rounds:
                    continue
                ratios[f"{name}_{kind}"] = ratio(rounds, over, under, "steps_per_s", f"rate of steps, {MORE}")
    worst = min((ratios[f"{name}_vs_raw_compiled"] for name in models), key=lambda each: each["median"])
    report(
        "compile_step", "Steps compiled as a whole, on one thread", COLUMNS, rows, {"vs_raw_compiled": worst, **ratios},
        {}, machine(), ("torch", "footplate", "lightning", "transformers", "torchvision"), options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
