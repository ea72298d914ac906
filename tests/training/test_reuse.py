"""`Trainer(devices=N)` after the loss of a rank: the other ranks go on in their processes, with the same bits."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate.launch import worker
from footplate.training.reuse import TorchState


class Records(fp.Callback):
    """Writes the process and the loss of each batch. Calls `act` after each batch."""

    def __init__(self, directory: Path, act: Callable[[fp.Trainer], None] | None = None) -> None:
        self.directory, self.act = directory, act

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        record = {"attempt": worker.attempt(), "pid": os.getpid(), "batch": trainer.progress.batches}
        with (self.directory / f"rank-{trainer.world.rank}").open("a") as file:
            file.write(json.dumps({**record, "loss": float(outputs).hex()}) + "\n")
        if self.act is not None:
            self.act(trainer)


class KillsRank:
    """Kills a rank after its ninth batch, in each of some attempts."""

    def __init__(self, rank: int, attempts: int = 1, before: Callable[[], None] | None = None) -> None:
        self.rank, self.attempts, self.before = rank, attempts, before

    def __call__(self, trainer: fp.Trainer) -> None:
        if worker.attempt() < self.attempts and trainer.progress.batches == 9:
            if trainer.world.rank == self.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.before is not None:
                self.before()


def records(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"rank-{rank}").read_text().splitlines()]


def pids(directory: Path, rank: int) -> set[int]:
    return {record["pid"] for record in records(directory, rank)}


def losses(directory: Path, ranks: int) -> list[dict[int, set[str]]]:
    """For each rank, the losses of each batch in all attempts."""
    of_ranks: list[dict[int, set[str]]] = [{} for _ in range(ranks)]
    for rank, of_rank in enumerate(of_ranks):
        for record in records(directory, rank):
            of_rank.setdefault(record["batch"], set()).add(record["loss"])
    return of_ranks


@pytest.fixture
def fit(make_trainer, tmp_path):
    """A function that trains in several ranks; it returns the directory of the records, and the final weights."""

    def run(name: str, act=None, model=None, data=None, **options: Any) -> tuple[Path, list[torch.Tensor]]:
        directory = tmp_path / name
        directory.mkdir()
        saver = fp.ModelCheckpoint(every_n_train_steps=options.pop("every", 3))
        arguments = {"devices": 2, "max_epochs": 3, "default_root_dir": directory / "run", **options}
        trainer = make_trainer(callbacks=[Records(directory, act), saver], **arguments)
        torch.manual_seed(3)
        model = model() if model is not None else Classifier()
        trainer.fit(model, data() if data is not None else loader(batch_size=5))
        return directory, [parameter.detach() for parameter in model.parameters()]

    return run


def compiled() -> Any:
    return torch.compile(Classifier(), backend="aot_eager")


def with_workers() -> Any:
    return loader(batch_size=5, num_workers=1)


CASES: dict[str, dict[str, Any]] = {
    "three ranks": {"devices": 3},
    "logical ranks": {"logical_ranks": 4},
    "compiled": {"model": compiled},
    "loader workers": {"data": with_workers},
    "a checkpoint at each step": {"every": 1},
    "accumulation, clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_other_ranks_keep_their_processes_and_no_bit_differs(case, fit):
    ranks = CASES[case].get("devices", 2)
    whole, expected = fit("whole", **CASES[case])
    cut, weights = fit("cut", KillsRank(1), **CASES[case])

    kept = [rank for rank in range(ranks) if rank != 1]
    assert [len(pids(cut, rank)) for rank in kept] == [1 for _ in kept]
    assert len(pids(cut, 1)) == 2
    assert losses(cut, ranks) == losses(whole, ranks)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
def test_ranks_of_a_sharded_training_get_new_processes(fit):
    whole, expected = fit("whole", strategy="fsdp")
    cut, weights = fit("cut", KillsRank(1), strategy="fsdp")
    assert len(pids(cut, 0)) == 2
    assert losses(cut, 2) == losses(whole, 2)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
def test_rank_0_is_replaced_and_its_log_goes_on(fit):
    whole, expected = fit("whole", logger=fp.CSV())
    cut, weights = fit("cut", KillsRank(0), logger=fp.CSV())
    assert (len(pids(cut, 0)), len(pids(cut, 1))) == (2, 1)
    assert losses(cut, 2) == losses(whole, 2)
    assert all(map(torch.equal, weights, expected))
    assert rows(cut) == rows(whole)


@pytest.mark.slow
def test_a_kept_rank_0_goes_on_with_its_log(fit):
    whole, _ = fit("whole", logger=fp.CSV())
    cut, _ = fit("cut", KillsRank(1, attempts=3), logger=fp.CSV())
    assert (len(pids(cut, 0)), len(pids(cut, 1))) == (1, 4)
    assert rows(cut) == rows(whole)


def rows(directory: Path) -> list[dict[str, str]]:
    """The metrics of a run, without those of the clock."""
    (file,) = (directory / "run").rglob("metrics.csv")
    with file.open() as lines:
        return [
            {k: v for k, v in row.items() if "_per_second" not in k and k != "time"} for row in csv.DictReader(lines)
        ]


def sleeps_in_c() -> None:
    time.sleep(600)


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def leaves_a_hook() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


def keeps_a_group() -> None:
    torch.kept = torch.distributed.group.WORLD  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.parametrize("act", [sleeps_in_c, leaves_a_thread, leaves_a_hook, keeps_a_group])
def test_a_rank_that_is_busy_or_in_doubt_is_replaced_too(act, fit):
    whole, expected = fit("whole")
    began = time.monotonic()
    cut, weights = fit("cut", KillsRank(1, before=act))
    assert time.monotonic() - began < 300
    assert len(pids(cut, 0)) == 2
    assert losses(cut, 2) == losses(whole, 2)
    assert all(map(torch.equal, weights, expected))


def test_settings_of_torch_are_as_before_the_call():
    state = TorchState()
    before = settings()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(before["threads"] + 1)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.autograd.set_detect_anomaly(True)
    assert settings() != before
    assert state.clean_up() == ""
    assert settings() == before


def settings() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomalies": torch.is_anomaly_enabled(),
    }


def test_a_process_that_leaves_a_mode_or_a_hook_is_not_clean():
    state = TorchState()
    with contextlib.ExitStack() as held:
        held.callback(torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove)
        assert "hook" in state.clean_up()
    with torch.device("meta"):
        assert "hook" in state.clean_up()
    assert state.clean_up() == ""
