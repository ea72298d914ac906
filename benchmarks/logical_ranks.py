"""Logical ranks: do resized trainings give the bits of uninterrupted ones, and what does a step cost?

    python benchmarks/logical_ranks.py --json benchmarks/results/logical_ranks.json

**Bits.** A small model with dropout, batch norm and augmentation is trained with 8 logical ranks on a random number of
processes. At a random step all processes are killed, and a random number of processes continues, four times in each
training. In the end, each weight is compared with that of an uninterrupted training on one process. `figures.differs`
counts the resizes of trainings in which any bit differs.

**Cost.** Two processes train with 8 logical ranks, and two others with plain DDP and the same global batches. The two
pairs take turns of some steps, as in `ddp_overhead.py`. Ratios compare the processor time of both processes with all their
threads, and the wall time of a turn. A wide MLP, where a logical rank has few rows for many weights, shows the cost of more
gradients; a small convolutional network shows a model that computes more for each weight.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from common import (
    CPU_STEP,
    QUICK_ROUNDS,
    WALL_STEP,
    Figures,
    arguments_parser,
    interleave,
    machine,
    process_context,
    ratio,
    report,
    row,
)
from ddp_overhead import free_port

TOTAL = 8
PRELOAD = ("torch._dynamo", "torch.distributed", "footplate.training.trainer", "footplate.checkpoint")
RESIZES = 100
RESIZES_EACH = 4
STEPS = 30
PROCESSES = 2
ROUNDS = 20
MODELS = {"conv": ("convolutional", 256, 4), "mlp": ("wide MLP", 512, 4)}  # global batch, steps of a turn
PLAIN, LOGICAL = "plain DDP", "8 logical ranks"


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of torchrun."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


# Bits


def train(root: str, variables: dict[str, str], end_at: int, result: Connection | None) -> None:
    """Continue the training in a directory. All processes are killed after a batch; in the end, send the weights."""
    os.environ.update(variables)
    import torch
    import torch.nn.functional as F
    from torch import nn

    import footplate as fp

    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(0)
            self.inputs = torch.randn(260, 8, generator=generator)
            self.labels = torch.randint(0, 3, (260,), generator=generator)

        def __len__(self) -> int:
            return len(self.inputs)

        def __getitem__(self, index: int) -> Any:
            return self.inputs[index] + 0.1 * torch.randn(8), self.labels[index]

    class Classifier(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Kill(fp.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.progress.batches == end_at:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = Classifier()
    trainer = fp.Trainer(
        accelerator="cpu", devices=int(variables["WORLD_SIZE"]), logical_ranks=TOTAL, max_steps=STEPS, seed=1,
        gradient_clip_val=0.5, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_monitor=False, default_root_dir=root,
        callbacks=[Kill(), fp.ModelCheckpoint(every_n_train_steps=2)],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(Rows(), 3, shuffle=True), ckpt_path="last")
    if result is not None:
        # numpy's bytes tell 0.0 from -0.0.
        result.send({name: value.numpy().tobytes() for name, value in model.state_dict().items()})


def run_segment(context: BaseContext, root: Path, size: int, end_at: int) -> dict[str, bytes] | None:
    """Train on a number of processes until they are killed. Return the weights of a training that has ended."""
    receiving, sending = context.Pipe(duplex=False)
    port = free_port()
    processes = [
        context.Process(  # type: ignore[attr-defined]
            target=train, args=(str(root), environment(rank, size, port), end_at, sending if rank == 0 else None)
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    sending.close()
    for process in processes:
        process.join()
    if end_at > STEPS:
        return receiving.recv()
    statuses = [process.exitcode for process in processes]
    if -signal.SIGKILL not in statuses:
        raise RuntimeError(f"{size} processes ended with {statuses} before batch {end_at}")
    return None


def count_different(resizes: int, draw: random.Random) -> tuple[int, int]:
    """Return how many resizes were made, and how many of them are in trainings with another result."""
    context = process_context(True, *PRELOAD)
    with tempfile.TemporaryDirectory() as directory:
        expected = run_segment(context, Path(directory) / "whole", 1, STEPS + 1)
        made = differs = 0
        while made < resizes:
            count = min(RESIZES_EACH, resizes - made)
            ends = [*sorted(draw.sample(range(1, STEPS), count)), STEPS + 1]
            size, weights = draw.randint(1, TOTAL), None
            for end_at in ends:
                weights = run_segment(context, Path(directory) / f"run-{made}", size, end_at)
                size = draw.choice([other for other in range(1, TOTAL + 1) if other != size])
            made += count
            differs += 0 if weights == expected else count
    return made, differs


# Cost


def steps_in_turns(
    model: str, logical: bool, turns: int, quick: bool, variables: dict[str, str], pipe: Connection
) -> None:
    """Train in turns: wait for a message before each turn, and send the clocks at both of its ends."""
    os.environ.update(variables)
    import torch
    import torch.nn.functional as F
    from torch import nn

    import footplate as fp

    torch.set_num_threads(1)
    _, rows, steps = MODELS[model]
    if quick:
        rows, steps = 16, 2

    class Model(fp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = (
                nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
                if model == "mlp"
                else nn.Sequential(
                    nn.Conv2d(3, 32, 3, padding=1),
                    nn.BatchNorm2d(32),
                    nn.ReLU(),
                    nn.Conv2d(32, 64, 3, stride=2, padding=1),
                    nn.BatchNorm2d(64),
                    nn.ReLU(),
                    nn.Conv2d(64, 128, 3, stride=2, padding=1),
                    nn.BatchNorm2d(128),
                    nn.ReLU(),
                    nn.AdaptiveAvgPool2d(1),
                    nn.Flatten(),
                    nn.Linear(128, 10),
                )
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    class Turns(fp.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.progress.batches % steps == 0:
                pipe.send((time.perf_counter(), time.process_time()))
                pipe.recv()
                pipe.send((time.perf_counter(), time.process_time()))

    count = rows * 4
    inputs = torch.randn(count, 512) if model == "mlp" else torch.randn(count, 3, 32, 32)
    data = torch.utils.data.TensorDataset(inputs, torch.randint(0, 10, (count,)))
    ranks = TOTAL if logical else PROCESSES
    loader = torch.utils.data.DataLoader(data, rows // ranks, shuffle=True)
    trainer = fp.Trainer(
        accelerator="cpu", devices=PROCESSES, logical_ranks=TOTAL if logical else None, max_steps=steps * (turns + 1),
        max_epochs=-1, seed=1, logger=False, callbacks=[Turns()], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, enable_monitor=False,
        default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    trainer.fit(Model(), loader)


class Pair:
    """The two processes of one entrant."""

    def __init__(self, context: BaseContext, model: str, logical: bool, turns: int, quick: bool) -> None:
        port = free_port()
        self._pipes, self._processes = [], []
        self._steps = 2 if quick else MODELS[model][2]
        for rank in range(PROCESSES):
            own, other = context.Pipe()
            process = context.Process(  # type: ignore[attr-defined]
                target=steps_in_turns,
                args=(model, logical, turns, quick, environment(rank, PROCESSES, port), other),
            )
            process.start()
            self._pipes.append(own)
            self._processes.append(process)
        # The first turn is the warm-up.
        self._ends = [pipe.recv() for pipe in self._pipes]

    def turn(self) -> Figures:
        """Make the steps of a turn. Return microseconds of a step."""
        for pipe in self._pipes:
            pipe.send(None)
        begins = [pipe.recv() for pipe in self._pipes]
        ends = [pipe.recv() for pipe in self._pipes]
        wall_s = max(wall for wall, _ in ends) - min(wall for wall, _ in begins)
        cpu_s = sum(end - begin for (_, begin), (_, end) in zip(begins, ends, strict=True)) / PROCESSES
        return {"cpu_us": cpu_s / self._steps * 1e6, "wall_us": wall_s / self._steps * 1e6}

    def join(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def measure(model: str, rounds: int, quick: bool) -> dict[str, list[Figures]]:
    """Let plain DDP and logical ranks take turns."""
    context = process_context(quick, *PRELOAD)
    pairs = {name: Pair(context, model, name == LOGICAL, rounds, quick) for name in (PLAIN, LOGICAL)}
    results = interleave(list(pairs), lambda name: pairs[name].turn(), rounds)
    for pair in pairs.values():
        pair.join()
    return {f"{name}, {MODELS[model][0]}": runs for name, runs in results.items()}


def main() -> None:
    parser: argparse.ArgumentParser = arguments_parser("Bits and cost of logical ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the random resizes")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1")
    host = machine()
    rounds, resizes = (QUICK_ROUNDS, 2) if options.quick else (ROUNDS, RESIZES)

    results: dict[str, list[Figures]] = {}
    ratios = {}
    for model, (title, _, _) in MODELS.items():
        results |= measure(model, rounds, options.quick)
        suffix = "" if model == "conv" else f"_{model}"
        over, under = f"{LOGICAL}, {title}", f"{PLAIN}, {title}"
        ratios[f"step{suffix}"] = ratio(results, over, under, "cpu_us", CPU_STEP)
        ratios[f"wall_step{suffix}"] = ratio(results, over, under, "wall_us", WALL_STEP)
    made, differs = count_different(resizes, random.Random(options.seed))

    rows = [row(name, runs) for name, runs in results.items()]
    figures = {"resizes": made, "differs": differs, "processes": PROCESSES, "seed": options.seed}
    report(
        "logical_ranks", f"A step on {PROCESSES} processes, medians of {rounds} rounds",
        {"cpu_us": "CPU µs/step", "wall_us": "wall µs/step"}, rows, ratios, figures, host, ("torch", "footplate"),
        options.json,
    )  # fmt: skip
    print(f"{differs} of {made} resizes differ from an uninterrupted training.")


if __name__ == "__main__":
    main()
