"""The contract of backends: one suite, run over each.

To add a backend, add a function to `BACKENDS` that makes a backend. All machines of a backend are this machine, so
processes are found by their ids and files by their paths.

The engine of a cluster only starts, loses and ends agents (`cluster/placement.py`). What the supervisor and its workers say
to each other goes over the agents' own connections, whichever the engine is. So tests that are only about that run on
`processes`, whose agents no engine starts (`without_engine`).

Launches whose work doesn't use torch preload nothing: on a cluster, each launch has fork servers of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cut_off import TRAINING
from launched import gone
from process_placement import ProcessPlacement, rank
from ray_nodes import ray_nodes
from sessions import spark_session
from torch import distributed as dist

import footplate as fp
from footplate.core.errors import DataError, LaunchError
from footplate.launch import Restarts, launch
from footplate.launch.backends import Backend, Cluster, Local, named
from footplate.launch.worker import attempt, progressed


def on_ray() -> Backend:
    ray_nodes()
    return named("ray", {"strategy": "STRICT_SPREAD"})


def on_spark() -> Backend:
    spark_session()
    return named("spark")


BACKENDS: dict[str, Callable[[], Backend]] = {
    "local": Local,
    "processes": lambda: Cluster(ProcessPlacement(["a", "b"])),
    "ray": on_ray,
    "spark": on_spark,
}
WITHOUT_ENGINE = ("local", "processes")
ONCE = Restarts(max_restarts=0)
ENGINE = (pytest.mark.engine, pytest.mark.slow)
ON_ONE_MACHINE = ("local", "spark")
SLOTS = 2  # the least number of slots of each backend


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in WITHOUT_ENGINE else ENGINE) for name in BACKENDS],
)
def backend(request) -> Backend:
    return BACKENDS[request.param]()


@pytest.fixture(scope="module", params=WITHOUT_ENGINE)
def without_engine(request) -> Backend:
    """A backend whose agents, if it has any, are started without an engine."""
    return BACKENDS[request.param]()


@pytest.fixture
def pids(tmp_path):
    """A directory into which workers write their process ids, and a function that returns their processes."""
    place = tmp_path / "pids"
    place.mkdir()

    def processes(count: int) -> list[psutil.Process]:
        until = time.monotonic() + 120
        while len(list(place.iterdir())) < count and time.monotonic() < until:
            time.sleep(0.02)
        return [psutil.Process(int(file.name)) for file in place.iterdir() if psutil.pid_exists(int(file.name))]

    return place, processes


def test_it_says_what_it_is_and_how_much_it_holds(backend):
    assert backend.name in BACKENDS
    assert backend.slots() >= SLOTS


@pytest.fixture(scope="module")
def result(backend: Backend, caller: Path) -> tuple[int, list[dict[str, Any]]]:
    """The result of a runner in `caller`: the rank that returned it, and what each rank has seen."""
    from of_the_user import answer

    def work(a, b, answer):
        import of_the_user

        dist.init_process_group("gloo")
        total = torch.tensor([float(rank() + 1)])
        dist.all_reduce(total)
        sees = {
            "sum": a + b, "directory": str(Path.cwd()), "argv": sys.argv, "answer": answer(), "total": total.item(),
            "imported": of_the_user.ANSWER, "environment": dict(os.environ),
        }  # fmt: skip
        each = [None] * 2
        dist.all_gather_object(each, sees)
        time.sleep(0.3 * rank())  # the value is not that of the rank that ends last
        return rank(), each

    runner = fp.Runner(np=2, backend=backend, env={"GREETING": "hello"})
    return runner.run(work, 3, b=4, answer=answer)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a caller with arguments, whose path has a module of its own."""
    directory = tmp_path_factory.mktemp("caller")
    (directory / "of_the_user.py").write_text("ANSWER = 42\ndef answer():\n    return ANSWER\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "argv", ["train.py", "--lr", "1"])
        patch.syspath_prepend(str(directory))
        yield directory
    sys.modules.pop("of_the_user", None)


def test_a_runner_takes_it_and_rank_0s_result_comes_home(result):
    returned_by, each = result
    assert returned_by == 0
    assert [sees["sum"] for sees in each] == [7, 7]


def test_a_worker_has_the_callers_directory_arguments_and_path(result, caller):
    for sees in result[1]:
        assert (sees["directory"], sees["argv"], sees["imported"]) == (str(caller), ["train.py", "--lr", "1"], 42)


def test_a_worker_imports_what_the_caller_can(result):
    assert [sees["answer"] for sees in result[1]] == [42, 42]


def test_the_ranks_meet_and_each_knows_its_place(backend, result):
    assert [sees["total"] for sees in result[1]] == [3.0, 3.0]
    environments = [sees["environment"] for sees in result[1]]
    assert [
        (environment["RANK"], environment["WORLD_SIZE"], environment["FOOTPLATE_ATTEMPT"], environment["GREETING"])
        for environment in environments
    ] == [
        ("0", "2", "0", "hello"),
        ("1", "2", "0", "hello"),
    ]
    hosts = {environment["GROUP_RANK"] for environment in environments}
    assert hosts == ({"0"} if backend.name in ON_ONE_MACHINE else {"0", "1"})
    for environment in environments:
        assert int(environment["LOCAL_RANK"]) < int(environment["LOCAL_WORLD_SIZE"]) == 2 // len(hosts)
    assert "GREETING" not in os.environ


def test_each_task_finds_the_cluster_and_its_role(result):
    first, second = (json.loads(sees["environment"]["TF_CONFIG"]) for sees in result[1])
    assert first["cluster"] == second["cluster"]
    assert len({*first["cluster"]["chief"], *first["cluster"]["worker"]}) == 2
    assert (first["task"]["type"], second["task"]["type"]) == ("chief", "worker")


def test_an_exception_comes_home_with_the_workers_traceback(backend):
    def innermost():
        raise KeyError("of rank 1")

    def work():
        dist.init_process_group("gloo")
        if rank() == 1:
            innermost()
        dist.barrier()

    with pytest.raises(KeyError, match="of rank 1") as raised:
        launch(work, world_size=2, backend=backend, restarts=ONCE)
    assert "Raised by rank 1 in attempt 0" in raised.value.__notes__[0]
    assert "in innermost" in raised.value.__notes__[0]


def test_a_rank_that_ends_before_the_ranks_have_met_is_named(without_engine):
    def work():
        if rank() == 1:
            os._exit(3)
        dist.init_process_group("gloo")  # in which the other waits

    restarts = Restarts(max_restarts=0, peers_grace_s=0.3)
    with pytest.raises(LaunchError, match="rank 1 ended with exit code 3 in attempt 0"):
        launch(work, world_size=2, backend=without_engine, restarts=restarts)


def test_a_mistake_of_the_user_is_not_tried_again(without_engine):
    def work():
        raise DataError(f"said in attempt {attempt()}")

    with pytest.raises(DataError, match="said in attempt 0"):
        launch(work, world_size=2, backend=without_engine, preload=())


def test_output_comes_with_its_rank_and_is_kept_whole(backend, tmp_path, quick_but_patient, capsys):
    def work():
        print("out", rank())
        print("err", rank(), file=sys.stderr)
        if attempt() == 0 and rank() == 1:
            raise ValueError("of rank 1")

    launch(work, world_size=2, backend=backend, restarts=quick_but_patient, log_dir=tmp_path / "logs", preload=())
    out, err = capsys.readouterr()
    assert {"[rank 0] out 0", "[rank 1] out 1"} <= set(out.splitlines())
    assert {"[rank 0] err 0", "[rank 1] err 1"} <= set(err.splitlines())
    files = {path.relative_to(tmp_path / "logs").as_posix(): path.read_text() for path in tmp_path.glob("logs/*/*")}
    assert set(files) == {f"attempt-{number}/rank-{worker}.log" for number in (0, 1) for worker in (0, 1)}
    assert sorted(files["attempt-1/rank-1.log"].splitlines()) == ["err 1", "out 1"]
    assert "ValueError: of rank 1\n" in files["attempt-0/rank-1.log"]


def test_a_line_appears_while_the_work_goes_on(without_engine, tmp_path, monkeypatch):
    seen = tmp_path / "seen"

    class Stream:
        encoding = "utf-8"

        def write(self, text):
            if "now" in text:
                seen.touch()

        def flush(self):
            pass

    def work(seen):
        print("now")
        until = time.monotonic() + 60
        while not seen.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return seen.exists()

    monkeypatch.setattr(sys, "stdout", Stream())
    assert launch(work, seen, world_size=1, backend=without_engine, preload=())


def test_after_kill_9_of_a_worker_all_are_started_again(backend, quick, said):
    def work():
        dist.init_process_group("gloo")
        progressed()
        if attempt() == rank():
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return attempt()

    assert launch(work, world_size=2, backend=backend, restarts=quick) == 2
    for victim in (0, 1):
        begins = f"attempt {victim + 1} starts now (restart {victim + 1} of 3)"
        assert f"rank {victim} was killed by SIGKILL in attempt {victim}; {begins}" in said.text


def test_restarts_come_to_an_end(without_engine):
    def work():
        progressed()
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    restarts = Restarts(max_restarts=1, peers_grace_s=0.3)
    with pytest.raises(LaunchError, match=r"rank 1 was killed by SIGKILL in attempt 1 \(max_restarts=1 is used up\)"):
        launch(work, world_size=2, backend=without_engine, restarts=restarts, preload=())


def test_a_frozen_rank_is_found(without_engine, quick, said):
    def work():
        if attempt() == 0 and rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return attempt()

    assert launch(work, world_size=2, backend=without_engine, restarts=quick, heartbeat_timeout_s=2, preload=()) == 1
    assert re.search(r"rank 1 gave no sign of life for \d+ s", said.text)


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_reaches_every_rank_and_nothing_is_left(backend, pids, tmp_path, number, end):
    place, processes = pids

    def work():
        def save(number, _):
            (tmp_path / f"saved by {rank()}").touch()
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
        (place / str(os.getpid())).touch()
        time.sleep(60)

    workers = []

    def tell():
        workers.extend(processes(2))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=tell)
    thread.start()
    with pytest.raises(end):
        launch(work, world_size=2, backend=backend, preload=())
    thread.join()
    assert {file.name for file in tmp_path.glob("saved*")} == {"saved by 0", "saved by 1"}
    assert len(workers) == 2
    assert gone(workers)


def test_a_large_argument_and_a_large_result(backend):
    numbers = torch.arange(17_000_000)  # 136 MB, more than fits into a message of Spark

    assert torch.equal(launch(lambda given: given.add_(1), numbers, world_size=2, backend=backend), numbers + 1)


def test_only_on_this_machine_may_workers_be_more_than_slots(backend):
    slots = backend.slots()

    def work():
        return int(os.environ["WORLD_SIZE"])

    if backend.name == "local":
        assert launch(work, world_size=slots + 1, backend=backend, preload=()) == slots + 1
    else:
        with pytest.raises(LaunchError, match=f"np={slots + 1}: {backend.name} can hold {slots} worker"):
            launch(work, world_size=slots + 1, backend=backend)


def train(run, kill_at):
    class Line(fp.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return (self.layer(batch[0]) - batch[1]).square().mean()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if attempt() == 0 and self.trainer.global_step == kill_at and rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    generator = torch.Generator().manual_seed(0)
    rows = torch.utils.data.TensorDataset(
        torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator)
    )
    fp.seed_everything(1)
    model = Line()
    trainer = fp.Trainer(
        accelerator="cpu", max_epochs=2, default_root_dir=Path(run), logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[fp.ModelCheckpoint(every_n_train_steps=1)], seed=1,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True), ckpt_path="last")
    weights = [value.hex() for value in model.layer.weight.double().flatten().tolist()]
    return weights, trainer.world_size, trainer.global_step, attempt()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted training of two processes returns."""
    run = tmp_path_factory.mktemp("whole")
    return launch(train, run, None, world_size=2, preload=TRAINING, restarts=ONCE)


def test_a_trainer_inside_finds_its_world_and_continues_after_a_kill(backend, tmp_path, quick, whole):
    cut = launch(train, tmp_path / "cut", 5, world_size=2, backend=backend, restarts=quick, preload=TRAINING)
    assert whole[1:] == (2, 8, 0)
    assert cut[1:] == (2, 8, 1)
    assert cut[0] == whole[0]  # bit for bit
