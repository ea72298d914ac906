"""Tunings whose trials run on a cluster: their results come home, and they are stopped early, paused and continued."""

from __future__ import annotations

import json

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs.states import State
from jobs.backends.conftest import ENGINE
from jobs.backends.places import Place
from jobs.conftest import NET, Bench
from jobs.tuning.checks import check_a_program_that_ends_when_it_is_to_pause, check_pauses, check_population
from jobs.tuning.conftest import line_of, submit_with

RAY, SLURM, VERTEX = (pytest.param(name, marks=ENGINE) for name in ("ray", "slurm", "vertex"))
ON_CLUSTERS = pytest.mark.parametrize("place", [RAY, SLURM, VERTEX], indirect=True)
ON_RAY = pytest.mark.parametrize("place", [RAY], indirect=True)
ON_SLURM = pytest.mark.parametrize("place", [SLURM], indirect=True)

# Trial 1 trains, and fails once after its second epoch. Trial 2 reports values by itself.
PROGRAM = f"""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int)
parser.add_argument("--job-dir")
args = parser.parse_args()
print(json.loads(os.environ["TF_CONFIG"])["task"]["trial"], os.environ["CLOUD_ML_JOB_ID"], flush=True)
if args.layers == 2:
    import hypertune
    tuner = hypertune.HyperTune()
    for step in range(1, 4):
        tuner.report_hyperparameter_tuning_metric("accuracy", 2 + step / 10, global_step=step)
        time.sleep(0.5)
    sys.exit()

{NET}
class Layers(Net):
    def on_train_epoch_start(self):
        if self.current_epoch == 2 and attempt == 1:
            os._exit(1)
    def on_train_epoch_end(self):
        self.log("accuracy", float(self.current_epoch + 1))

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
fp.Trainer(
    accelerator="cpu", max_epochs=3, enable_progress_bar=False, enable_model_summary=False, logger=False,
).fit(Layers(), data)
"""


@ON_CLUSTERS
def test_each_measurement_comes_home_once_also_if_a_trial_is_restarted(bench: Bench, place: Place):
    bench.program(PROGRAM)
    bench.submit("tuned", text=line_of(2, maxParallelTrials=2))
    job = bench.jobs.wait("tuned")
    assert (job.state, job.attempt) == (State.SUCCEEDED, 1), bench.output("tuned", who="tuning")
    trained, reported = bench.jobs.store.trials.of("tuned")
    assert trained.measurements == ((2, 1.0), (4, 2.0), (6, 3.0))
    assert reported.measurements == ((1, 2.1), (2, 2.2), (3, 2.3))
    assert bench.jobs.tuning("tuned").best.job == "tuned_trial_1"
    assert {bench.jobs.find(trial.job).backend for trial in (trained, reported)} == {place.kind.backend}
    assert bench.jobs.find("tuned_trial_1").attempt == 2
    assert bench.output("tuned_trial_2") == "2 tuned\n"
    first = bench.jobs.home.attempt("tuned_trial_1", 1) / "reports.jsonl"
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    assert [line["value"] for line in lines if "value" in line] == [1.0, 2.0]


@ON_SLURM
def test_a_program_that_does_its_work_although_it_is_asked_to_pause_has_its_result(bench: Bench, place: Place):
    check_a_program_that_ends_when_it_is_to_pause(bench)


@ON_SLURM
def test_a_paused_trainer_that_continues_is_bit_for_bit_one_that_was_never_paused(bench: Bench, place: Place):
    check_pauses(bench)


@ON_SLURM
def test_a_population_trains_although_its_supervisor_is_killed(bench: Bench, place: Place):
    check_population(bench)


@ON_RAY
def test_a_population_is_refused_where_machines_have_disks_of_their_own(bench: Bench, place: Place):
    bench.program(PROGRAM)
    with pytest.raises(ConfigError, match="copies checkpoints on this machine's disk, and --backend is ray"):
        submit_with(bench, line_of(4, maxParallelTrials=4), stop_early="pbt")
