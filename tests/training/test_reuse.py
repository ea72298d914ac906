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
from distributed.common import make
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
    """Kills a rank after its ninth batch, in each of some attempts. Calls `before` in the others after the batch `at`."""

    def __init__(self, rank: int, attempts: int = 1, before: Callable[[], None] | None = None, at: int = 9) -> None:
        self.rank, self.attempts, self.before, self.at = rank, attempts, before, at

    def __call__(self, trainer: fp.Trainer) -> None:
        if worker.attempt() >= self.attempts:
            return
        batch, is_victim = trainer.progress.batches, trainer.world.rank == self.rank
        if is_victim and batch == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if not is_victim and batch == self.at and self.before is not None:
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


def fit_in(directory: Path, act: Any = None, model: Any = None, data: Any = None, **options: Any) -> list[torch.Tensor]:
    """Train in several ranks, with records in this directory; return the final weights."""
    directory.mkdir()
    saver = fp.ModelCheckpoint(every_n_train_steps=options.pop("every", 3))
    trainer = make(
        directory / "run", callbacks=[Records(directory, act), saver], **{"devices": 2, "max_epochs": 3, **options}
    )
    torch.manual_seed(3)
    model = model() if model is not None else Classifier()
    trainer.fit(model, data() if data is not None else loader(batch_size=5))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture
def fit(tmp_path):
    """A function that trains in several ranks; it returns the directory of the records, and the final weights."""
    return lambda name, act=None, **options: (tmp_path / name, fit_in(tmp_path / name, act, **options))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, list[torch.Tensor]]:
    """The directory of the records of a training that nothing disturbs, and its final weights."""
    directory = tmp_path_factory.mktemp("undisturbed") / "whole"
    return directory, fit_in(directory, logger=fp.CSV())


def compiled() -> Any:
    return torch.compile(Classifier(), backend="aot_eager")


def with_workers() -> Any:
    return loader(batch_size=5, num_workers=1)


CASES: dict[str, dict[str, Any]] = {
    "three ranks with loader workers": {"devices": 3, "data": with_workers},
    "logical ranks": {"logical_ranks": 4},
    "compiled": {"model": compiled},
    "a checkpoint at each step, accumulation, clipping": {
        "every": 1,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    },
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


def slow_disk() -> None:
    """From now on, a file takes two seconds until it is on the disk."""
    sync = os.fsync
    os.fsync = lambda file: (time.sleep(2), sync(file))[1]


@pytest.mark.slow
def test_a_rank_dies_while_another_writes_a_checkpoint(fit, undisturbed):
    whole, expected = undisturbed
    cut, weights = fit("cut", KillsRank(1, before=slow_disk, at=8))
    # The checkpoint of step 9 may not be whole yet, and on a busy machine earlier ones neither.
    again = [record["batch"] for record in records(cut, 0) if record["attempt"] == 1]
    assert again[0] in (1, 4, 7, 10)
    assert losses(cut, 2) == losses(whole, 2)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
def test_ranks_of_a_sharded_training_get_new_processes(fit):
    whole, expected = fit("whole", strategy="fsdp")
    cut, weights = fit("cut", KillsRank(1), strategy="fsdp")
    assert len(pids(cut, 0)) == 2
    assert losses(cut, 2) == losses(whole, 2)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow
def test_rank_0_is_replaced_and_its_log_goes_on(fit, undisturbed):
    whole, expected = undisturbed
    cut, weights = fit("cut", KillsRank(0), logger=fp.CSV())
    assert (len(pids(cut, 0)), len(pids(cut, 1))) == (2, 1)
    assert losses(cut, 2) == losses(whole, 2)
    assert all(map(torch.equal, weights, expected))
    assert rows(cut) == rows(whole)


@pytest.mark.slow
def test_a_kept_rank_0_goes_on_with_its_log(fit, undisturbed):
    whole, _ = undisturbed
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
def test_a_rank_that_is_busy_or_in_doubt_is_replaced_too(act, fit, undisturbed):
    whole, expected = undisturbed
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
