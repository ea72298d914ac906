"""Contract of every backend that runs jobs, tested on real instances: the same programs, kills and outcomes.

A new backend needs a `Place` (`places.py`) and a line in `conftest.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap

import pytest

from footplate.jobs.backends import get_backend
from footplate.jobs.states import State
from footplate.jobs.supervision.identity import Identity
from jobs.backends.places import Place
from jobs.conftest import CLUSTER, NET, TWO, Bench, until


def test_each_replica_knows_its_place_and_the_master_decides(bench: Bench, place: Place):
    bench.program(
        """
        names = ("TF_CONFIG", "CLUSTER_SPEC", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FOOTPLATE_JOB_NAME",
                 "FOOTPLATE_JOB_DIR")
        print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
        (place / f"{role}-began").touch()
        if role == "ps":
            time.sleep(600)  # it is told to end when the master is done
        for other in ("chief", "worker", "ps", "evaluator"):
            until_there(f"{other}-began")
        print(sys.argv[1:], file=sys.stderr)
        """
    )
    bench.submit(args=("--epochs", "2"), text=CLUSTER)
    job = bench.jobs.wait("my_job")
    assert (job.state, job.cause, job.attempt) == (State.SUCCEEDED, "", 1)
    assert bench.states() == ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED"]
    told = {
        who: json.loads(bench.output(who=f"{who}-0").splitlines()[0])
        for who in ("master", "worker", "parameter_server", "evaluator")
    }
    clusters = [json.loads(environment["TF_CONFIG"])["cluster"] for environment in told.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {role: len(addresses) for role, addresses in clusters[0].items()} == {"chief": 1, "worker": 1, "ps": 1}
    assert len({address for addresses in clusters[0].values() for address in addresses}) == 3
    assert [told[replica]["RANK"] for replica in told] == ["0", "1", None, None]
    assert {told[replica]["WORLD_SIZE"] for replica in ("master", "worker")} == {"2"}
    assert len({(told[replica]["MASTER_ADDR"], told[replica]["MASTER_PORT"]) for replica in ("master", "worker")}) == 1
    assert {environment["FOOTPLATE_JOB_NAME"] for environment in told.values()} == {"my_job"}
    assert {environment["FOOTPLATE_JOB_DIR"] for environment in told.values()} == {bench.job_dir}
    assert bench.output().splitlines()[1:] == [str(["--epochs", "2", "--job-dir", bench.job_dir])]
    ends = {
        "master": "ended with exit code 0",
        "worker": "ended with exit code 0",
        "parameter_server": "was killed by SIGTERM",
        "evaluator": "ended with exit code 0",
    }
    if not place.kind.tells_each_end:
        ends |= dict.fromkeys(("worker", "parameter_server", "evaluator"), "ended with its job")
    assert {process.role: process.outcome for process in bench.jobs.store.processes("my_job")} == ends


def test_of_several_jobs_at_once_each_comes_to_its_own_end(bench: Bench, place: Place):
    """One raises an error, and is mistaken in its next attempt. The other one is cancelled, and saves."""
    bench.program(
        """
        def told(*_):
            print("saving", flush=True)
            (place / "saved").touch()
            sys.exit(143)
        what = sys.argv[1]
        if what == "saves":
            signal.signal(signal.SIGTERM, told)
            (place / "ready").touch()
            while True:
                time.sleep(1)
        until_there("ready")
        print("so far", what, flush=True)
        if attempt == 1:
            raise ValueError("too large")
        sys.exit(2)
        """
    )
    bench.submit("saves", args=("saves",))
    bench.submit("fails", args=("fails",))
    fails = bench.jobs.wait("fails")
    assert (fails.state, fails.attempt, fails.failures, fails.losses) == (State.FAILED, 2, 1, 0)
    assert bench.jobs.store.transitions("fails")[3].cause.startswith(
        "master 0 ended with exit code 1: ValueError: too large"
    )
    assert "ValueError: too large" in bench.output("fails")
    assert fails.cause == "master 0 ended with exit code 2: so far fails"
    assert bench.output("fails", attempt=2) == "so far fails\n"

    bench.is_in(State.RUNNING, "saves")
    bench.jobs.cancel("saves")
    assert bench.jobs.wait("saves").state == State.CANCELLED
    assert bench.states("saves")[-2:] == ["CANCELLING", "CANCELLED"]
    assert (bench.directory / "saved").exists()
    assert bench.output("saves") == "saving\n"


def test_no_line_is_lost_or_written_twice_when_the_supervisor_is_killed(bench: Bench, place: Place):
    bench.program(
        """
        number = 0
        while not (place / f"enough-{attempt}").exists():
            print(attempt, number, flush=True)
            number += 1
            time.sleep(0.005)
        print(attempt, "end", end="", flush=True)
        (place / f"numbers-{attempt}").write_text(str(number))
        """
    )
    bench.submit()
    log = bench.jobs.home.attempt("my_job", 1) / "master-0.log"
    until(lambda: log.exists() and log.stat().st_size > 500)
    bench.is_in(State.RUNNING)
    killed = bench.supervisor()
    os.kill(killed, signal.SIGKILL)
    until(lambda: Identity.of(killed) is None)
    last = 1 if get_backend(place.kind.backend).outlives else 2
    log = bench.jobs.home.attempt("my_job", last) / "master-0.log"
    before = log.stat().st_size if log.exists() else 0

    def goes_on() -> bool:
        bench.jobs.reconcile()  # the kernel may still be closing the files of the one before
        return log.exists() and log.stat().st_size > before + 500

    until(goes_on)
    for attempt in (1, 2):
        (bench.directory / f"enough-{attempt}").touch()
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, last, 0, last - 1)
    count = int((bench.directory / f"numbers-{last}").read_text())
    end = f"{last} end" if place.kind.keeps_bytes else f"{last} end\n"
    assert bench.output(attempt=last) == "".join(f"{last} {number}\n" for number in range(count)) + end
    (process,) = [noted for noted in bench.jobs.store.processes("my_job") if noted.attempt == last]
    assert process.outcome == "ended with exit code 0"


TRAINS = NET + textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from footplate.data.remote.location import find_files, locate
    place, attempt = Path(sys.argv[1]), os.environ["FOOTPLATE_JOB_ATTEMPT"]

    class Told(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            print(trainer.global_step, float(outputs).hex(), flush=True)
            if trainer.global_step == 7 and attempt == "1":
                while not any("step=6" in one.path for one in find_files(locate(sys.argv[-1])) if "meta.json" in one.path):
                    time.sleep(0.1)
                (place / f"rank-{trainer.global_rank}-is-at-7").touch()
                time.sleep(600)

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 4)), batch_size=4)
    trainer = fp.Trainer(accelerator="cpu", max_epochs=1, logger=False, seed=1,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Told(), fp.ModelCheckpoint(every_n_train_steps=2)])
    trainer.fit(Net(), data)
    """
)


@pytest.mark.slow
def test_a_lost_machine_is_not_the_programs_fault_and_the_curve_goes_on(bench: Bench, place: Place):
    bench.program("")
    (bench.directory / "trainer" / "task.py").write_text(TRAINS)
    bench.submit(args=(str(bench.directory),), text=TWO)
    bench.there("rank-0-is-at-7")
    bench.there("rank-1-is-at-7")
    bench.is_in(State.RUNNING)
    heard = bench.jobs.home.attempt("my_job", 1) / "master-0.log"
    until(lambda: heard.exists() and "\n6 " in heard.read_text())  # what a machine hasn't handed on is lost with it
    place.lose_a_machine(bench)
    job = bench.jobs.wait("my_job")
    losses = 0 if place.kind.requeues else 1
    assert (job.state, job.attempt, job.failures, job.losses) == (State.SUCCEEDED, 2, 0, losses), job.cause
    first, second = (
        dict(re.findall(r"^(\d+) (\S+)$", bench.output(attempt=attempt), re.MULTILINE)) for attempt in (1, 2)
    )
    begun = min(map(int, second))
    assert begun in (5, 7)  # after the checkpoint of step 6, unless that wasn't complete yet
    assert list(second) == [str(step) for step in range(begun, 11)]
    both = first.keys() & second.keys()
    assert [first[step] for step in both] == [second[step] for step in both]  # the same loss, to the last bit
    assert [*first][:6] == [str(step) for step in range(1, 7)]
