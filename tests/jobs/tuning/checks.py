"""Tunings that are checked on several backends: their trials are paused, or give way. They run on `bench.backend`."""

from __future__ import annotations

import os
import signal
import textwrap

from footplate.jobs.states import State
from footplate.jobs.supervision.identity import Identity
from jobs.conftest import NET, Bench, until
from jobs.tuning.conftest import line_of, submit_with

HEAD = """
import argparse
import hypertune
parser = argparse.ArgumentParser()
parser.add_argument("--epochs")
parser.add_argument("--layers", type=int)
parser.add_argument("--kind")
parser.add_argument("--job-dir")
args = parser.parse_args()
trial = os.environ["CLOUD_ML_TRIAL_ID"]
"""


def check_a_program_that_ends_when_it_is_to_pause(bench: Bench) -> None:
    """A program that does its work although it is asked to pause has its result."""
    source = """
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    report = hypertune.HyperTune().report_hyperparameter_tuning_metric
    report("accuracy", 1 / int(trial), global_step=1)
    while trial == "2" and not asked:
        time.sleep(0.01)
    report("accuracy", 2 / int(trial), global_step=2)
    """
    bench.program(HEAD + textwrap.dedent(source))
    submit_with(bench, line_of(2, maxParallelTrials=2, maxTrials=2), stop_early="asha")
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    trials = bench.jobs.store.trials.of("tuned")
    assert [(str(trial.state), trial.value) for trial in trials] == [
        ("SUCCEEDED", 2.0),
        ("SUCCEEDED", 1.0),
    ]
    job = bench.jobs.store.find("tuned_trial_2")
    assert (job.state, job.attempt, job.cause) == (State.CANCELLED, 1, "its program ended by itself")


def check_pauses(bench: Bench) -> None:
    """A paused trainer that continues is, bit for bit, one that was never paused."""
    source = f"""
    import footplate as fp
    {textwrap.indent(NET, "    ").strip()}
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step in (1, 4):
                # From the fourth step on they are equally good, so that none is paused at a later rung.
                self.log("accuracy", 1 / int(trial) if self.global_step == 1 else 1.0)
            # All trials but the first are still here when they are paused.
            while self.global_step == 3 and trial != "1" and attempt == 1 and not self.trainer.received_sigterm:
                time.sleep(0.01)
    fp.seed_everything(5)
    data, net = torch.utils.data.TensorDataset(torch.randn(64, 4)), Net()
    batches = torch.utils.data.DataLoader(data, 8, shuffle=True)
    fp.Trainer(max_epochs=2, log_every_n_steps=1, enable_progress_bar=False, logger=False).fit(net, batches)
    print("WEIGHTS", [value.hex() for value in net.net.weight.flatten().tolist()])
    """
    bench.program(HEAD + textwrap.dedent(source))
    submit_with(bench, line_of(6, maxParallelTrials=3, maxTrials=6), stop_early="asha")
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    # Two of six make the cut, and the second does so only when the last has been measured.
    trials = bench.jobs.store.trials.of("tuned")
    assert [str(trial.state) for trial in trials] == [
        *["SUCCEEDED"] * 2,
        *["STOPPED_EARLY"] * 4,
    ]
    assert [bench.jobs.store.find(f"tuned_trial_{number}").attempt for number in (1, 2, 3)] == [1, 2, 1]
    paused, continued = (bench.output("tuned_trial_2", attempt) for attempt in (1, 2))
    assert "WEIGHTS" not in paused
    weights = [line for line in continued.splitlines() if line.startswith("WEIGHTS")]
    assert len(weights) == 1
    assert weights == [line for line in bench.output("tuned_trial_1").splitlines() if line.startswith("WEIGHTS")]


def check_population(bench: Bench) -> None:
    """The worst of four trials gives way to a fork of the best, which goes on from there. The supervisor is killed."""
    source = f"""
    import argparse
    import footplate as fp
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int)
    parser.add_argument("--job-dir")
    args = parser.parse_args()
    {textwrap.indent(NET, "    ").strip()}
        def on_train_epoch_end(self):
            # The number of layers decides which trial is best, and the epochs show that the fork goes on.
            self.log("accuracy", args.layers + self.current_epoch / 100)
            while self.current_epoch == 1 and not (place / "go").exists() and not self.trainer.received_sigterm:
                time.sleep(0.01)
    fp.seed_everything(5)
    data, net = torch.utils.data.TensorDataset(torch.randn(64, 4)), Net()
    batches = torch.utils.data.DataLoader(data, 8, shuffle=True)
    fp.Trainer(max_epochs=4, enable_progress_bar=False, logger=False).fit(net, batches)
    print("STEP", os.environ.get("FOOTPLATE_FROM_CHECKPOINT"))
    """
    bench.program(textwrap.dedent(source))
    submit_with(bench, line_of(8, maxParallelTrials=4, maxTrials=5), stop_early="pbt", seed=3)
    store = bench.jobs.store
    bench.is_in(State.CANCELLED, "tuned_trial_1")
    supervisor = bench.supervisor("tuned")
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: Identity.of(supervisor) is None or bench.supervisor("tuned") != supervisor)
    bench.jobs.reconcile()
    until(lambda: len(store.trials.of("tuned")) == 5)
    (bench.directory / "go").touch()
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    trials = store.trials.of("tuned")
    assert [str(trial.state) for trial in trials] == ["STOPPED_EARLY", *["SUCCEEDED"] * 4]
    fork = trials[4].fork
    assert fork is not None
    assert (fork.parent, fork.replaces) == (4, 1)
    # The fork has trained from its parent's checkpoint to the end.
    assert trials[4].measurements[0][0] > fork.step > 0
    assert (trials[4].step, trials[4].value) == (32.0, float(trials[4].parameters["layers"]) + 0.03)
    # The kill may have hit trial 5 before it began. Then its first attempt is lost.
    assert bench.output("tuned_trial_5", store.find("tuned_trial_5").attempt).endswith("/out/5/start.ckpt\n")
    assert f"trial 5 begins from trial 4 at step {fork.step:g}, in the place of trial 1" in bench.output(
        "tuned", who="tuning"
    )
