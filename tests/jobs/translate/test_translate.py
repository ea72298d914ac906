"""The guide's two example configurations in other systems' formats, and any job: a valid document, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import ChainMap, Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.catalog.rows import catalog
from footplate.jobs.spec import flags
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.problems import SpecError
from footplate.jobs.spec.resolving import ResolvedJob, resolve
from footplate.jobs.spec.yamlfile import parse
from footplate.jobs.translate import TARGETS, Translation, Untranslatable, translate
from footplate.jobs.translate.ray import KINDS
from footplate.jobs.translate.vertex import ACCELERATORS
from jobs.test_spec import ATTACHED, LEGACY
from jobs.translate.checks import (
    check_jobset,
    check_kubeflow,
    check_ray,
    check_trainjob,
    check_vertex,
    run_pod,
    run_slurm,
)

PROGRAM = {
    "module-name": "trainer.task", "job-dir": "gs://my-bucket/job", "region": "europe-west1", "runtime-version": "2.11",
    "packages": "gs://my-bucket/trainer-0.1.tar.gz",
}  # fmt: skip
IMAGE = {
    "module-name": "trainer.task",
    "job-dir": "gs://my-bucket/job",
    "master-image-uri": "gcr.io/my-project/trainer",
}
ARGS = ("--lr", "0.1")


def job(text: str = "", given: dict[str, str] | None = None, args: tuple[str, ...] = ARGS) -> ResolvedJob:
    return resolve(draft(parse(text), given or {}, args, "my_job", partial=True))


def refusal(to: str, *about: ResolvedJob) -> list[str]:
    with pytest.raises(Untranslatable) as raised:
        translate(*about, to)
    return raised.value.problems


@pytest.mark.parametrize("text", [LEGACY, ATTACHED])
def test_the_guides_examples_are_custom_jobs_of_vertex(text):
    translation = translate(job(text, PROGRAM), "vertex")
    python = {
        "packageUris": ["gs://my-bucket/trainer-0.1.tar.gz"],
        "pythonModule": "trainer.task",
        "args": ["--lr", "0.1", "--job-dir", "gs://my-bucket/job"],
    }
    place = "europe-docker.pkg.dev/vertex-ai/training"
    big = {"executorImageUri": f"{place}/tf-gpu.2-11.py310:latest", **python}
    small = {"executorImageUri": f"{place}/tf-cpu.2-11.py310:latest", **python}
    k80 = {
        "machineType": "n1-standard-16" if text == LEGACY else "n1-highcpu-16",
        "acceleratorType": "NVIDIA_TESLA_K80",
    }
    servers = {"machineType": "n1-highmem-8"}
    assert translation.document == {
        "displayName": "my_job",
        "jobSpec": {
            "workerPoolSpecs": [
                {"machineSpec": {**k80, "acceleratorCount": 4}, "replicaCount": "1", "pythonPackageSpec": big},
                {"machineSpec": {**k80, "acceleratorCount": 4}, "replicaCount": "9", "pythonPackageSpec": big},
                {"machineSpec": servers, "replicaCount": "3", "pythonPackageSpec": small},
            ],
            "scheduling": {"timeout": "604800s", "restartJobOnWorkerRestart": True},
            "baseOutputDirectory": {"outputUriPrefix": "gs://my-bucket/job"},
        },
    }
    check_vertex(translation.document)
    assert (
        "https://europe-west1-aiplatform.googleapis.com/v1/projects/PROJECT/locations/europe-west1/"
        in translation.notes[0]
    )


def test_roles_of_vertex_are_places_so_one_that_is_not_there_leaves_its_place_empty():
    given = {
        **IMAGE,
        "master-machine-type": "n1-standard-4",
        "evaluator-machine-type": "n1-standard-4",
        "evaluator-count": "1",
    }
    pools = translate(job("", given), "vertex").document["jobSpec"]["workerPoolSpecs"]
    assert [pool.get("replicaCount") for pool in pools] == ["1", None, None, "1"]
    assert pools[0]["containerSpec"] == {
        "imageUri": "gcr.io/my-project/trainer",
        "command": ["python", "-m", "trainer.task"],
        "args": ["--lr", "0.1", "--job-dir", "gs://my-bucket/job"],
    }


def test_what_vertex_needs_and_a_job_lacks_is_said_all_at_once():
    given = {"module-name": "trainer.task", "job-dir": "runs/job", "runtime-version": "1.15"}
    message = refusal("vertex", job(ATTACHED, given))
    assert [line.partition(":")[0] for line in message] == [
        "There is no package", "runtimeVersion 1.15", "jobDir runs/job"
    ]  # fmt: skip


def test_without_a_runtime_version_vertex_runs_googles_image_with_pytorch():
    translation = translate(
        job(ATTACHED, {key: value for key, value in PROGRAM.items() if key != "runtime-version"}), "vertex"
    )
    place = "europe-docker.pkg.dev/vertex-ai/training"
    images = [
        pool["pythonPackageSpec"]["executorImageUri"] for pool in translation.document["jobSpec"]["workerPoolSpecs"]
    ]
    assert images == [*[f"{place}/pytorch-gpu.2-4.py310:latest"] * 2, f"{place}/pytorch-cpu.2-4.py310:latest"]
    assert any(
        note.startswith("There is no runtimeVersion: Google's image with PyTorch 2.4 runs it.")
        for note in translation.notes
    )


def test_an_image_of_googles_that_is_named_installs_the_packages():
    image = "us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-3.py310:latest"
    given = {**PROGRAM, "master-image-uri": image}
    del given["runtime-version"]
    (pool,) = translate(job("", given), "vertex").document["jobSpec"]["workerPoolSpecs"]
    assert pool["pythonPackageSpec"]["executorImageUri"] == image
    assert pool["pythonPackageSpec"]["packageUris"] == ["gs://my-bucket/trainer-0.1.tar.gz"]


def test_what_vertex_has_no_word_for_is_noted():
    notes = translate(job("", {**PROGRAM, "priority": "3", "python-version": "3.7"}), "vertex").notes
    assert "scheduling.priority is left out: Vertex AI has no priorities." in notes
    assert "pythonVersion is left out: Vertex AI has the image's." in notes


def test_the_keys_of_a_job_that_vertex_knows_too_go_along():
    text = """
labels: {team: vision}
trainingInput:
  scheduling: {maxRunningTime: 2h}
  network: projects/1/global/networks/n
  serviceAccount: me@project.iam.gserviceaccount.com
  enableWebAccess: true
  encryptionConfig: {kmsKeyName: k}
  masterType: n1-standard-8
  masterConfig: {diskConfig: {bootDiskType: pd-ssd, bootDiskSizeGb: 200}}
"""
    document = translate(job(text, PROGRAM), "vertex").document
    check_vertex(document)
    spec = document["jobSpec"]
    assert spec["scheduling"]["timeout"] == "7200s"
    assert spec["workerPoolSpecs"][0]["diskSpec"] == {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 200}
    assert (spec["network"], spec["enableWebAccess"]) == ("projects/1/global/networks/n", True)
    assert document["labels"] == {"team": "vision"}
    assert document["encryptionSpec"] == {"kmsKeyName": "k"}


def test_every_accelerator_of_the_catalog_is_known_to_vertex_and_to_ray_or_wants_a_topology():
    from jobs.translate.checks import SCHEMA

    assert set(SCHEMA["enums"]["AcceleratorType"]) >= ACCELERATORS
    assert {name for name, row in catalog().accelerators.items() if row.kind == "gpu"} == set(KINDS) == {
        name for name in ACCELERATORS if name.startswith("NVIDIA")
    }  # fmt: skip


def test_an_example_without_its_parameter_servers_is_ranks_on_ray():
    translation = translate(
        job(ATTACHED, {"module-name": "trainer.task", "parameter-server-count": "0"}, ("it's", "$(ls)")), "ray"
    )
    assert translation.document == {
        "entrypoint": "footplate run --backend ray --np 10 -m trainer.task -- 'it'\"'\"'s' '$(ls)'",
        "runtime_env": {},
        "submission_id": "my_job",
    }
    check_ray(translation.document)


def test_a_master_alone_is_an_entry_point_on_ray_with_the_resources_of_its_machine():
    given = {
        "module-name": "trainer.task",
        "master-machine-type": "n1-standard-8",
        "master-accelerator": "count=2,type=t4",
    }
    document = translate(
        job("", {**given, "packages": "s3://bucket/trainer.whl", "labels": "team=vision"}), "ray"
    ).document
    assert document == {
        "entrypoint": "python -m trainer.task --lr 0.1",
        "runtime_env": {"py_modules": ["s3://bucket/trainer.whl"]},
        "submission_id": "my_job",
        "metadata": {"team": "vision"},
        "entrypoint_num_cpus": 8,
        "entrypoint_num_gpus": 2,
        "entrypoint_memory": 30 * 2**30,
        "entrypoint_resources": {"accelerator_type:T4": 0.001},
    }
    check_ray(document)


@pytest.mark.parametrize("to", ["ray", "slurm", "jobset", "trainjob"])
def test_parameter_servers_are_refused_where_there_are_ranks_alone(to):
    (reason,) = refusal(to, job(ATTACHED, IMAGE))
    assert "no parameter server as a separate role" in reason


def test_a_master_and_workers_are_a_pytorchjob_of_kubeflow():
    text = translate(
        job(ATTACHED, {**IMAGE, "parameter-server-count": "0", "labels": "team=vision"}), "kubeflow"
    ).document
    assert yaml.safe_dump(text, sort_keys=False) == KUBEFLOW_MASTER
    check_kubeflow(text)


KUBEFLOW_MASTER = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: my-job
  labels:
    team: vision
spec:
  runPolicy:
    activeDeadlineSeconds: 604800
    cleanPodPolicy: Running
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          nodeSelector:
            node.kubernetes.io/instance-type: n1-highcpu-16
            cloud.google.com/gke-accelerator: nvidia-tesla-k80
          containers:
          - name: pytorch
            image: gcr.io/my-project/trainer
            command:
            - python
            - -m
            - trainer.task
            args:
            - --lr
            - '0.1'
            - --job-dir
            - gs://my-bucket/job
            resources:
              limits:
                nvidia.com/gpu: 4
    Worker:
      replicas: 9
      restartPolicy: OnFailure
      template:
        spec:
          nodeSelector:
            node.kubernetes.io/instance-type: n1-highcpu-16
            cloud.google.com/gke-accelerator: nvidia-tesla-k80
          containers:
          - name: pytorch
            image: gcr.io/my-project/trainer
            command:
            - python
            - -m
            - trainer.task
            args:
            - --lr
            - '0.1'
            - --job-dir
            - gs://my-bucket/job
            resources:
              limits:
                nvidia.com/gpu: 4
"""


@pytest.mark.parametrize("text", [LEGACY, ATTACHED])
def test_the_guides_examples_are_tfjobs_of_kubeflow(text):
    document = translate(job(text, IMAGE), "kubeflow").document
    check_kubeflow(document)
    assert document["kind"] == "TFJob"
    replicas = document["spec"]["tfReplicaSpecs"]
    assert {role: replica["replicas"] for role, replica in replicas.items()} == {"Chief": 1, "Worker": 9, "PS": 3}
    assert "resources" not in replicas["PS"]["template"]["spec"]["containers"][0]


def test_kubernetes_would_expand_a_dollar_so_it_is_doubled():
    document = translate(job("", IMAGE, ("$(HOME)", "$HOME")), "kubeflow").document
    (runs,) = document["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert runs["args"][:2] == ["$$(HOME)", "$HOME"]


def test_what_kubeflow_needs_and_a_job_lacks_is_said_all_at_once():
    message = refusal("kubeflow", job("labels: {team-: a}", PROGRAM))
    assert [line.partition(":")[0] for line in message] == [
        "The master has no image", "packageUris", "The label team-=a"
    ]  # fmt: skip


WORLD = {**IMAGE, "parameter-server-count": "0", "labels": "team=vision", "service-account": "runner"}
POD = {"jobset.sigs.k8s.io/jobset-uid": "u-1", "jobset.sigs.k8s.io/restart-attempt": "2"}
SHOW = """
import os, sys
names = "JOB_ID JOB_ATTEMPT JOB_NAME JOB_DIR".split()
print(*(os.environ.get(f"FOOTPLATE_{name}") for name in names))
print(*(os.environ.get(name) for name in "RANK WORLD_SIZE NODE_RANK LOCAL_RANK LOCAL_WORLD_SIZE".split()))
print(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
print(sys.argv[1:])
"""


def container_of(document: dict, role: str = "node") -> tuple[dict, dict]:
    """A JobSet's container and pod, or those that Kubeflow Trainer makes of a TrainJob and its runtime."""
    if document["kind"] == "JobSet":
        jobs = {job["name"]: job["template"]["spec"] for job in document["spec"]["replicatedJobs"]}
        pod = jobs[role]["template"]["spec"]
        return pod["containers"][0], pod
    runtime, train_job = document["items"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return {**pod["containers"][0], **train_job["spec"]["trainer"]}, pod


def test_master_and_workers_are_a_jobset_whose_pods_restart_together():
    document = translate(job(ATTACHED, {**WORLD, "worker-machine-type": "n1-standard-8"}), "jobset").document
    check_jobset(document)
    assert document["metadata"] == {"name": "my-job", "labels": {"team": "vision"}}
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 10
    assert [rule["action"] for rule in document["spec"]["failurePolicy"]["rules"]] == ["FailJobSet", "FailJobSet"]
    jobs = {job["name"]: job["template"]["spec"] for job in document["spec"]["replicatedJobs"]}
    assert {role: spec["completions"] for role, spec in jobs.items()} == {"master": 1, "worker": 9}
    for spec in jobs.values():
        assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (0, 604800)
        assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    container, pod = container_of(document, "master")
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["serviceAccountName"] == "runner"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    selectors = [container_of(document, role)[1]["nodeSelector"] for role in jobs]
    assert [selector["node.kubernetes.io/instance-type"] for selector in selectors] == [
        "n1-highcpu-16",
        "n1-standard-8",
    ]


def test_a_trainjob_names_its_nodes_and_its_runtime_how_they_restart():
    document = translate(job(ATTACHED, WORLD), "trainjob").document
    check_trainjob(document)
    runtime, train_job = document["items"]
    assert train_job["spec"]["activeDeadlineSeconds"] == 604800
    trainer = train_job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (10, 1)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 10
    assert container_of(document)[1]["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize("to", ["jobset", "trainjob"])
def test_a_pod_knows_its_job_its_attempt_and_its_rank(to, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    given = {**WORLD, "module-name": "show", "job-dir": "s3://bucket/it's"}
    document = translate(job(ATTACHED, given, ("$HOME", "$(HOME)")), to).document
    container, _ = container_of(document, "worker")
    set_by_kubeflow = {
        "PET_NNODES": "10", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "4",
        "PET_MASTER_ADDR": "my-job-node-0-0.my-job", "PET_MASTER_PORT": "29500",
    }  # fmt: skip
    # The fourth worker is rank 4: the master is rank 0.
    added = set_by_kubeflow if to == "trainjob" else {"JOB_COMPLETION_INDEX": "3"}
    done = run_pod(container["command"], container["args"], container["env"], POD, tmp_path, **added)
    host = "my-job-node-0-0.my-job" if to == "trainjob" else "my-job-master-0-0.my-job"
    assert done.stdout.splitlines() == [
        "jobset-u-1 3 my_job s3://bucket/it's",
        "4 10 4 0 1",
        f"{host} 29500",
        "['$HOME', '$(HOME)', '--job-dir', \"s3://bucket/it's\"]",
    ], done.stderr


@pytest.mark.parametrize("to", ["jobset", "trainjob"])
def test_a_pod_alone_has_no_ranks_so_that_its_trainer_may_start_processes(to, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    container, _ = container_of(translate(job("", {**IMAGE, "module-name": "show"}), to).document, "master")
    alone = {"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "1", "PET_NODE_RANK": "0"}
    done = run_pod(container["command"], container["args"], container["env"], POD, tmp_path, **alone)
    assert done.stdout.splitlines()[1:3] == ["None None None None None", "None None"], done.stderr
    old = run_pod(container["command"], container["args"], container["env"], {}, tmp_path, **alone)
    assert old.returncode != 0
    assert "expected JobSet 0.9 or newer" in old.stderr


@pytest.mark.parametrize("to", ["jobset", "trainjob"])
def test_the_job_directory_of_a_pod_is_on_a_volume(to):
    container, pod = container_of(translate(job("", {**IMAGE, "job-dir": "/data/out"}, ()), to).document, "master")
    assert {"name": "job-dir", "mountPath": "/data/out"} in container["volumeMounts"]
    assert pod["volumes"][1] == {"name": "job-dir", "persistentVolumeClaim": {"claimName": "my-job"}}


def test_a_job_whose_pod_is_made_again_resumes_its_trainer(tmp_path):
    (tmp_path / "task.py").write_text(TRAINS.replace("SLURM_RESTART_COUNT", "JOBSET_RESTARTS"))
    given = {**IMAGE, "module-name": "task", "job-dir": str(tmp_path / "out")}
    container, _ = container_of(translate(job("", given, ()), "trainjob").document, "master")

    def attempt(number: int) -> subprocess.CompletedProcess[str]:
        labels = {**POD, "jobset.sigs.k8s.io/restart-attempt": str(number)}
        added = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "JOB_COMPLETION_INDEX": "0", "PET_NODE_RANK": "0"}
        command = [*container["command"], sys.executable, *container["args"][1:]]
        return run_pod(command, [], container["env"], labels, tmp_path, **added)

    assert attempt(0).returncode == 143
    resumed = attempt(1)
    assert resumed.returncode == 0, resumed.stderr
    assert "step 0" not in resumed.stdout
    assert "step 5" in resumed.stdout


@pytest.mark.parametrize("to", ["jobset", "trainjob"])
def test_a_pods_secrets_come_from_a_secret_and_an_argument_that_shows_one_is_refused(to):
    container, _ = container_of(translate(job("", IMAGE), to).document, "master")
    assert container["envFrom"] == [{"secretRef": {"name": "my-job-secrets", "optional": True}}]
    secret = ("--hf-token", "abc", "--api_key=abc", "--store", "https://me:abc@host", "--password", "-v")
    message = refusal(to, job("", IMAGE, secret))
    assert [line.partition(":")[0] for line in message] == [
        "The argument --api_key", "The argument --hf-token", "The argument --store"
    ]  # fmt: skip
    translate(job("", IMAGE, ("--pad-token", "0", "--max-tokens=4096", "--key", "id", "a=b://c:d@e")), to)
    assert not any("abc" in line for line in message)


@pytest.mark.parametrize("to", ["jobset", "trainjob"])
def test_what_pods_need_and_a_job_lacks_is_said_all_at_once(to):
    message = refusal(to, job("", {"module-name": "trainer.task", "job-dir": "runs/job"}))
    assert [line.partition(":")[0] for line in message] == ["jobDir runs/job", "The master has no image"]


SLURM = """\
#!/bin/bash
#SBATCH --job-name=my_job
#SBATCH --nodes=10
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=14745M
#SBATCH --gpus-per-node=4
#SBATCH --time=10080
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
export FOOTPLATE_JOB_ID="slurm-$SLURM_JOB_ID" FOOTPLATE_JOB_ATTEMPT="$((${SLURM_RESTART_COUNT:-0} + 1))"
export FOOTPLATE_JOB_NAME=my_job
export FOOTPLATE_JOB_DIR='runs/my job'
HOSTS="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
MASTER_ADDR="${HOSTS%%$'\\n'*}"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT WORLD_SIZE="$SLURM_NTASKS"

# Slurm sends SIGUSR1 to this shell 120 s before the time limit. The program gets SIGTERM, saves and ends.
requeue=
save_and_requeue() {
  requeue=yes
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap save_and_requeue USR1

srun --kill-on-bad-exit=1 bash -c \
'export RANK="$SLURM_PROCID" NODE_RANK="$SLURM_NODEID" LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE=1; exec "$@"' \\
  task python -m trainer.task --lr 0.1 --job-dir 'runs/my job' &
program=$!

status=0
wait "$program" || status=$?
if [ -n "$requeue" ]; then  # the signal may have interrupted the wait
  status=0
  wait "$program" || status=$?
fi
if [ -n "$requeue" ] && [ "$status" -ne 0 ]; then
  # Slurm ends this shell when it has requeued the job. If the shell ended before, Slurm could forget the requeue.
  trap '' TERM
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$status"
"""


def test_an_example_without_its_parameter_servers_is_a_script_for_sbatch(tmp_path):
    given = {"module-name": "trainer.task", "parameter-server-count": "0", "job-dir": "runs/my job"}
    translation = translate(job(ATTACHED, given), "slurm")
    assert translation.document == SLURM
    told, words = run_slurm(translation.document, tmp_path)
    assert told == ["1", "2", "1", "0", "1", "node-a", "20007", "runs/my job"]
    assert words == ["-m", "trainer.task", "--lr", "0.1", "--job-dir", "runs/my job"]


TRAINS = """
import os, pathlib, torch
import footplate as fp

class Net(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        print("step", self.global_step, flush=True)
        if self.global_step == 2 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), 15)
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.ones(6, 4))
fp.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False).fit(
    Net(), torch.utils.data.DataLoader(data))
"""


def test_a_job_that_slurm_requeues_resumes_its_trainer(tmp_path):
    (tmp_path / "task.py").write_text(TRAINS)
    given = {"module-name": "task", "job-dir": str(tmp_path / "out")}
    script = translate(job("", given), "slurm").document
    with pytest.raises(subprocess.CalledProcessError):
        run_real_slurm(script, tmp_path)
    resumed = run_real_slurm(script, tmp_path, SLURM_RESTART_COUNT="1")
    assert "step 0" not in resumed
    assert "step 5" in resumed


def test_a_job_at_slurms_time_limit_ends_by_sigterm_and_is_requeued(tmp_path):
    """The script's shell receives the signal. The program gets SIGTERM, and has as long as it needs."""
    script = translate(job("", {"module-name": "task"}), "slurm").document
    (tmp_path / "task.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.5); print('saved', flush=True); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "os.kill(int(os.environ['SCRIPT']), signal.SIGUSR1)\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_real_slurm(f"export SCRIPT=$$\n{script}", tmp_path)
    assert caught.value.returncode == 143
    assert caught.value.stdout == "saved\n"
    assert (tmp_path / "requeued").read_text() == "7\n"
    assert (tmp_path / "slept").read_text() == "60\n"


def run_real_slurm(script: str, directory: Path, **more: str) -> str:
    """Run an sbatch script on one node, with the real program. Return its output."""
    path = directory / "bin"
    path.mkdir(exist_ok=True)
    stand_ins = {
        "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo 127.0.0.1; fi',
        "scancel": 'kill -s "${1#--signal=}" "$(cat pid)"',
        "sleep": 'echo "$1" > slept',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_PROCID=0 SLURM_NODEID=0 SLURM_LOCALID=0 exec "$@"',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, text in stand_ins.items():
        (path / name).write_text(f"#!/bin/bash\n{text}\n")
        (path / name).chmod(0o755)
    environ = {
        **os.environ, "PATH": f"{path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-a", "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "1", **more,
    }  # fmt: skip
    return subprocess.run(
        ["bash"], input=script, env=environ, capture_output=True, check=True, text=True, cwd=directory
    ).stdout


NASTY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.text(
    "'\"$`\\!\n #;&|*~- a(){}", max_size=12
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(NASTY, max_size=4))
def test_arguments_reach_a_program_as_they_are_through_slurms_shell_and_rays(args):
    with tempfile.TemporaryDirectory() as directory:
        script = translate(job("", {"module-name": "trainer.task"}, tuple(args)), "slurm").document
        assert run_slurm(script, Path(directory))[1] == ["-m", "trainer.task", *args]
        entrypoint = translate(job("", {"module-name": "trainer.task"}, tuple(args)), "ray").document["entrypoint"]
        shown = subprocess.run(
            ["bash", "-c", f"python() {{ printf '%s\\0' \"$@\"; }}; {entrypoint}"], capture_output=True, check=True
        )
        assert shown.stdout.decode().split("\0")[:-1] == ["-m", "trainer.task", *args]


ROLES = ("master", "worker", "parameter-server", "evaluator")
MACHINES = st.sampled_from(
    ["n1-standard-8", "n1-highcpu-16", "a2-highgpu-1g", "standard_gpu", "cloud_tpu", "large_model", "ct5lp-hightpu-4t"]
)
ALIKE = st.sampled_from(["n1-standard-8", "a2-highgpu-1g", "large_model"]).map(
    lambda name: {f"{role}-machine-type": name for role in ROLES}
)
LABELS = st.text("ab-_", min_size=1, max_size=3)
PROGRAMS = st.sampled_from([{}, PROGRAM, IMAGE, {"module-name": "trainer.task"}])
KEYS = {
    **{f"{role}-count": st.sampled_from(["0", "1", "2"]) for role in ROLES[1:]},
    "max-running-time": st.sampled_from(["0.5s", "90m", "7200s", "1.5h", "30d"]),
    "priority": st.just("7"),
    "use-chief-in-tf-config": st.just("true"),
    "service-account": st.sampled_from(["me@a.iam.gserviceaccount.com", "runner"]),
    "labels": st.tuples(LABELS, LABELS).map("=".join),
    "region": st.sampled_from(["us-central1", "europe-west4", "asia-east1"]),
}
ODD_KEYS = {
    **{f"{role}-machine-type": MACHINES for role in ROLES},
    **{f"{role}-accelerator": st.just("count=4,type=t4") for role in ROLES[:2]},
    **{f"{role}-image-uri": st.just("gcr.io/a/b:1") for role in ROLES[:2]},
    "job-dir": st.sampled_from(["gs://bucket/job", "s3://bucket/job", "/data/$(A)", "runs/it's"]),
    "packages": st.sampled_from(["gs://bucket/a.tar.gz", "s3://bucket/a.whl", "a.zip", "gs://bucket/a.whl"]),
    "runtime-version": st.sampled_from(["1.15", "2.1", "2.11", "2.10", "9.9"]),
}
CONTAINERS = st.sampled_from(
    ["", "{diskConfig: {bootDiskSizeGb: 100}}", "{containerCommand: [run, $(A)]}", "{containerArgs: [--fast]}",
     "{tpuTfVersion: 2.11}"]
)  # fmt: skip
TUNED = "  hyperparameters: {goal: MINIMIZE, params: [{parameterName: a, type: CATEGORICAL, categoricalValues: [b]}]}\n"
PLAIN = st.tuples(ALIKE, PROGRAMS, st.fixed_dictionaries({}, optional=KEYS)).map(lambda parts: dict(ChainMap(*parts)))
ODD = st.fixed_dictionaries({}, optional={**KEYS, **ODD_KEYS, "module-name": st.just("trainer.task")})
JOBS = st.tuples(
    PLAIN | ODD, CONTAINERS, st.sampled_from([False] * 7 + [True]), st.lists(NASTY, max_size=3),
    st.text("aZ_9", min_size=1, max_size=60).map(lambda rest: f"j{rest}"),
)  # fmt: skip
CHECKS = {
    "vertex": check_vertex, "ray": check_ray, "kubeflow": check_kubeflow, "jobset": check_jobset,
    "trainjob": check_trainjob,
}  # fmt: skip


def test_there_is_a_flag_for_each_choice():
    assert {*KEYS, *ODD_KEYS, *PROGRAM, *IMAGE} <= set(flags.KEYS)


@pytest.mark.parametrize("to", sorted(TARGETS))
def test_any_job_is_a_valid_document_or_one_refusal(to):
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(JOBS)
    def answer(described):
        given, container, tuned, args, name = described
        text = (
            "trainingInput:\n"
            + (f"  masterConfig: {container}\n" if container else "")
            + (TUNED if tuned else "  args:\n")
        )
        asked = draft(parse(text), given, args, name, partial=True)
        try:
            resolved = resolve(asked)
        except SpecError:
            return
        before = json.dumps(resolved.to_dict())
        translation, refused = outcome(resolved, to)
        assert all(reason.endswith(".") for reason in refused)
        if translation is None:
            assert refused
            seen["refused"] += 1
            return
        seen["translated"] += 1
        if to in CHECKS:
            CHECKS[to](translation.document)
        else:
            subprocess.run(["bash", "-n"], input=translation.document, text=True, check=True)
        assert all(note.endswith(".") for note in translation.notes)
        assert json.dumps(resolved.to_dict()) == before

    answer()
    assert min(seen["translated"], seen["refused"]) >= 5, seen  # else this shows nothing


def outcome(resolved: ResolvedJob, to: str) -> tuple[Translation | None, list[str]]:
    try:
        return translate(resolved, to), []
    except Untranslatable as error:
        return None, error.problems
