"""Tunings whose trials run on a cluster: their results come home, and they are stopped early, paused and continued."""

from __future__ import annotations

import json
import textwrap

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs.states import State
from jobs.backends.conftest import ENGINE
from jobs.backends.places import Place
from jobs.conftest import NET, Bench
from jobs.tuning.checks import check_a_program_that_ends_when_it_is_to_pause, check_pauses, check_population
from jobs.tuning.conftest import line_of, submit_with

ON_CLUSTERS = pytest.mark.parametrize(
    "place", [pytest.param("ray", marks=ENGINE), pytest.param("slurm", marks=ENGINE)], indirect=True
)

REPORTS = """
import argparse
import hypertune
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int)
parser.add_argument("--job-dir")
args = parser.parse_args()
print(json.loads(os.environ["TF_CONFIG"])["task"]["trial"], os.environ["CLOUD_ML_JOB_ID"], flush=True)
tuner = hypertune.HyperTune()
for step in range(1, 4):
    tuner.report_hyperparameter_tuning_metric("accuracy", args.layers + step / 10, global_step=step)
    time.sleep(0.5)
"""

# Each epoch is worth the number of layers. A good trial waits for the others, so that they can be compared.
TRAINS = f"""
{NET}
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int)
parser.add_argument("--job-dir")
args = parser.parse_args()

class Layers(Net):
    def on_train_epoch_end(self):
        self.log("accuracy", float(args.layers * (self.current_epoch + 1)))

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
fp.Trainer(
    accelerator="cpu", max_epochs=3, enable_progress_bar=False, enable_model_summary=False, default_root_dir=args.job_dir,
).fit(Layers(), data)
"""


@ON_CLUSTERS
def test_the_measurements_of_trials_come_home_and_the_best_one_is_known(bench: Bench, place: Place):
    bench.program(REPORTS)
    bench.submit("tuned", text=line_of(2, maxParallelTrials=2))
    job = bench.jobs.wait("tuned")
    assert (job.state, job.attempt) == (State.SUCCEEDED, 1), bench.output("tuned", who="tuning")
    first, second = bench.jobs.store.trials.of("tuned")
    assert first.measurements == ((1, 1.1), (2, 1.2), (3, 1.3))
    assert (second.value, second.step) == (2.3, 3)
    assert bench.jobs.tuning("tuned").best.job == "tuned_trial_2"
    assert [bench.output(f"tuned_trial_{number}") for number in (1, 2)] == ["1 tuned\n", "2 tuned\n"]
    assert {bench.jobs.find(trial.job).backend for trial in (first, second)} == {place.kind.backend}


@ON_CLUSTERS
def test_a_trainer_that_is_restarted_reports_each_epoch_once(bench: Bench, place: Place):
    crash = textwrap.dedent("""
        class Crash(fp.Callback):
            def on_train_epoch_start(self, trainer, module):
                if trainer.current_epoch == 2 and attempt == 1:
                    os._exit(1)
    """)
    source = TRAINS.replace("data = ", f"{crash}\ndata = ").replace("max_epochs=3", "max_epochs=3, callbacks=Crash()")
    bench.program(source)
    bench.submit("tuned", text=line_of(1) + "  scheduling: {maxRunningTime: 600s}\n")
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED, bench.output("tuned", who="tuning")
    (trial,) = bench.jobs.store.trials.of("tuned")
    assert bench.jobs.find(trial.job).attempt == 2
    assert trial.measurements == ((2, 1.0), (4, 2.0), (6, 3.0))
    folder = bench.jobs.home.attempt(trial.job, 1)
    lines = [json.loads(line) for line in (folder / "reports.jsonl").read_text().splitlines()]
    assert [line["value"] for line in lines if "value" in line] == [1.0, 2.0]


@ON_CLUSTERS
def test_a_program_that_does_its_work_although_it_is_asked_to_pause_has_its_result(bench: Bench, place: Place):
    check_a_program_that_ends_when_it_is_to_pause(bench)


@pytest.mark.parametrize("place", [pytest.param("slurm", marks=ENGINE)], indirect=True)
def test_a_paused_trainer_that_continues_is_bit_for_bit_one_that_was_never_paused(bench: Bench, place: Place):
    check_pauses(bench)


@pytest.mark.parametrize("place", [pytest.param("slurm", marks=ENGINE)], indirect=True)
def test_a_population_trains_although_its_supervisor_is_killed(bench: Bench, place: Place):
    check_population(bench)


@pytest.mark.parametrize("place", [pytest.param("ray", marks=ENGINE)], indirect=True)
def test_a_population_is_refused_where_machines_have_disks_of_their_own(bench: Bench, place: Place):
    bench.program(TRAINS)
    with pytest.raises(ConfigError, match="copies checkpoints on this machine's disk, and --backend is ray"):
        submit_with(bench, line_of(4, maxParallelTrials=4), stop_early="pbt")
