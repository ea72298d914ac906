"""One training with four ways of recovery, and one of them also compiled. `recovery.py` starts each as a job and kills it:

    python recovery_jobs.py footplate DIR WORLD
    python recovery_jobs.py compiled DIR WORLD
    torchrun --nproc-per-node WORLD --max-restarts 3 recovery_jobs.py lightning DIR WORLD
    torchrun --nproc-per-node WORLD --max-restarts 3 recovery_jobs.py bare DIR WORLD
    python recovery_jobs.py ray DIR WORLD

The training is a tiny model (32-64-10) with AdamW, data-parallel over gloo. Each step pauses for `STEP_S`. A checkpoint is
saved every `CHECKPOINT_EVERY` steps, and each job resumes from it as its own documentation says. After every step each rank
appends a line to `DIR/steps-RANK.log`: its process, the step, and the time on the machine's monotonic clock.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEP_S = 0.02
CHECKPOINT_EVERY = 10
STEPS = 5000  # more than any job reaches
BATCH = 32
RESTARTS = 3


class Reports:
    """Appends a line for each step. Each line is one write, so that a killed process leaves only complete lines."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = os.open(directory / f"steps-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, step: int) -> None:
        os.write(self._file, f"{os.getpid()} {step} {time.monotonic()}\n".encode())


def make_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def make_data() -> Any:
    import torch
    from torch.utils.data import TensorDataset

    numbers = torch.Generator().manual_seed(0)
    rows = 500 * BATCH
    return TensorDataset(torch.randn(rows, 32, generator=numbers), torch.randint(0, 10, (rows,), generator=numbers))


def make_lightning_shaped(base: type, directory: Path) -> Any:
    """Make the same module for Footplate and for Lightning."""
    import torch
    import torch.nn.functional as F

    class Tiny(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.reports: Reports | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(STEP_S)
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            self.reports = self.reports or Reports(directory, self.trainer.global_rank)
            self.reports.step(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Tiny()


def footplate(directory: Path, world: int, compiles: bool = False) -> None:
    import torch
    from torch.utils.data import DataLoader

    import footplate as fp

    trainer = fp.Trainer(
        accelerator="cpu", devices=world, max_restarts=RESTARTS, max_steps=STEPS, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory / "run",
        callbacks=[fp.ModelCheckpoint(every_n_train_steps=CHECKPOINT_EVERY)],
    )  # fmt: skip
    loader = DataLoader(make_data(), BATCH, shuffle=True)
    module = make_lightning_shaped(fp.Module, directory)
    trainer.fit(torch.compile(module) if compiles else module, loader, ckpt_path="last")


def compiled(directory: Path, world: int) -> None:
    footplate(directory, world, compiles=True)


def lightning(directory: Path, world: int) -> None:
    from common import let_torchvision_be_imported
    from torch.utils.data import DataLoader

    let_torchvision_be_imported()
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(directory / "checkpoints", every_n_train_steps=CHECKPOINT_EVERY, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy="ddp", max_steps=STEPS, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory, callbacks=[saver],
    )  # fmt: skip
    loader = DataLoader(make_data(), BATCH, shuffle=True)
    trainer.fit(make_lightning_shaped(pl.LightningModule, directory), loader, ckpt_path="last")


def bare(directory: Path, world: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    file = directory / "checkpoint.pt"
    done = _load(file, model.module, optimizer) if file.exists() else 0
    reports = Reports(directory, rank)
    for step, batch in _steps(done, rank, world):
        _learn(model, optimizer, batch)
        if step % CHECKPOINT_EVERY == 0 and rank == 0:
            _save(file, model.module, optimizer, step)
        reports.step(step)


def ray(directory: Path, world: int) -> None:
    import ray
    from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def train() -> None:
        import torch
        from ray import train
        from ray.train.torch import prepare_model

        rank = train.get_context().get_world_rank()
        model = prepare_model(make_model())
        inner = model.module if world > 1 else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        done = 0
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                done = _load(Path(folder) / "checkpoint.pt", inner, optimizer)
        reports = Reports(directory, rank)
        for step, batch in _steps(done, rank, world):
            _learn(model, optimizer, batch)
            if step % CHECKPOINT_EVERY == 0:
                with tempfile.TemporaryDirectory() as folder:
                    if rank == 0:
                        _save(Path(folder) / "checkpoint.pt", inner, optimizer, step)
                    train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
            reports.step(step)

    ray.init(num_cpus=world + 1, include_dashboard=False, log_to_driver=False, _temp_dir=str(directory / "ray"))
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=world),
        run_config=RunConfig(
            name="recovery", storage_path=str(directory), failure_config=FailureConfig(max_failures=RESTARTS)
        ),
    ).fit()


def _steps(done: int, rank: int, world: int) -> Any:
    """Numbered batches of a rank, from a given step on."""
    x, y = make_data().tensors
    for step in range(done + 1, STEPS + 1):
        start = ((step * world + rank) * BATCH) % len(x)
        yield step, (x[start : start + BATCH], y[start : start + BATCH])


def _learn(model: Any, optimizer: Any, batch: Any) -> None:
    import torch.nn.functional as F

    time.sleep(STEP_S)
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def _save(file: Path, model: Any, optimizer: Any, step: int) -> None:
    import torch

    temporary = file.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
    temporary.replace(file)


def _load(file: Path, model: Any, optimizer: Any) -> int:
    import torch

    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    name, directory, world = sys.argv[1:]
    jobs = {"footplate": footplate, "compiled": compiled, "lightning": lightning, "bare": bare, "ray": ray}
    jobs[name](Path(directory), int(world))
