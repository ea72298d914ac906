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
    clusters = [json.loads(one["TF_CONFIG"])["cluster"] for one in told.values()]
    assert all(one == clusters[0] for one in clusters)
    assert {role: len(addresses) for role, addresses in clusters[0].items()} == {"chief": 1, "worker": 1, "ps": 1}
    assert len({address for addresses in clusters[0].values() for address in addresses}) == 3
    assert [told[one]["RANK"] for one in told] == ["0", "1", None, None]
    assert {told[one]["WORLD_SIZE"] for one in ("master", "worker")} == {"2"}
    assert len({(told[one]["MASTER_ADDR"], told[one]["MASTER_PORT"]) for one in ("master", "worker")}) == 1
    assert {one["FOOTPLATE_JOB_NAME"] for one in told.values()} == {"my_job"}
    assert {one["FOOTPLATE_JOB_DIR"] for one in told.values()} == {bench.job_dir}
    assert bench.output().splitlines()[1:] == [str(["--epochs", "2", "--job-dir", bench.job_dir])]
    ends = {
        "master": "ended with exit code 0",
        "worker": "ended with exit code 0",
        "parameter_server": "was killed by SIGTERM",
        "evaluator": "ended with exit code 0",
    }
    if not place.kind.tells_each_end:
        ends |= dict.fromkeys(("worker", "parameter_server", "evaluator"), "ended with its job")
    assert {one.role: one.outcome for one in bench.jobs.store.processes("my_job")} == ends


def test_several_jobs_at_once_each_come_to_their_own_end(bench: Bench, place: Place):
    bench.program(
        """
        what = sys.argv[1]
        (place / f"{what}-{attempt}").touch()
        for other in sys.argv[2].split():
            until_there(f"{other}-1")
        print("so far", what, flush=True)
        if what == "raises":
            raise ValueError("too large")
        sys.exit(2 * (what == "mistaken"))
        """
    )
    names = ("raises", "mistaken")
    alone = place.kind.backend == "local"  # this machine may not have the cores for all of them at once
    together = () if alone else names
    for name in names:
        bench.submit(name, args=(name, " ".join(together)))
    mistaken, raises = bench.jobs.wait("mistaken"), bench.jobs.wait("raises")
    assert bench.output("mistaken") == "so far mistaken\n"
    assert (mistaken.state, mistaken.attempt) == (State.FAILED, 1)
    assert mistaken.cause == "master 0 ended with exit code 2: so far mistaken"
    assert (raises.state, raises.attempt, raises.failures, raises.losses) == (State.FAILED, 2, 1, 0)
    assert raises.cause.startswith(
        "master 0 ended with exit code 1: ValueError: too large (as in the attempt before it"
    )
    assert "ValueError: too large" in bench.output("raises", attempt=2)


def test_an_end_that_is_asked_for_lets_the_program_save(bench: Bench, place: Place):
    bench.program(
        """
        def told(*_):
            print("saving", flush=True)
            (place / f"{sys.argv[1]}-saved").touch()
            sys.exit(143)
        signal.signal(signal.SIGTERM, told)
        (place / f"{sys.argv[1]}-ready").touch()
        while True:
            time.sleep(1)
        """
    )
    bench.submit("cancelled", args=("cancelled",))
    bench.submit("late", args=("late",), max_running_time="5s")
    bench.there("cancelled-ready")
    bench.jobs.cancel("cancelled")
    cancelled, late = bench.jobs.wait("cancelled"), bench.jobs.wait("late")
    assert cancelled.state == State.CANCELLED
    assert bench.states("cancelled")[-2:] == ["CANCELLING", "CANCELLED"]
    assert (bench.directory / "cancelled-saved").exists()
    assert bench.output("cancelled") == "saving\n"
    assert (late.state, late.cause) == (State.FAILED, "its maximum running time of 5 s is over")
    assert not (bench.directory / "late-ready").exists() or (bench.directory / "late-saved").exists()


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
    assert bench.output(attempt=last) == "".join(f"{last} {one}\n" for one in range(count)) + end
    (process,) = [one for one in bench.jobs.store.processes("my_job") if one.attempt == last]
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
    first, second = (dict(re.findall(r"^(\d+) (\S+)$", bench.output(attempt=one), re.MULTILINE)) for one in (1, 2))
    begun = min(map(int, second))
    assert begun in (5, 7)  # after the checkpoint of step 6, unless that wasn't complete yet
    assert list(second) == [str(step) for step in range(begun, 11)]
    both = first.keys() & second.keys()
    assert [first[step] for step in both] == [second[step] for step in both]  # the same loss, to the last bit
    assert [*first][:6] == [str(step) for step in range(1, 7)]
