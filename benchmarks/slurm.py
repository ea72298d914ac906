"""Jobs on Slurm: time from sbatch to the first line, from a requeue to the first new step, and a real time limit.

    python benchmarks/slurm.py --json benchmarks/results/slurm.json
    python benchmarks/slurm.py --only limit

The cluster is that of the tests (`tests/slurm_cluster.py`): Slurm's own daemons, all on this machine. It needs the programs
of Debian's packages slurm-wlm and munge.

**start**: time from the start of a command to the first line of a program that imports nothing. The commands are `sbatch`
with `python -m trainer.task`, and `footplate jobs submit training --backend slurm` with the same module.

**requeue**: a training (`footplate.Trainer`) is requeued with `scontrol requeue` after some steps. The figures are the time
until Slurm starts the job again, which is Slurm's own (`cred_expire`; two minutes by default, five seconds here), and the
time from that start until the first new step. The same for a script that only imports torch and makes an optimizer.

**limit**: a job with a limit of one minute. Slurm sends its signal at one of its looks, twice a minute; the program saves;
the job is requeued and continues where it saved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import LESS, arguments_parser, interleave, machine, median, ratio, report, row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from slurm_cluster import SlurmCluster, slurm_cluster

PATIENCE_S = 240.0
FLAGS = ["--package-path", "trainer", "--module-name", "trainer.task", "--region", "us-central1", "--job-dir", "out"]
FIRST_LINE = """import time; at = time.time()
import os, sys
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(at))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""
# Writes the number and the time of each step. The name of the file has the attempt's number.
TRAINING = """
import os, sys, time
import torch
import footplate as fp

attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1
steps = open(f"{sys.argv[1]}-{attempt}", "w", buffering=1)

class Net(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Steps(fp.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        print(trainer.global_step, time.time(), file=steps)
        time.sleep(0.05)
        if attempt > 1 and os.path.exists(f"{sys.argv[1]}-end"):
            trainer.should_stop = True

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(400, 4)), batch_size=4)
fp.Trainer(accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Steps(), fp.ModelCheckpoint(save_last=True)]).fit(Net(), data)
"""
BARE = """
import os, sys, time
import torch
torch.optim.AdamW([torch.zeros(1)])
attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1
with open(f"{sys.argv[1]}-{attempt}", "w", buffering=1) as steps:
    for step in range(1, 100000):
        print(step, time.time(), file=steps)
        time.sleep(0.05)
        if attempt > 1 and os.path.exists(f"{sys.argv[1]}-end"):
            break
"""


class Workplace:
    """A directory with packages, a home of its own, and the cluster."""

    def __init__(self, directory: Path, cluster: SlurmCluster) -> None:
        self.directory = directory
        self.cluster = cluster
        self._numbers = 0
        for package, source in {"trainer": FIRST_LINE, "training": TRAINING, "bare": BARE}.items():
            (directory / package).mkdir()
            (directory / package / "__init__.py").touch()
            (directory / package / "task.py").write_text(source)
        os.environ |= {
            "FOOTPLATE_HOME": str(directory / "home"),
            "SLURM_CONF": str(cluster.conf),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        os.chdir(directory)

    def file(self) -> Path:
        """A new path."""
        self._numbers += 1
        return self.directory / f"notes_{self._numbers}"

    def sbatch(self, module: str, file: Path) -> str:
        """Submit a module by sbatch. Returns the job's id."""
        command = f"{sys.executable} -m {module}.task {file}"
        return self.cluster.run("sbatch", "--parsable", "--requeue", "--output=/dev/null", f"--wrap={command}").strip()

    def submit(self, module: str, file: Path, *options: str) -> None:
        """Submit a module by Footplate. The job has the file's name."""
        flags = [flag.replace("trainer", module) for flag in FLAGS]
        command = [sys.executable, "-m", "footplate", "jobs", "submit", "training", file.name, "--backend", "slurm"]
        subprocess.run([*command, *flags, *options, "--", str(file)], check=True, capture_output=True)

    def job_of(self, file: Path) -> str:
        """The id of the Slurm job of one of Footplate's jobs."""
        record = self.directory / "home" / "jobs" / file.name / "attempt-1" / "slurm.json"
        return str(json.loads(record.read_text())["job"])

    def wait(self, path: Path, lines: int = 1) -> list[list[str]]:
        """Wait for lines of a file."""
        until = time.time() + PATIENCE_S
        while True:
            found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            if len([line for line in found if line]) >= lines:
                return found
            assert time.time() < until, (
                f"{path.name} has no {lines} lines after {PATIENCE_S:g} s\n{self.cluster.logs()}"
            )
            time.sleep(0.005)

    def started(self, job: str, after: float) -> float:
        """The time of a job's latest start, in whole seconds: Slurm writes no more."""
        fields = dict(field.partition("=")[::2] for field in self.cluster.run("scontrol", "show", "job", job).split())
        at = time.mktime(time.strptime(fields["StartTime"], "%Y-%m-%dT%H:%M:%S"))
        assert at > after - 1, fields
        return at

    def end(self, file: Path) -> None:
        """Let a training end, and wait until no job is left."""
        file.with_name(f"{file.name}-end").touch()
        self.cluster.clear()


def measure_start(workplace: Workplace, entrant: str) -> dict[str, float]:
    """Seconds from the start of a command to the first line."""
    file = workplace.file()
    began = time.time()
    if entrant == "sbatch":
        workplace.sbatch("trainer", file)
    else:
        workplace.submit("trainer", file)
    ((at,),) = workplace.wait(file)
    workplace.cluster.clear()
    return {"seconds": float(at) - began}


def measure_requeue(workplace: Workplace, entrant: str) -> dict[str, float]:
    """Seconds from a requeue to the start by Slurm, and from there to the first new step."""
    file = workplace.file()
    if entrant == "bare script":
        job = workplace.sbatch("bare", file)
    else:
        workplace.submit("training", file)
    workplace.wait(file.with_name(f"{file.name}-1"), 20)
    job = job if entrant == "bare script" else workplace.job_of(file)
    began = time.time()
    workplace.cluster.run("scontrol", "requeue", job)
    (step, at), *_ = workplace.wait(file.with_name(f"{file.name}-2"))
    started = workplace.started(job, began)
    if entrant != "bare script":
        last = workplace.wait(file.with_name(f"{file.name}-1"))[-1]
        assert int(step) == int(last[0]) + 1, (step, last)
    workplace.end(file)
    return {"seconds": float(at) - started, "slurm_s": started - began, "whole_s": float(at) - began}


def measure_limit(workplace: Workplace) -> dict[str, float]:
    """A job with a limit of a minute: when the signal came, and how many steps were lost."""
    file = workplace.file()
    workplace.submit("training", file, "--time", "00:01:00")
    first = workplace.wait(file.with_name(f"{file.name}-1"))
    (step, at), *_ = workplace.wait(file.with_name(f"{file.name}-2"))
    steps = workplace.wait(file.with_name(f"{file.name}-1"))
    workplace.end(file)
    return {
        "limit_s": 60.0,
        "limit_steps_lost": int(steps[-1][0]) + 1 - int(step),
        "limit_ran_s": float(steps[-1][1]) - float(first[0][1]),
        "limit_until_next_step_s": float(at) - float(steps[-1][1]),
    }


def main() -> None:
    parser = arguments_parser(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["start", "requeue", "limit"], help="run only this part")
    parser.add_argument("--rounds", type=int, default=8, help="number of rounds")
    options: argparse.Namespace = parser.parse_args()
    path = options.json.absolute() if options.json else None
    rounds = 1 if options.quick else options.rounds
    host, rows, ratios, figures = machine(), [], {}, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, slurm_cluster() as cluster:
        workplace = Workplace(Path(directory), cluster)
        if options.only in (None, "start"):
            measure_start(workplace, "footplate")
            results = interleave(["sbatch", "footplate"], lambda entrant: measure_start(workplace, entrant), rounds)
            rows += [row(f"{name}, until the first line", runs) for name, runs in results.items()]
            measure = f"wall time from a command until the first line, {LESS}"
            ratios["submit_over_sbatch"] = ratio(results, "footplate", "sbatch", "seconds", measure)
            figures["sbatch_to_first_line_s"] = median(results["sbatch"], "seconds")
            figures["submit_to_first_line_s"] = median(results["footplate"], "seconds")
        if options.only in (None, "requeue"):
            results = interleave(
                ["bare script", "Trainer"], lambda entrant: measure_requeue(workplace, entrant), rounds
            )
            rows += [row(f"{name}, requeued, until the first new step", runs) for name, runs in results.items()]
            measure = f"wall time from Slurm's second start until the first new step, {LESS}"
            ratios["requeued_trainer_over_bare"] = ratio(results, "Trainer", "bare script", "seconds", measure)
            figures["requeue_to_slurms_start_s"] = median(results["Trainer"], "slurm_s")
            figures["start_to_new_step_s"] = median(results["Trainer"], "seconds")
            figures["bare_start_to_new_step_s"] = median(results["bare script"], "seconds")
        if options.only == "limit" or (options.only is None and not options.quick):
            figures |= measure_limit(workplace)
    for name, value in figures.items():
        print(f"{name:36} {value:10.3f}")
    report(
        "slurm", "Jobs on Slurm: seconds until the first line, and until the first new step", {"seconds": "s"}, rows,
        ratios, figures, host, ["footplate", "torch"], path, add=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
