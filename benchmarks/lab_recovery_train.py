"""A training for `lab_recovery.py`: plain DDP with a checkpoint each five steps. It runs under any launcher.

    python lab_recovery_train.py DIRECTORY         by footplate run or torchrun, whose variables it reads
    python lab_recovery_train.py DIRECTORY ray     a driver of Ray Train

Rank 0 appends the time of each step to `DIRECTORY/steps.txt`. Each rank writes its process id to `DIRECTORY/pid-RANK`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT_EVERY, STEPS = 5, 10_000
PAUSE_S = 0.1


def train(directory: Path) -> None:
    """Train in the process group that is there, until a file `end` is there, too."""
    rank = dist.get_rank()
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    saved, first = directory / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, STEPS):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends = torch.tensor(float((directory / "end").exists()))
        dist.all_reduce(ends)
        if ends:
            return
        if rank == 0:
            with (directory / "steps.txt").open("a") as file:
                file.write(f"{time.time()}\n")
            if (step + 1) % CHECKPOINT_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
        time.sleep(PAUSE_S)


def with_ray(directory: Path) -> None:
    """Train by Ray Train, with a rank on each of two machines."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def loop() -> None:
        sys.path.insert(0, "/mnt")
        import lab_recovery_train

        lab_recovery_train.train(directory)

    TorchTrainer(
        loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(storage_path=str(directory), failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    if "ray" in sys.argv:
        with_ray(place)
    else:
        dist.init_process_group("gloo")
        train(place)
