"""The first program in each replica on Vertex AI: it sets a job's variables, then becomes the job's program.

    python -m footplate_launch trainer.task --lr 0.1                       Google's image, which has installed this module
    python /gcs/BUCKET/…/launch.py PACKAGE… -- trainer.task --lr 0.1       a user's image: it also installs the packages

Vertex AI describes the cluster in CLUSTER_SPEC. The variables for torch and a trainer are derived from it, as on this
machine (`jobs/cluster_env.py`). Variables that are set already stay. The program uses the standard library only: what it
imports from Footplate is put in the import's place when it is sent (`distributions.py`).

In the master of a tuning's trial it doesn't become the program, but runs it, and writes new lines of the trial's reports
into the output, each with a mark. `logs.py` finds them there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from footplate.jobs.tuning.report_lines import HYPERTUNE, TRAINER, NewLines

ROLES = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
MARK = "footplate-trial"
OF_MASTER = ("FOOTPLATE_TRIAL_METRIC", "FOOTPLATE_TRIAL_TUNING")
# Between two looks at the reports, and at a signal that is to be passed on.
PACE_S = 0.5


def variables(spec):
    """Derive the variables of a replica from its CLUSTER_SPEC."""
    cluster, task = spec.get("cluster", {}), spec.get("task", {})
    pool, index = task.get("type", "workerpool0"), int(task.get("index", 0))
    named = {ROLES[name]: list(hosts) for name, hosts in cluster.items() if name in ROLES and name != "workerpool3"}
    described = {"type": ROLES.get(pool, pool), "index": index}
    if "CLOUD_ML_TRIAL_ID" in os.environ:
        described["trial"] = os.environ["CLOUD_ML_TRIAL_ID"]
    environment = {"TF_CONFIG": json.dumps({"cluster": named, "task": described, "environment": "cloud"})}
    masters, workers = cluster.get("workerpool0", []), cluster.get("workerpool1", [])
    if workers and pool in ("workerpool0", "workerpool1"):
        rank = index + (len(masters) if pool == "workerpool1" else 0)
        address, _, port = masters[0].rpartition(":")
        environment.update(
            RANK=str(rank), WORLD_SIZE=str(len(masters) + len(workers)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
            NODE_RANK=str(rank), GROUP_RANK=str(rank), MASTER_ADDR=address, MASTER_PORT=port,
        )  # fmt: skip
    return environment


def run_trial(command, directory):
    """Run the program of a trial's master, and write its reports into the output. Returns its exit code."""
    os.environ["FOOTPLATE_TRIAL_REPORTS"] = str(directory / TRAINER)
    reports, asked = NewLines(directory), []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    process = subprocess.Popen(command)
    ended = False
    while not ended:
        if asked:
            process.send_signal(asked.pop())
        with contextlib.suppress(subprocess.TimeoutExpired):
            ended = process.wait(PACE_S) is not None
        for source, lines in reports.read():
            for line in lines.splitlines():
                os.write(1, b"%s %s %s\n" % (MARK.encode(), source.encode(), line))
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main(words):
    """Install the packages, and become the program."""
    packages = []
    if "--" in words and words[0].endswith((".whl", ".zip", ".tar.gz")):
        end = words.index("--")
        packages, words = words[:end], words[end + 1 :]
    if packages:
        subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages])
    spec = json.loads(os.environ.get("CLUSTER_SPEC") or "{}")
    for name, value in variables(spec).items():
        os.environ.setdefault(name, value)
    command = [sys.executable, "-m", *words]
    if OF_MASTER[0] in os.environ:
        directory = Path(tempfile.mkdtemp(prefix="footplate-trial-"))
        os.environ["CLOUD_ML_HP_METRIC_FILE"] = str(directory / HYPERTUNE)
        if spec.get("task", {}).get("type", "workerpool0") == "workerpool0":
            sys.exit(run_trial(command, directory))
        # The reports of the other replicas don't count.
        for name in OF_MASTER:
            os.environ.pop(name, None)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
