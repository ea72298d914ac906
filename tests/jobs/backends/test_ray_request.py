"""Requests to Ray: pure functions, tested without a cluster."""

from __future__ import annotations

import json

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs.backends import get_backend
from footplate.jobs.backends.ray.entrypoint import VARIABLE
from footplate.jobs.cluster_env import replica_ids
from footplate.jobs.execution import Execution
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import ResolvedJob, resolve
from footplate.jobs.spec.yamlfile import parse
from jobs.test_spec import ATTACHED, LEGACY

RAY = get_backend("ray")
PLACE = {"address": "http://10.0.0.1:8265"}


def job(text: str, **flags: str) -> ResolvedJob:
    given = {"module-name": "trainer.task", "region": "us-central1", "job-dir": "gs://bucket/out"} | flags
    return resolve(draft(parse(text), given, ("--epochs", "2"), "my_job"))


@pytest.mark.parametrize("text", [LEGACY, ATTACHED])
def test_the_documents_two_examples_become_ray_jobs(text: str):
    resolved = job(text)
    asked = RAY.request(resolved, PLACE, None)
    assert asked is not None
    assert asked["entrypoint"] == "exec python -P -m footplate.jobs.backends.ray.entrypoint"
    task = json.loads(asked["runtime_env"]["env_vars"][VARIABLE])
    assert task["plan"]["arguments"] == ["-m", "trainer.task", "--epochs", "2", "--job-dir", "gs://bucket/out"]
    execution = Execution.from_dict(task["plan"])
    assert (
        sum(need["count"] for need in task["needs"])
        == len(replica_ids(resolved))
        == sum(replica.count for replica in execution.replicas)
    )
    (master, *_) = task["needs"]
    assert (master["gpus"], master["kind"]) == (4, "K80")


def test_no_secret_and_no_path_of_this_machine_is_sent(monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "FOOTPLATE_TOKEN", "HF_TOKEN", "NCCL_SECRET", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@mlflow:5000")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_HOME", "/home/me/torch")
    sent = json.dumps(RAY.request(job("trainingInput: {scaleTier: BASIC}"), PLACE, None))
    assert "NCCL_DEBUG" in sent
    assert "s3cret" not in sent
    assert "/home/me" not in sent


def test_what_cannot_run_on_ray_is_refused_at_once():
    with pytest.raises(ConfigError, match="topology"):
        RAY.request(job("trainingInput: {scaleTier: BASIC_TPU}"), PLACE, None)


def test_the_cluster_is_found_as_rays_tools_find_it(monkeypatch: pytest.MonkeyPatch):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert RAY.destination({}) == {"address": "http://127.0.0.1:8265"}
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.2:8265/")
    assert RAY.destination({"address": None}) == {"address": "http://10.0.0.2:8265"}
    assert RAY.destination({"address": "https://ray.example"}) == {"address": "https://ray.example"}
    with pytest.raises(
        ConfigError, match=r"ray://10\.0\.0\.1:10001: expected the address of a Ray cluster's dashboard"
    ):
        RAY.destination({"address": "ray://10.0.0.1:10001"})


def test_an_address_with_a_secret_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match="contains a user") as refused:
        RAY.destination({"address": "https://me:s3cret@ray.example"})
    assert "s3cret" not in str(refused.value)


def test_a_cluster_that_is_not_there_is_told_at_submission():
    with pytest.raises(ConfigError, match=r"No Ray cluster takes jobs at http://127\.0\.0\.1:1: .*`ray start --head`"):
        RAY.check(job("trainingInput: {scaleTier: BASIC}"), {"address": "http://127.0.0.1:1"})
