"""Trainings that hang in several ways, and the sentences that say where."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.common import Plain, make
from models.small import dataset
from torch.utils.data import DataLoader, Dataset

from footplate.core.errors import LaunchError
from footplate.launch import Restarts, launch
from footplate.launch.hang_files import hang_files

HERE = re.escape(__file__)
FOREVER_S = 300.0


PRELOAD = ("footplate.training.trainer", "footplate.distributed.ddp", "torch._dynamo")


class Rows(Dataset[Any]):
    """Rows of a table, whose transform hangs at some rows of one rank."""

    def __init__(self, hang: Callable[[], None] | None = None) -> None:
        self._rows = dataset(64)
        self._hang = hang

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self._rows[index], index)

    def transform(self, row: Any, index: int) -> Any:
        if self._hang is not None and index >= 32:
            (Path.cwd() / "hangs-now").touch()
            self._hang()
        return row


def sleeps() -> None:
    time.sleep(FOREVER_S)


def deadlocks() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loops() -> None:
    while True:
        pass


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def keeps_the_gil() -> None:
    # A mutex that is locked twice. Other calls, such as pause(), return when a signal asks for the stacks.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


class SkipsACollective(Plain):
    """Rank 1 doesn't call a collective that the other ranks call."""

    def on_train_epoch_end(self) -> None:
        (Path.cwd() / "hangs-now").touch()
        if dist.get_rank() != 1:
            dist.barrier()


class HangsWhenSaved(Plain):
    """Rank 0 hangs when a checkpoint is written."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            (Path.cwd() / "hangs-now").touch()
            time.sleep(FOREVER_S)


def train(root: Path, hanging: int, hang: Callable[[], None] | None, module: type, workers: int) -> None:
    """Train in a rank, in a directory of its own. One rank hangs, and ends when that is explained."""
    rank = int(os.environ["RANK"])
    os.chdir(root)
    if rank == hanging:
        threading.Thread(target=end_when_explained, args=(root,), name="test-ends", daemon=True).start()
    rows = Rows(hang if rank == hanging else None)
    make(root).fit(module(), DataLoader(rows, 4, shuffle=False, num_workers=workers))


def end_when_explained(root: Path) -> None:
    """End this process when the supervisor has explained the hang. It only warns of a stall, so nothing else ends it."""
    while not (root / "hangs-now").exists():
        time.sleep(0.05)
    before = set(hang_files(root / "hangs"))
    while not set(hang_files(root / "hangs")) - before:
        time.sleep(0.05)
    os._exit(7)


def hung(
    root: Path, hanging: int, hang: Callable[[], None] | None = None, module: type = Plain, workers: int = 0,
    world_size: int = 2, **settings: Any,
) -> tuple[str, str]:  # fmt: skip
    """Launch a training that hangs. Return the message of the failure, and the last file with all stacks."""
    settings = {"restarts": Restarts(max_restarts=0, peers_grace_s=0.3), "stall_s": 1.5, **settings}
    with pytest.raises(LaunchError) as failure:
        launch(
            train, root, hanging, hang, module, workers,
            world_size=world_size, hangs_dir=root / "hangs", preload=PRELOAD, show="log_callback_only", **settings,
        )  # fmt: skip
    message, files = str(failure.value), hang_files(root / "hangs")
    assert files, message
    return message, files[-1].read_text()


def test_a_transform_that_sleeps_is_named_with_those_that_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message, stacks = hung(tmp_path, 1, sleeps, world_size=3)

    where = rf"rank 1 is in its data loader's `sleeps` \({HERE}:\d+\) since \d+ s; "
    waits = r"ranks 0 and 2 wait for it in all_reduce \d+"
    assert re.fullmatch(where + waits, stacks.splitlines()[0])
    assert re.search("R" + where[1:] + waits + r"\.$", message)
    assert str(tmp_path / "hangs" / "hang-") in message
    assert re.search(r"no progress for \d+ s: " + where + waits, caplog.text)
    for rank in range(3):
        assert re.search(rf"^rank {rank}: process \d+ ", stacks, re.MULTILINE)
    assert f"Rows.transform  {__file__}:" in stacks


@pytest.mark.parametrize("hang", [deadlocks, loops])
def test_a_transform_that_never_returns_is_named(tmp_path: Path, hang: Callable[[], None]) -> None:
    _, stacks = hung(tmp_path, 0, hang)

    where = rf"rank 0 is in its data loader's `{hang.__name__}` \({HERE}:\d+\) since \d+ s; "
    assert re.fullmatch(where + r"rank 1 waits for it in all_reduce \d+", stacks.splitlines()[0])


def test_a_loaders_worker_that_hangs_is_named(tmp_path: Path) -> None:
    _, stacks = hung(tmp_path, 1, sleeps, workers=1)

    worker = r"rank 1 waits for its data loader's worker \(process \d+\), which is in its data loader's "
    where = worker + rf"`sleeps` \({HERE}:\d+\)"
    assert re.fullmatch(where + r" since \d+ s; rank 0 waits for it in all_reduce \d+", stacks.splitlines()[0])


def test_ranks_that_call_different_collectives_are_named(tmp_path: Path) -> None:
    _, stacks = hung(tmp_path, 1, module=SkipsACollective)

    sentence = stacks.splitlines()[0]
    called_by = rf"called by `SkipsACollective.on_train_epoch_end` \({HERE}:\d+\), since \d+ s"
    assert re.match(
        rf"rank 0 waits in barrier \d+, {called_by}; rank 1 waits in \w+ \d+ of the process group 'hosts'", sentence
    )
    assert re.search(
        r": the ranks call different collectives, .* Rank 1 hasn't called barrier \d+\. Rank 0 hasn't called \w+ \d+$",
        sentence,
    )


def test_a_rank_that_hangs_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    _, stacks = hung(tmp_path, 0, module=HangsWhenSaved)

    where = rf"rank 0 writes a checkpoint, in `HangsWhenSaved.on_save_checkpoint` \({HERE}:\d+\) since \d+ s; "
    assert re.fullmatch(where + r"rank 1 waits for it in \w+ \d+.*", stacks.splitlines()[0])


def test_a_stopped_rank_is_named_before_it_is_killed(tmp_path: Path) -> None:
    message, stacks = hung(tmp_path, 1, stops, stall_s=60.0, heartbeat_timeout_s=3.0)

    assert message.startswith("rank 1 gave no sign of life for ")
    assert "Rank 1 is stopped (SIGSTOP): it can't answer before it gets SIGCONT" in message
    assert re.search(r"; rank 0 waits for it in all_reduce \d+$", stacks.splitlines()[0])


def test_a_rank_whose_c_code_keeps_the_gil_is_named_before_it_is_killed(tmp_path: Path) -> None:
    message, _ = hung(tmp_path, 1, keeps_the_gil, stall_s=60.0, heartbeat_timeout_s=3.0)

    assert message.startswith("rank 1 gave no sign of life for ")
    where = rf"Rank 1 is in its data loader's `keeps_the_gil` \({HERE}:\d+\); rank 0 waits for it in all_reduce \d+\.$"
    assert re.search(where, message)
