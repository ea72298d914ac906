"""What the monitor and the trackers cost a training, beside Lightning with its profiler and loggers.

    python benchmarks/monitor_overhead.py --json benchmarks/results/monitor_overhead.json

Two models: the tiny MLP of step_overhead.py, and a small CNN whose step takes some milliseconds. The ratios compare the CPU
time of the training process. All loops log two metrics. The loops of the MLP take turns, as in step_overhead.py, and save a
checkpoint every 500 steps, if their trainer logs and saves at all:

- `off`: no monitor, no loggers. Checkpoints, with the hash of the state that replays need.
- `monitor`: the monitor, which is on by default, and its file. `monitor` is the ratio of both.
- `trackers`: the monitor and all trackers: CSV, JSON lines, TensorBoard, MLflow, W&B and Trackio. The servers of the last
  three are dead. `dead_tracker` compares this with `live`: the same trackers without these three. `trackers` compares it
  with `off`.
- Lightning: bare, and with its `SimpleProfiler`, CSV and TensorBoard.

A step of the CNN depends on where its tensors are in memory: two processes with the same loop differ by 7%. So all turns of
the CNN are in one process, which trains one module with one optimizer (`in_one_process.py`). Only the monitor and its file
differ. What trackers cost doesn't depend on the model.

The advice is tried by `tests/monitoring/test_advice.py`, which has a training that is slow in one way for each rule.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    CPU_STEP,
    QUICK_ROUNDS,
    WALL_STEP,
    Figures,
    Ratio,
    arguments,
    let_torchvision_be_imported,
    machine,
    median,
    ratio,
    report,
)
from in_one_process import Turn, measure_in_one_process, paired
from step_overhead import STEPS, measure
from step_variants import CHECKPOINT_EVERY, OFF, network, optimizer
from torch import nn

ROUNDS = 20
# A turn of the CNN takes some two seconds: the monitor times one step in it, and examines another one.
CNN_STEPS, CNN_ROUNDS = 200, 80
LIMIT = 1.02
DEAD = "http://127.0.0.1:9"
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}


class Images(nn.Module):
    """A CNN on images of 32 × 32 that are outer products of a row's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x[:, :, None] * x[:, None, :])[:, None])


def module(base: Any, make: Callable[[], nn.Module] = network) -> Any:
    """The same module for Footplate and Lightning. It logs two metrics, and keeps its optimizer."""
    torch.manual_seed(0)

    class Logs(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            self.made = optimizer(self)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss)
            self.log("loss_again", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.made

    return Logs()


def footplate(monitor: bool, trackers: str, batches: Any, directory: Path) -> None:
    import footplate as fp

    loggers: list[Any] = []
    if trackers == "file":
        loggers = [fp.CSV()]
    if trackers in ("live", "dead"):
        loggers = [fp.CSV(), fp.JSONLines(), fp.TensorBoard()]
    if trackers == "dead":
        os.environ |= {"WANDB_BASE_URL": DEAD, "WANDB_API_KEY": "0" * 40}
        loggers += [fp.MLflow("overhead", tracking_uri=DEAD, log_model=False), fp.WandB("overhead")]
        loggers += [fp.Trackio("overhead", server_url=f"{DEAD}/?write_token=0")]
    trainer = fp.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=loggers or False,
        enable_monitor=monitor,
        callbacks=fp.ModelCheckpoint(every_n_train_steps=CHECKPOINT_EVERY),
        default_root_dir=directory / "run",
        **QUIET,
    )
    trainer.fit(module(fp.Module), batches)


def lightning(observed: bool, batches: Any, directory: Path) -> None:
    let_torchvision_be_imported()
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    settings: dict[str, Any] = {**OFF}
    if observed:
        settings |= {"logger": [CSVLogger(directory), TensorBoardLogger(directory)], "profiler": "simple"}
    settings |= {
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(dirpath=directory / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY)],
    }
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=directory, **settings)
    trainer.fit(module(pl.LightningModule), batches)


LOOPS: dict[str, Callable[[Any, Path], None]] = {
    "off": functools.partial(footplate, False, "none"),
    "off again": functools.partial(footplate, False, "none"),
    "monitor": functools.partial(footplate, True, "none"),
    "monitor and file": functools.partial(footplate, True, "file"),
    "live trackers": functools.partial(footplate, True, "live"),
    "dead trackers": functools.partial(footplate, True, "dead"),
    "lightning bare": functools.partial(lightning, False),
    "lightning observed": functools.partial(lightning, True),
}
RATIOS = {
    "noise": ("off again", "off"),
    "monitor": ("monitor", "off"),
    "monitor_and_file": ("monitor and file", "off"),
}


def cnn_turns() -> dict[str, Turn]:
    """The turns of the CNN: `fit` of one module, with the monitor off or on."""
    import footplate as fp

    images = module(fp.Module, Images)

    def turn(monitor: bool, file: bool) -> Turn:
        def train(batches: Any, directory: Path) -> None:
            trainer = fp.Trainer(
                accelerator="cpu", max_epochs=1, logger=fp.CSV() if file else False, enable_monitor=monitor,
                enable_checkpointing=False, default_root_dir=directory, **QUIET,
            )  # fmt: skip
            trainer.fit(images, batches)

        return train

    return {
        "off": turn(False, False),
        "off again": turn(False, False),
        "monitor": turn(True, False),
        "monitor and file": turn(True, True),
    }


def try_advice() -> dict[str, int]:
    """Run the trainings that are slow in one way each. Return how many there are, and how many got the right advice."""
    tests = Path(__file__).parent.parent / "tests" / "monitoring" / "test_advice.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tests.parent.parent.parent, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", ended.stdout)}
    return {"advice_cases": sum(counts.values()), "advice_right": counts.get("passed", 0)}


def verdict(spread: Ratio) -> str:
    """Say if a ratio is below the limit: the interval of its median must be on one side."""
    if spread["high"] <= LIMIT:
        return "met"
    return "missed" if spread["low"] > LIMIT else "undecided"


def main() -> None:
    options = arguments("What the monitor and the trackers cost")
    os.environ.update(OMP_NUM_THREADS="1", TERM="xterm-256color", COLUMNS="120", LINES="24")
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")
    host = machine()
    results: dict[str, dict[str, list[Figures]]] = {}
    if options.quick:
        # A checkpoint falls into the middle of the turn.
        results["mlp"] = measure(LOOPS, QUICK_ROUNDS, 20, 0.0, quick=True, warm_up_steps=CHECKPOINT_EVERY - 10)
        results["cnn"] = measure_in_one_process(cnn_turns(), QUICK_ROUNDS, 20)
    else:
        results["mlp"] = measure(LOOPS, ROUNDS, STEPS, 10.0)
        results["cnn"] = measure_in_one_process(cnn_turns(), CNN_ROUNDS, CNN_STEPS)

    found = results["mlp"]
    ratios = {name: ratio(found, *pair, "cpu_us", CPU_STEP) for name, pair in RATIOS.items()}
    ratios |= {
        "dead_tracker": ratio(found, "dead trackers", "live trackers", "cpu_us", CPU_STEP),
        "wall_dead_tracker": ratio(found, "dead trackers", "live trackers", "wall_us", WALL_STEP),
        "trackers": ratio(found, "dead trackers", "off", "cpu_us", CPU_STEP),
        "lightning_observed": ratio(found, "lightning observed", "lightning bare", "cpu_us", CPU_STEP),
    }
    ratios |= {f"cnn_{name}": paired(results["cnn"], *pair, "cpu_us", CPU_STEP) for name, pair in RATIOS.items()}
    rows = [
        {
            "name": f"{kind}: {name}",
            "cpu_us": median(runs, "cpu_us"),
            "vs_off": ratio(found, name, "off", "cpu_us", CPU_STEP)["median"],
            "wall_us": median(runs, "wall_us"),
            "children_cpu_us": statistics.fmean(run.get("children_cpu_us", 0.0) for run in runs),
            "rounds": runs,
        }
        for kind, found in results.items()
        for name, runs in found.items()
    ]
    columns = {
        "cpu_us": "CPU µs/step",
        "vs_off": "× off",
        "wall_us": "wall µs/step",
        "children_cpu_us": "CPU of children",
    }
    advice = {} if options.quick else try_advice()
    clock = {"clock": "CPU time of the training process, all threads"}
    report(
        "monitor_overhead", f"{STEPS} steps of a tiny MLP a turn, {CNN_STEPS} of a CNN", columns, rows, ratios,
        {**advice, **clock, "cnn_verdict": verdict(ratios["cnn_monitor"])}, host,
        ("torch", "footplate", "lightning", "mlflow", "wandb", "trackio"), options.json,
    )  # fmt: skip
    for name in ("cnn_noise", "cnn_monitor", "cnn_monitor_and_file"):
        print(f"{name}: the median is in {ratios[name]['low']:.4f} … {ratios[name]['high']:.4f} (95%)")
    print(f"cnn_monitor, limit {LIMIT}: {verdict(ratios['cnn_monitor'])}")


if __name__ == "__main__":
    main()
