"""Random runs, whose rows are named, whose steps are replayed, and whose flipped bits are located.

    python benchmarks/replay.py --json benchmarks/results/replay.json

Each run has a random model (dense or convolutional, with dropout and batch norm, several optimizers, precisions and
schedules), a random table (filter, split, deleted rows), accumulation, clipping, validation, and one to three attempts.
Every sixth run has two ranks. The module notes the ids, the losses and the gradients of each step.

    replays, replay_differs      steps of these runs, replayed; differing means that the batch, the loss or a gradient has
                                 another bit
    rows_named, rows_wrong       rows of all steps, named by `fp.rows`; a wrong one isn't the row that the module has seen
    flips, flips_located         runs in which a random bit of a random weight is flipped after a random step; located means
                                 that `fp.verify` names the stretch between the two checkpoints around it. A flip that
                                 rounding has removed without a trace (`flips_vanished`) is drawn again
    hash_s_per_gb                processor time of the hash of a state, in the thread that writes checkpoints
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import arguments_parser, machine, report
from deltalake import DeltaTable, write_deltalake

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint.format.state_hash import state_hash
from footplate.checkpoint.format.statefile import Snapshot

STEPS_OF_RUN = 12


class Net(fp.Module):
    """A small model that notes what it sees.

    Args:
        kind: "dense" or "convolutional".
        optimizer: "SGD", "AdamW" or "LBFGS".
        normalises: True for batch norm, which can't train on a batch of one row.
        directory: each rank writes the steps into a file of it.
    """

    def __init__(self, kind: str, optimizer: str, normalises: bool, directory: Path) -> None:
        super().__init__()
        self.kind, self.optimizer, self.directory = kind, optimizer, directory
        if kind == "dense":
            norm = torch.nn.BatchNorm1d(16) if normalises else torch.nn.LayerNorm(16)
            layers = [torch.nn.Linear(8, 16), norm, torch.nn.GELU(), torch.nn.Dropout(0.2)]
            self.net = torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))
        else:
            norm = torch.nn.BatchNorm1d(4) if normalises else torch.nn.GroupNorm(2, 4)
            layers = [torch.nn.Conv1d(1, 4, 3), norm, torch.nn.Tanh(), torch.nn.Dropout(0.2)]
            self.net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(24, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch["x"]
        return (self.net(x if self.kind == "dense" else x[:, None]).float() - batch["y"][:, None]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.note("batches", {"ids": batch["id"].tolist(), "loss": loss.item().hex()})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(
            "gradients", {name: digits(one.grad) for name, one in self.named_parameters() if one.grad is not None}
        )

    def note(self, name: str, value: Any) -> None:
        """Append a line to the file of this rank."""
        line = {"step": self.trainer.global_step + 1, name: value}
        with (self.directory / f"rank-{self.trainer.world.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def configure_optimizers(self) -> Any:
        if self.optimizer == "LBFGS":
            return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def digits(tensor: torch.Tensor) -> str:
    """The bytes of a tensor, as text."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


class FlippedBit(fp.Callback):
    """A machine that flips one bit of a weight after a step."""

    def __init__(self, step: int, index: int, bit: int) -> None:
        self.step, self.index, self.bit = step, index, bit
        self.done = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step or self.done:
            return
        self.done, index = True, self.index
        for parameter in pl_module.parameters():
            if index < parameter.numel():
                bits = parameter.detach().view(-1).view(torch.int32)
                bits[index] ^= -(2**31) if self.bit == 31 else 1 << self.bit
                return
            index -= parameter.numel()


@dataclass
class Plan:
    """A random run: its directory, and functions that make its parts, the same each time."""

    directory: Path
    ranks: int
    settings: dict[str, Any]
    model: Callable[[Path], Net]
    table: fp.Table
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    @property
    def run(self) -> Path:
        return self.directory / "run"

    def program(self, notes: Path, *callbacks: fp.Callback, **settings: Any) -> tuple[Any, Any, Any, Any]:
        """Return trainer, model, and loaders of training and validation."""
        every = self.settings["save_every"]
        arguments = {name: value for name, value in self.settings.items() if name != "save_every"}
        trainer = fp.Trainer(
            **{**arguments, **settings},
            accelerator="cpu",
            devices=self.ranks,
            seed=self.seed,
            default_root_dir=self.run,
            callbacks=[*callbacks, fp.ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)],
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        notes.mkdir(exist_ok=True)
        data = fp.Loader(self.table, self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last, seed=self.seed)
        return trainer, self.model(notes), data, fp.Loader(self.table, self.batch_size)

    def seen(self, notes: Path) -> dict[int, list[dict[str, Any]]]:
        """Return for each step, and each rank, the ids, losses and gradients. A later attempt counts."""
        steps: dict[int, list[dict[str, Any]]] = {}
        for rank in range(self.ranks):
            of_rank: dict[int, dict[str, Any]] = defaultdict(lambda: {"batches": [], "gradients": {}})
            for line in (notes / f"rank-{rank}").read_text().splitlines():
                noted = json.loads(line)
                if "batches" in noted:
                    of_rank[noted["step"]]["batches"].append(noted["batches"])
                else:
                    of_rank[noted["step"]]["gradients"] = noted["gradients"]
            for step, value in of_rank.items():
                steps.setdefault(step, []).append(value)
        return {step: of_ranks for step, of_ranks in steps.items() if of_ranks[0]["gradients"]}


def make_plan(directory: Path, seed: int, ranks: int = 1) -> Plan:
    """Make a random run."""
    g = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    rows = int(g.integers(60, 140))
    columns = {
        "id": np.arange(rows),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(g.normal(size=rows * 8).astype(np.float32)), 8),
        "y": g.normal(size=rows).astype(np.float32),
    }
    path, whole = str(directory / "lake"), pa.table(columns)
    for start in range(0, rows, 30):
        write_deltalake(path, whole.slice(start, 30), mode="append")
    if g.random() < 0.5:
        DeltaTable(path).delete("id % 11 = 4")
    table = fp.Table(path, filter=[("id", "!=", 7)] if g.random() < 0.5 else None)
    if g.random() < 0.5:
        table = table.split({"train": 0.8}, key="id", seed=seed)["train"]
    # A later version of the table.
    write_deltalake(path, whole.slice(0, 5), mode="append")

    optimizer = str(g.choice(["SGD", "AdamW", "LBFGS"], p=[0.4, 0.45, 0.15]))
    kind = str(g.choice(["dense", "convolutional"]))
    settings = {
        "save_every": int(g.integers(2, 6)),
        "max_steps": STEPS_OF_RUN,
        "accumulate_grad_batches": int(g.integers(1, 4)),
        "gradient_clip_val": 0.5 if g.random() < 0.5 else None,
        "precision": "bf16-mixed" if g.random() < 0.3 and optimizer != "LBFGS" else None,
        "val_check_interval": 3 if g.random() < 0.3 else None,
    }

    batch_size, shuffle, drop_last = int(g.integers(4, 12)), bool(g.random() < 0.8), bool(g.random() < 0.5)

    def model(notes: Path) -> Net:
        torch.manual_seed(seed)
        return Net(kind, optimizer, drop_last, notes)

    return Plan(directory, ranks, settings, model, table, batch_size, shuffle, drop_last, seed)


def replay_run(directory: Path, seed: int, ranks: int, replays: int) -> dict[str, int]:
    """Train a random run, name the rows of all its steps, and replay some of them."""
    plan, g, notes = make_plan(directory, seed, ranks), np.random.default_rng([seed, 1]), directory / "notes"
    stops = sorted(g.choice(np.arange(1, STEPS_OF_RUN), int(g.integers(0, 3)), replace=False).tolist())
    for stop in [*stops, STEPS_OF_RUN]:
        trainer, model, data, validation = plan.program(notes, max_steps=stop)
        trainer.fit(model, data, validation, ckpt_path="last")
    seen = plan.seen(notes)

    counts: dict[str, int] = defaultdict(int)
    files: dict[str, list[int]] = {}
    for step, of_ranks in seen.items():
        named: dict[int, list[int]] = defaultdict(list)
        for row in fp.rows(plan.run, step).rows:
            if row.file not in files:
                files[row.file] = pq.read_table(row.file, columns=["id"])["id"].to_pylist()
            named[row.rank].append(files[row.file][row.row_in_file])
        for rank, of_rank in enumerate(of_ranks):
            # An optimizer with a closure sees the last batch several times.
            batches = list(dict.fromkeys(tuple(batch["ids"]) for batch in of_rank["batches"]))
            expected = [one for batch in batches for one in batch]
            counts["rows_named"] += len(expected)
            counts["rows_wrong"] += len(expected) if expected != named[rank] else 0

    again = directory / "again"
    for step in g.choice([*seen], min(replays, len(seen)), replace=False).tolist():
        found = fp.replay(plan.run, step, *plan.program(again))
        counts["replays"] += 1
        counts["replay_differs"] += not same(found, seen[step])
    return counts


def same(found: Any, of_ranks: list[dict[str, Any]]) -> bool:
    """Return True if a replay has the batches, losses and gradients that the run saw."""
    for rank, of_rank in enumerate(of_ranks):
        # The last evaluation of a batch counts, as for the optimizer.
        losses = {tuple(batch["ids"]): batch["loss"] for batch in of_rank["batches"]}
        pairs = zip(found.batches[rank], found.losses[rank], strict=True)
        if losses != {tuple(batch["id"].tolist()): loss.item().hex() for batch, loss in pairs}:
            return False
    return {name: digits(one) for name, one in found.gradients.items()} == of_ranks[0]["gradients"]


def flip_run(directory: Path, seed: int, draw: int = 0) -> tuple[bool, int]:
    """Train a random run with a flipped bit. Return True if the stretch of the flip is found, and how many flips vanished.

    A flip of a low bit may vanish: the next update of the weight rounds it away. Then the states are equal bit by bit, and
    another flip is drawn.
    """
    plan, g = make_plan(directory, seed), np.random.default_rng([seed, 2, draw])
    model = plan.model(directory)
    size = sum(parameter.numel() for parameter in model.parameters())
    flip = FlippedBit(int(g.integers(0, STEPS_OF_RUN)), int(g.integers(size)), int(g.integers(32)))
    trainer, model, data, validation = plan.program(directory / "notes", flip)
    trainer.fit(model, data, validation)

    found = fp.verify(plan.run, 0, None, *plan.program(directory / "again"))
    if found.steps is not None:
        first, last = found.steps
        return first <= flip.step + 1 <= last and last - first < plan.settings["save_every"], 0
    if not vanished(plan, directory / "twin"):
        return False, 0
    located, more = flip_run(directory / "next", seed, draw + 1)
    return located, more + 1


def vanished(plan: Plan, directory: Path) -> bool:
    """Return True if a run without the flip has the same bits in the weights and optimizers of every checkpoint."""
    twin = replace(plan, directory=directory)
    directory.mkdir()
    trainer, model, data, validation = twin.program(directory / "notes")
    trainer.fit(model, data, validation)
    paths = sorted((plan.run / "checkpoints").glob("epoch*.ckpt"))
    return all(bits_of(path) == bits_of(twin.run / "checkpoints" / path.name) for path in paths)


def bits_of(path: Path) -> dict[str, str]:
    """The bytes of all weights and of the optimizers' states in a checkpoint."""
    state = checkpoint.load(path)
    moments = {
        f"{index}.{name}": value
        for optimizer in state["optimizer_states"]
        for index, values in optimizer["state"].items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return {name: digits(value) for name, value in {**state["state_dict"], **moments}.items()}


def cost_of_hash(megabytes: int) -> float:
    """Return the processor time of a hash, in seconds for each GB."""
    count = megabytes // 4
    frozen = Snapshot().take({"state_dict": {f"layer.{number}": torch.randn(1 << 20) for number in range(count)}})
    rounds = []
    for _ in range(5):
        start = time.process_time()
        state_hash(frozen.tree, frozen.checksums())
        rounds.append(time.process_time() - start)
    return statistics.median(rounds) / (count * 4 * 2**20 / 1e9)


def main() -> None:
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--runs", type=int, default=36, help="random runs to replay")
    parser.add_argument("--replays", type=int, default=5, help="replayed steps of each run")
    parser.add_argument("--flips", type=int, default=100, help="runs with a flipped bit")
    parser.add_argument("--add", action="store_true", help="keep what is in the file and wasn't measured now")
    args = parser.parse_args()
    runs, replays, flips = (2, 2, 2) if args.quick else (args.runs, args.replays, args.flips)

    logging.getLogger("footplate").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tested, rows = machine(), []
    totals: dict[str, int] = defaultdict(int)
    for seed in range(runs):
        with tempfile.TemporaryDirectory() as directory:
            ranks = 2 if seed % 6 == 5 else 1
            counts = replay_run(Path(directory), seed, ranks, replays)
        rows.append({"name": f"run {seed}", "ranks": ranks, **{name: counts[name] for name in COUNTED}})
        for name in COUNTED:
            totals[name] += counts[name]

    figures: dict[str, Any] = {**totals}
    if flips:
        results = []
        for seed in range(1000, 1000 + flips):
            with tempfile.TemporaryDirectory() as directory:
                results.append((*flip_run(Path(directory) / "first", seed), seed))
        figures |= {"flips": flips, "flips_located": sum(located for located, *_ in results)}
        figures |= {"flips_vanished": sum(count for _, count, _ in results)}
        figures["flips_missed"] = [seed for located, _, seed in results if not located]
    figures["hash_s_per_gb"] = cost_of_hash(16 if args.quick else 400)
    columns = {"ranks": "ranks", **{name: name.replace("_", " ") for name in COUNTED}}
    title, packages = "Replays of random runs", ("torch", "footplate")
    report("replay", title, columns, rows, {}, figures, tested, packages, args.json, args.add)
    print(json.dumps(figures, indent=1))


COUNTED = ("rows_named", "rows_wrong", "replays", "replay_differs")

if __name__ == "__main__":
    main()
