"""Time that a training loop is blocked by a save.

    python benchmarks/checkpoint_stall.py --json benchmarks/results/checkpoint_stall.json

To run it in parts, measure one size after the other into the same file: `--size "400 MB"`, `--size "2 GB"`. Add
`--only footplate lightning` for the two entrants that the goals compare; this takes eight minutes.

The state is the weights and the two moments of Adam, all float32: 400 MB, and 2 GB. In every round each entrant has a turn,
in a fresh process with one torch thread:

1. It trains a step, and copies the state into memory that was touched before. `memcpy_s` is the time of this copy, the
   least that any snapshot costs.
2. It saves once to warm up. `first_s` is the time of this save, which touches pages of memory for the first time.
3. It saves several more times. `blocked_s` is the median time from the end of a step to the moment at which the next step
   could begin. The process waits for each save to finish before the next step; the clock doesn't count this wait.

`stall_vs_memcpy` is `blocked_s` over `memcpy_s` within one process.

`step_while_writing` compares steps of matrix products on one thread: their time while Footplate's thread writes, over their
time just before. With fewer than two idle cores, this measures the machine.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from common import (
    LESS,
    QUICK_ROUNDS,
    WALL_STEP,
    Figures,
    Ratio,
    Rounds,
    arguments_parser,
    interleave,
    let_torchvision_be_imported,
    machine,
    median,
    process_context,
    ratio,
    report,
    spread,
)

STALL = f"wall time for which training stands still at a save, {LESS}"
SIZES = {"400 MB": (1024, 32), "2 GB": (2048, 40)}  # width and number of square layers
# A quick run has a smaller state under the same name.
QUICK = {"400 MB": (256, 8)}
QUICK_WAYS = ("footplate", "lightning", "torch.save", "dcp.async_save")
ROUNDS = {"400 MB": 3, "2 GB": 3}
SAVES = 3


class Stalls:
    """Durations of several saves, and of a plain copy of the same state before them."""

    def __init__(self) -> None:
        self.blocked_s: list[float] = []
        self.memcpy_s = 0.0
        self.write_s = 0.0
        self.slowdown = 0.0

    def time(self, save: Callable[[], Any], wait: Callable[[], Any]) -> None:
        """Time `save`, then wait until its thread or process has finished."""
        begun = time.perf_counter()
        save()
        ended = time.perf_counter()
        wait()
        self.blocked_s.append(ended - begun)
        self.write_s = time.perf_counter() - begun

    def copy(self, tensors: list[Any]) -> None:
        """Time a copy of the state into memory that was touched before."""
        import torch

        kept = [torch.zeros_like(tensor) for tensor in tensors]
        times = []
        for _ in range(SAVES):
            begun = time.perf_counter()
            torch._foreach_copy_(kept, tensors)
            times.append(time.perf_counter() - begun)
        self.memcpy_s = statistics.median(times)

    def figures(self) -> Figures:
        figures = {
            "blocked_s": statistics.median(self.blocked_s[1:]),
            "first_s": self.blocked_s[0],
            "memcpy_s": self.memcpy_s,
            "write_s": self.write_s,
        }
        figures["vs_memcpy"] = figures["blocked_s"] / figures["memcpy_s"]
        return figures | ({"slowdown": self.slowdown} if self.slowdown else {})


def layers(width: int, count: int) -> Any:
    import torch

    return torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))


def regularise(module: Any) -> Any:
    """A loss that reaches every parameter and needs no data."""
    return sum(parameter.square().sum() for parameter in module.parameters()) * 1e-6


def tensors_of(module: Any, optimizer: Any) -> list[Any]:
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return [*(parameter.detach() for parameter in module.parameters()), *moments]


def trained(base: type, stalls: Stalls, width: int, count: int) -> Any:
    """A trainer's module with these layers."""
    import torch

    class Layers(base):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(width, count)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return regularise(self)

        def configure_optimizers(self) -> Any:
            self.adam = torch.optim.Adam(self.parameters(), lr=1e-3)
            return self.adam

    return Layers()


def timed(base: type, stalls: Stalls, wait: Callable[[Any], Any], **settings: Any) -> Any:
    """The trainer's own ModelCheckpoint with a timer. It saves after every step."""

    class Timed(base):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            if not stalls.blocked_s:
                stalls.copy(tensors_of(pl_module, pl_module.adam))
            save = super().on_train_batch_end
            stalls.time(lambda: save(trainer, pl_module, *rest), lambda: wait(trainer))

    return Timed(every_n_train_steps=1, **settings)


def footplate(stalls: Stalls, directory: Path, width: int, count: int, saves: int) -> None:
    import footplate as fp

    saver = timed(fp.ModelCheckpoint, stalls, lambda trainer: trainer.run.writer.wait(), dirpath=directory)
    module = trained(fp.Module, stalls, width, count)
    trainer = fp.Trainer(
        accelerator="cpu", max_steps=saves, max_epochs=-1, callbacks=[saver], logger=False, default_root_dir=directory,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, [0] * saves)
    stalls.slowdown = slowdown(trainer, directory, stalls.write_s)


def slowdown(trainer: Any, directory: Path, write_s: float) -> float:
    """Median step while a checkpoint is written, over the median step without writing."""
    import torch

    matrix = torch.randn(384, 384)

    def steps(goes_on: Callable[[], bool]) -> list[float]:
        times = []
        while goes_on():
            begun = time.perf_counter()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter() - begun)
        return times

    quotients = []
    for number in range(SAVES):
        end = time.perf_counter() + max(write_s, 0.2)
        alone = steps(lambda end=end: time.perf_counter() < end)
        trainer.write_checkpoint(directory / f"slow-{number}.ckpt")
        writing = trainer.run.writer._writing
        beside = steps(lambda writing=writing: not writing.done())
        trainer.run.writer.wait()
        if beside:
            quotients.append(statistics.median(beside) / statistics.median(alone))
    return statistics.median(quotients) if quotients else 1.0


def lightning(stalls: Stalls, directory: Path, width: int, count: int, saves: int, **settings: Any) -> None:
    let_torchvision_be_imported()
    import logging
    import warnings

    import lightning.pytorch as pl
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    asynchronous = settings.pop("asynchronous", False)

    def wait(trainer: Any) -> None:
        if asynchronous:
            trainer.strategy.checkpoint_io._executor.submit(lambda: None).result()

    saver = timed(pl.callbacks.ModelCheckpoint, stalls, wait, dirpath=directory, **settings)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=saves, max_epochs=-1, callbacks=[saver], logger=False, default_root_dir=directory,
        enable_progress_bar=False, enable_model_summary=False, plugins=[AsyncCheckpointIO()] if asynchronous else [],
    )  # fmt: skip
    trainer.fit(trained(pl.LightningModule, stalls, width, count), [0] * saves)


def bare(
    stalls: Stalls, directory: Path, width: int, count: int, saves: int, save: Callable[[dict[str, Any], Path], Any]
) -> None:
    """Run a loop without a trainer. `save` returns a function that waits for the save."""
    import torch

    module = layers(width, count)
    adam = torch.optim.Adam(module.parameters(), lr=1e-3)
    for number in range(saves):
        adam.zero_grad()
        regularise(module).backward()
        adam.step()
        if not number:
            stalls.copy(tensors_of(module, adam))
        path = directory / str(number)
        waiting: list[Callable[[], Any]] = []
        stalls.time(
            lambda path=path, waiting=waiting: waiting.append(
                save({"model": module.state_dict(), "optimizer": adam.state_dict()}, path)
            ),
            lambda waiting=waiting: waiting[0](),
        )


def torch_save(state: dict[str, Any], path: Path) -> Callable[[], Any]:
    import torch

    torch.save(state, path)
    return lambda: None


def async_save(state: dict[str, Any], path: Path) -> Callable[[], Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    writing = dcp.async_save(state, checkpoint_id=str(path))
    return writing.result  # type: ignore[union-attr]


WAYS: dict[str, Callable[..., None]] = {
    "footplate": footplate,
    "lightning": lightning,
    "lightning save_last=True": lambda *arguments: lightning(*arguments, save_last=True),
    "lightning AsyncCheckpointIO": lambda *arguments: lightning(*arguments, asynchronous=True),
    "torch.save": lambda *arguments: bare(*arguments, torch_save),
    "dcp.async_save": lambda *arguments: bare(*arguments, async_save),
}


def take_turn(name: str, connection: Connection, width: int, count: int, saves: int) -> None:
    """Run one turn in this process: train, save, report the times."""
    import torch

    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="footplate-bench-"))
    stalls = Stalls()
    try:
        WAYS[name](stalls, directory, width, count, saves)
        connection.send(stalls.figures())
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(name: str, width: int, count: int, quick: bool) -> Figures:
    """Run one turn in a new process."""
    receiving, sending = Pipe()
    context: Any = process_context(quick, "checkpoint_stall", "preloaded")
    process = context.Process(target=take_turn, args=(name, sending, width, count, SAVES + 1))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    except EOFError:
        raise SystemExit(f"{name} failed.") from None
    finally:
        process.join()


def main() -> None:
    parser = arguments_parser("Time that a training loop is blocked by a save")
    parser.add_argument("--size", choices=list(SIZES), help="size of the state; the file keeps the other size")
    parser.add_argument(
        "--only", nargs="+", choices=list(WAYS), help="ways of saving, at least those of Footplate and Lightning"
    )
    options = parser.parse_args()
    host = machine()
    results: dict[str, Rounds] = {}
    sizes = {size: shape for size, shape in (QUICK if options.quick else SIZES).items() if options.size in (None, size)}
    for size, (width, count) in sizes.items():
        results[size] = interleave(
            options.only or (QUICK_WAYS if options.quick else list(WAYS)),
            lambda name, width=width, count=count: measure(name, width, count, options.quick),
            QUICK_ROUNDS if options.quick else ROUNDS[size],
        )
    ratios: dict[str, Ratio] = {}
    for size, rounds in results.items():
        suffix = "" if size == "400 MB" else f"_{size.replace(' ', '')}"
        own = rounds["footplate"]
        ratios[f"stall_vs_memcpy{suffix}"] = spread(
            [run["vs_memcpy"] for run in own], "footplate", "a bare copy", STALL
        )
        ratios[f"stall_vs_lightning{suffix}"] = ratio(rounds, "footplate", "lightning", "blocked_s", STALL)
        ratios[f"step_while_writing{suffix}"] = spread(
            [run["slowdown"] for run in own], "footplate while it writes", "footplate otherwise", WALL_STEP
        )
    rows = [
        {
            "name": f"{size}: {name}",
            **{f"{figure}_ms": median(runs, f"{figure}_s") * 1e3 for figure in ("blocked", "first", "memcpy", "write")},
            "least_ms": min(run["blocked_s"] for run in runs) * 1e3,
            "most_ms": max(run["blocked_s"] for run in runs) * 1e3,
            "rounds": runs,
        }
        for size, rounds in results.items()
        for name, runs in rounds.items()
    ]
    report(
        "checkpoint_stall",
        "Milliseconds for which a save blocks training, medians",
        {
            "blocked_ms": "blocked", "least_ms": "least", "most_ms": "most", "first_ms": "first save",
            "memcpy_ms": "a bare copy", "write_ms": "until written",
        },
        rows,
        ratios,
        {"state_bytes": {size: 12 * count * width * (width + 1) for size, (width, count) in sizes.items()}},
        host,
        ("torch", "footplate", "lightning"),
        options.json,
        add=bool(options.size or options.only),
    )  # fmt: skip


if __name__ == "__main__":
    main()
