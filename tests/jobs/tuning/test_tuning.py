"""Tunings on this machine: real supervisors and real trials, which are killed."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest

from footplate.jobs.record import Trial
from footplate.jobs.states import State
from footplate.jobs.supervision.identity import Identity
from jobs.conftest import NET, Bench, until
from jobs.tuning.checks import HEAD, check_a_program_that_ends_when_it_is_to_pause, check_pauses
from jobs.tuning.conftest import grid

SCORES = """
score = args.layers + (0.5 if args.kind == "b" else 0.0)
hypertune.HyperTune().report_hyperparameter_tuning_metric("accuracy", score, global_step=3)
"""


def tune(bench: Bench, source: str, args: tuple[str, ...] = (), **keys: object) -> None:
    bench.program(HEAD + textwrap.dedent(source) + SCORES)
    bench.submit("tuned", args, grid(**keys))


def trials_of(bench: Bench) -> list[Trial]:
    return bench.jobs.store.trials.of("tuned")


def test_a_tuning_tries_its_parameters_with_as_many_trials_at_once_as_it_may(bench: Bench):
    source = """
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    print(sys.argv[1:], task["trial"], os.environ["CLOUD_ML_JOB_ID"])
    (place / f"began-{trial}").touch()
    until_there("go")
    """
    tune(bench, source, ("--epochs", "2"), maxParallelTrials=2)
    bench.there("began-1")
    bench.there("began-2")
    assert len(trials_of(bench)) == 2
    (bench.directory / "go").touch()
    job = bench.jobs.wait("tuned")
    assert (job.state, job.attempt) == (State.SUCCEEDED, 1)
    assert [(trial.value, trial.step) for trial in trials_of(bench)] == [(1.0, 3), (1.5, 3), (2.0, 3), (2.5, 3)]
    out = bench.directory / "out"
    arguments = ["--epochs", "2", "--layers=2", "--kind=b", "--job-dir", f"{out}/4"]
    assert bench.output("tuned_trial_4") == f"{arguments} 4 tuned\n"
    assert sorted(path.name for path in out.iterdir()) == ["1", "2", "3", "4"]
    assert "trial 4 is SUCCEEDED: accuracy=2.5 at step 3: layers=2 kind=b\n" in bench.output("tuned", who="tuning")


def test_a_tuning_whose_supervisor_is_killed_goes_on_and_repeats_no_trial(bench: Bench):
    source = """
    with open(place / "runs", "a") as file:
        file.write(f"{trial}\\n")
    (place / f"began-{trial}").touch()
    until_there(f"go-{trial}")
    """
    tune(bench, source, maxTrials=2)
    for number in ("1", "2"):
        bench.there(f"began-{number}")
        supervisor = bench.supervisor("tuned")
        os.kill(supervisor, signal.SIGKILL)
        # The trial ends while nobody follows it.
        (bench.directory / f"go-{number}").touch()
        bench.is_in(State.SUCCEEDED, f"tuned_trial_{number}")
        until(lambda pid=supervisor: Identity.of(pid) is None or bench.supervisor("tuned") != pid)
        bench.jobs.reconcile()
    job = bench.jobs.wait("tuned")
    assert (job.state, job.attempt, job.losses) == (State.SUCCEEDED, 1, 0)
    assert (bench.directory / "runs").read_text().split() == ["1", "2"]
    assert [trial.value for trial in trials_of(bench)] == [1.0, 1.5]


def test_trials_save_when_their_tuning_is_cancelled_and_continue_with_it(bench: Bench):
    source = """
    signal.signal(signal.SIGTERM, lambda *_: (print("saving", flush=True), sys.exit(143)))
    (place / f"began-{attempt}").touch()
    if attempt == 1:
        time.sleep(600)
    """
    tune(bench, source, maxTrials=1)
    bench.there("began-1")
    bench.jobs.cancel("tuned")
    assert bench.jobs.wait("tuned").state == State.CANCELLED
    assert bench.output("tuned_trial_1") == "saving\n"
    bench.jobs.resubmit("tuned")
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    assert bench.jobs.store.find("tuned_trial_1").attempt == 2
    assert [trial.value for trial in trials_of(bench)] == [1.0]


@pytest.mark.slow
def test_an_unpromising_trainer_saves_and_is_stopped_early(bench: Bench):
    source = f"""
    if trial != "4":
        hypertune.HyperTune().report_hyperparameter_tuning_metric("accuracy", 0.9, global_step=1)
        sys.exit()
    import footplate as fp
    {textwrap.indent(NET, "    ").strip()}
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("accuracy", 0.1)
            time.sleep(0.01)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), 8)
    fp.Trainer(max_epochs=-1, log_every_n_steps=1, enable_progress_bar=False, logger=False).fit(Net(), data)
    """
    bench.program(HEAD + textwrap.dedent(source))
    bench.submit("tuned", (), grid(enableTrialEarlyStopping="true", maxParallelTrials=4))
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    trials = trials_of(bench)
    assert [str(trial.state) for trial in trials] == ["SUCCEEDED", "SUCCEEDED", "SUCCEEDED", "STOPPED_EARLY"]
    job = bench.jobs.store.find("tuned_trial_4")
    assert job.state == State.CANCELLED
    assert job.cause.startswith("stopped early: at step ")
    assert list((bench.directory / "out" / "4" / "checkpoints").glob("*/meta.json"))


def test_a_program_that_does_its_work_although_it_is_asked_to_pause_has_its_result(bench: Bench):
    check_a_program_that_ends_when_it_is_to_pause(bench)


@pytest.mark.slow
def test_a_paused_trainer_that_continues_is_bit_for_bit_one_that_was_never_paused(bench: Bench):
    check_pauses(bench)
