"""Time of a step on two devices: as threads of one process (`strategy="replicas"`), or as two processes.

    python benchmarks/replicas.py --json benchmarks/results/replicas.json

There are three models on the CPU. The steps of the first are nearly all Python; those of the last are nearly all
arithmetic. The global batch is the same for all entrants. A "device" is one thread of torch. Two single processes run
beside them, with one thread of torch and with two; two threads are torch's own way to spread a step over cores. The figure
is the wall time of steady steps, by the clock of the first rank.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import QUICK_ROUNDS, WALL_STEP, Figures, Ratio, arguments, interleave, machine, median, ratio, report

ROUNDS = 7
WARM_UP, QUICK_WARM_UP = 10, 1  # steps before the clock starts
QUICK_SHARE = 40  # a quick run takes a fortieth of the steps, and at least three
ENTRANTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, two threads of torch": {"threads": 2},
    "two replicas": {"devices": 2, "strategy": "replicas"},
    "two processes (ddp)": {"devices": 2},
}


def tiny() -> tuple[Any, tuple[int, ...]]:
    from torch import nn

    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)), (64, 32)


def wide() -> tuple[Any, tuple[int, ...]]:
    from torch import nn

    layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers), (256, 256)


def convolutional() -> tuple[Any, tuple[int, ...]]:
    from torch import nn

    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), (64, 3, 64, 64)


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "tiny MLP, 64 rows": (tiny, 400),
    "wide MLP (1.3 M parameters), 256 rows": (wide, 40),
    "convolutional net, 64 images": (convolutional, 15),
}


class Ready:
    """Yields the same batch repeatedly, split among ranks as a `footplate.data.Loader` splits it."""

    def __init__(self, shape: tuple[int, ...], steps: int, ranks: int) -> None:
        import torch

        self._batch = (torch.randn(shape[0] // ranks, *shape[1:]), torch.arange(shape[0] // ranks) % 10)
        self._steps, self._rows, self._ranks, self._yielded = steps, shape[0], ranks, 0
        self.global_batch_size = shape[0]

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._steps):
            self._yielded += 1
            yield self._batch

    def rank_rows(self, batch: int) -> int:
        return self._rows // self._ranks

    def batch_rows(self, batch: int) -> int:
        return self._rows

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def measure(
    model: Callable[[], Any], steps: int, warm_up: int, devices: int = 1, strategy: str = "auto", threads: int = 1
) -> Figures:
    """Milliseconds per step of a training, without its first steps."""
    import torch
    import torch.nn.functional as F

    import footplate as fp

    class Stopwatch(fp.Callback):
        began = ended = 0.0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 == warm_up:
                self.began = time.perf_counter()
            self.ended = time.perf_counter()

    class Trained(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()[0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.set_num_threads(threads)
    watch = Stopwatch()
    ranks = devices if strategy == "auto" else 1
    with tempfile.TemporaryDirectory() as directory:
        fp.Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, callbacks=watch, seed=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory,
        ).fit(Trained(), Ready(model()[1], steps + warm_up, ranks))  # fmt: skip
    return {"wall_ms": (watch.ended - watch.began) / steps * 1e3}


def main() -> None:
    options = arguments("Time of a step on two devices: replicas, or two processes")
    os.environ["OMP_NUM_THREADS"] = "1"
    host = machine()
    rounds, warm_up = (QUICK_ROUNDS, QUICK_WARM_UP) if options.quick else (ROUNDS, WARM_UP)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    for title, (model, steps) in MODELS.items():
        steps = max(3, steps // QUICK_SHARE) if options.quick else steps

        def turn(entrant: str, model: Callable[[], Any] = model, steps: int = steps) -> Figures:
            return measure(model, steps, warm_up, **ENTRANTS[entrant])

        results = interleave(list(ENTRANTS), turn, rounds)
        for entrant, runs in results.items():
            rows.append({
                "name": f"{model.__name__}: {entrant}",
                "model": title,
                "wall_ms": median(runs, "wall_ms"),
                "least_ms": min(run["wall_ms"] for run in runs),
                "vs_one": ratio(results, entrant, "one process", "wall_ms", WALL_STEP)["median"],
                "rounds": runs,
            })  # fmt: skip
        for name, of, against in (
            ("replicas_vs_ddp", "two replicas", "two processes (ddp)"),
            ("replicas_vs_one", "two replicas", "one process"),
            ("ddp_vs_one", "two processes (ddp)", "one process"),
        ):
            ratios[f"{model.__name__}_{name}"] = ratio(results, of, against, "wall_ms", WALL_STEP)
    columns = {"wall_ms": "ms/step", "least_ms": "least", "vs_one": "× one process"}
    report(
        "replicas", f"The same batch shared by two, medians of {rounds} rounds", columns, rows, ratios,
        {"clock": "wall time of steady steps"}, host, ("torch", "footplate"), options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
