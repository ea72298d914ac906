"""The requests, parsed by the protos of Google's own libraries, and their part of a package."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from object_storage import serve_gcs
from ports import free_port
from pyarrow.fs import GcsFileSystem

from footplate.cli.main import main
from footplate.core.errors import ConfigError
from footplate.jobs import process_env
from footplate.jobs.backends.contract import Task
from footplate.jobs.backends.vertex import BACKEND
from footplate.jobs.backends.vertex.attempt_record import RecordFile
from footplate.jobs.backends.vertex.bootstrap import variables
from footplate.jobs.backends.vertex.client import Client, Refused
from footplate.jobs.backends.vertex.distributions import Distribution, distributions, requirements, upload
from footplate.jobs.backends.vertex.logs import Output
from footplate.jobs.execution import Execution
from footplate.jobs.home import Home
from footplate.jobs.package import snapshot
from footplate.jobs.package.modules import take_program
from footplate.jobs.record import Job
from footplate.jobs.spec.draft import draft
from footplate.jobs.spec.resolving import ResolvedJob, resolve
from footplate.jobs.spec.yamlfile import parse
from footplate.jobs.states import State
from footplate.jobs.translate import Untranslatable
from jobs.backends.vertex_server import Cloud, serve
from jobs.test_spec import ATTACHED, LEGACY

PLACE = {"project": "my-project", "staging_bucket": "gs://my-bucket/staging"}
FLAGS = {"module-name": "trainer.task", "region": "us-central1", "job-dir": "gs://my-bucket/job"}


def strictly(name: str, document: dict[str, Any]) -> Any:
    """A message from JSON, by one of Google's own types: an unknown field, or a value of another type, is an error.

    Importing these types takes seconds, which only the process that runs these tests should spend.
    """
    from google.protobuf import json_format

    module, _, kind = name.rpartition(".")
    message = getattr(importlib.import_module(f"google.cloud.{module}"), kind)
    return json_format.ParseDict(document, message.pb()(), ignore_unknown_fields=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "trainer"
    (path / "deep").mkdir(parents=True)
    (path / "__init__.py").touch()
    (path / "task.py").write_text("import pathlib; print(pathlib.Path(__file__).with_name('words.txt').read_text())\n")
    (path / "words.txt").write_text("hello")
    (path / "deep" / "part.py").touch()
    return path


def job(text: str = "", args: tuple[str, ...] = ("--lr", "0.1"), **flags: str) -> ResolvedJob:
    given = {**FLAGS, **{key.replace("_", "-"): value for key, value in flags.items()}}
    return resolve(draft(parse(text), given, args, "My_Job"))


def request(resolved: ResolvedJob, package: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        program = take_program(package, resolved.spec.get("packageUris", ()), None, Path(scratch))
        return BACKEND.request(resolved, PLACE, program)


def pools(resolved: ResolvedJob, package: Path | None) -> list[dict[str, Any]]:
    asked = request(resolved, package)
    strictly("aiplatform_v1.types.custom_job.CustomJob", asked["body"])
    return asked["body"]["jobSpec"]["workerPoolSpecs"]


@pytest.mark.parametrize("text", [LEGACY, ATTACHED])
def test_the_documents_example_configurations_are_exact_requests(text, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "my-project")
    (tmp_path / "config.yaml").write_text(text)
    flags = {
        "package-path": package, "module-name": "trainer.task", "job-dir": "gs://my-bucket/job", "region": "us-central1",
        "config": tmp_path / "config.yaml", "backend": "vertex", "format": "json",
    }  # fmt: skip
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    own = ["--user_first_arg", "first_arg_value"]
    code = main(["jobs", "submit", "training", "my_job", *words, "--dry-run", "--", *own])
    out, err = capsys.readouterr()
    assert code == 0, err
    asked = json.loads(out)
    assert asked["method"] == "POST"
    assert asked["url"] == (
        "https://us-central1-aiplatform.googleapis.com/v1/projects/my-project/locations/us-central1/customJobs"
    )
    custom_job = strictly("aiplatform_v1.types.custom_job.CustomJob", asked["body"])
    assert [pool.replica_count for pool in custom_job.job_spec.worker_pool_specs] == [1, 9, 3]
    assert list(custom_job.job_spec.worker_pool_specs[1].python_package_spec.args) == [
        "trainer.task", "--user_first_arg", "first_arg_value", "--job-dir", "gs://my-bucket/job"
    ]  # fmt: skip
    assert custom_job.job_spec.scheduling.disable_retries
    assert "K80 no longer exists" in err
    assert "There is no runtimeVersion" in err


def test_a_region_a_project_and_a_bucket_are_needed_and_the_options_are_for_vertex_alone(
    package, tmp_path, monkeypatch, capsys
):
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    command = ["jobs", "submit", "training", "my_job", "--package-path", str(package), "--module-name", "trainer.task",
               "--job-dir", str(tmp_path), "--region", "us-central1", "--dry-run"]  # fmt: skip
    for more, says in (
        (["--backend", "vertex"], "give --staging-bucket"),
        (["--backend", "vertex", "--staging-bucket", "gs://my-bucket"], "give --project"),
        (
            ["--backend", "vertex", "--staging-bucket", "gs://my-bucket", "--project", "my-project"],
            "expected gs://bucket/path",
        ),
        (["--staging-bucket", "gs://my-bucket"], "--staging-bucket is for --backend vertex"),
    ):
        assert main([*command, *more]) != 0
        assert says in capsys.readouterr().err


def test_googles_images_install_the_package_and_images_of_the_users_do_so_from_the_mounted_bucket(package):
    (pool,) = pools(job(), package)
    trainer, launcher = pool["pythonPackageSpec"]["packageUris"]
    assert trainer.startswith("gs://my-bucket/staging/footplate/")
    assert trainer.endswith("/trainer-0.tar.gz")
    assert launcher.endswith("/footplate_launch-0.tar.gz")
    (pool,) = pools(job(master_image_uri="gcr.io/my-project/image"), package)
    assert pool["containerSpec"]["command"][1].startswith("/gcs/my-bucket/staging/footplate/")
    assert pool["containerSpec"]["command"][2:] == [
        trainer.replace("gs://", "/gcs/"), launcher.replace("gs://", "/gcs/"), "--", "trainer.task"
    ]  # fmt: skip
    assert pool["containerSpec"]["args"] == ["--lr", "0.1", "--job-dir", "gs://my-bucket/job"]
    image = "europe-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-3.py310:latest"
    (pool,) = pools(job(master_image_uri=image), package)
    assert pool["pythonPackageSpec"]["executorImageUri"] == image


def test_an_image_with_a_command_of_its_own_runs_it():
    text = (
        "trainingInput: {masterConfig: {imageUri: gcr.io/p/i, containerCommand: [/bin/train], containerArgs: [--fast]}}"
    )
    given = {"region": "us-central1", "master-machine-type": "n1-standard-4", "scale-tier": "CUSTOM"}
    (pool,) = pools(resolve(draft(parse(text), given, (), "my_job")), None)
    assert pool["containerSpec"]["command"] == ["/bin/train"]
    assert {variable["name"] for variable in pool["containerSpec"]["env"]} >= {
        "FOOTPLATE_JOB_ID",
        "FOOTPLATE_JOB_ATTEMPT",
    }


def test_what_vertex_cannot_run_is_refused_before_anything_is_sent(package):
    with pytest.raises(Untranslatable, match=r"runtimeVersion 1\.15: no image of Google's is known"):
        BACKEND.check(job(runtime_version="1.15"), PLACE)


def test_it_is_told_what_vertex_leaves_out_but_not_what_the_supervisor_sees_to(package):
    before = BACKEND.check(job(), PLACE)
    assert BACKEND.check(job(max_wait_time="1h"), PLACE) == before
    said = {*BACKEND.check(job(priority="7"), PLACE)} - {*before}
    assert said == {"scheduling.priority is left out: Vertex AI has no priorities."}


def test_a_job_of_the_store_makes_the_same_request_as_when_it_was_submitted(package):
    resolved = job(ATTACHED, labels="team=vision")
    again = ResolvedJob.from_dict(json.loads(json.dumps(resolved.to_dict())))
    assert again == resolved
    assert request(again, package) == request(resolved, package)


def test_google_is_asked_as_the_account_that_submitted_the_job_whoever_starts_its_supervisor(
    package, tmp_path, monkeypatch
):
    resolved, home = job(), Home(tmp_path / "home")
    plan = Execution.of(resolved, snapshot(package, (), home.root).digest, tmp_path, PLACE)
    made = Job("My_Job", State.PREPARING, 1.0, 1.0, "here", plan=plan.to_dict(), spec=resolved.to_dict())
    home.job("My_Job").mkdir(parents=True)
    process_env.write(home.job("My_Job"), {"CLOUDSDK_CONFIG": "/home/me/gcloud", "GOOGLE_EXTERNAL": "not written down"})
    googles = ("GOOGLE_", "CLOUDSDK_", "STORAGE_")
    for name in [variable for variable in os.environ if variable.startswith(googles)]:
        monkeypatch.delenv(name)
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "STORAGE_EMULATOR_HOST", "GOOGLE_EXTERNAL"):
        monkeypatch.setenv(name, "of another job")
    BACKEND.begin(Task(home, made, plan, 1, tmp_path)).close()
    assert {name: value for name, value in os.environ.items() if name.startswith(googles)} == {
        "CLOUDSDK_CONFIG": "/home/me/gcloud", "GOOGLE_EXTERNAL": "of another job"
    }  # fmt: skip


def test_what_the_server_of_these_tests_answers_is_what_googles_protos_allow(tmp_path, monkeypatch):
    cloud = Cloud("", tmp_path)
    cloud.executes = False
    run = cloud.create("projects/my-project/locations/us-central1/customJobs", {"labels": {"footplate_attempt": "a"}})
    cloud.say(run, "workerpool0-0", "a line")
    with serve(cloud) as address:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING", address)
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", address)
        client = Client("my-project", "us-central1")
        Output(RecordFile(tmp_path)).fetch(client, run.resource["name"])
        listed = client.ask(
            "aiplatform", "GET", "/v1/projects/my-project/locations/us-central1/customJobs",
            params={"filter": "labels.footplate_attempt=a"},
        )  # fmt: skip
    (asked,) = cloud.asked("POST", "entries:list")
    strictly("logging_v2.types.ListLogEntriesRequest", asked)
    strictly("logging_v2.types.ListLogEntriesResponse", cloud.answer("POST", "/v2/entries:list", {}, asked)[1])
    assert (
        strictly("aiplatform_v1.types.job_service.ListCustomJobsResponse", listed).custom_jobs[0].name
        == run.resource["name"]
    )


def test_pip_installs_the_distributions_with_all_files_of_the_package(package, tmp_path):
    others = ["deep/.hidden", "v1.0/run[1].sh", ".settings/a b.txt"]
    for name in others:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(name)
    (package / "v1.0" / "run[1].sh").chmod(0o755)
    for distribution in distributions(snapshot(package, (), tmp_path / "home")):
        if distribution.name.endswith(".tar.gz"):
            (tmp_path / distribution.name).write_bytes(distribution.content)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target",
         str(tmp_path / "installed"), *map(str, tmp_path.glob("*.tar.gz"))],
        check=True, cwd=tmp_path,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "footplate_launch", "trainer.task"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    assert done.stdout == "hello\n"
    installed = tmp_path / "installed" / "trainer"
    assert (installed / "deep" / "part.py").exists()
    assert [(installed / name).read_text() for name in others] == others
    assert [bool((installed / name).stat().st_mode & 0o100) for name in others] == [False, True, False]


def test_the_same_package_is_the_same_file_and_its_requirements_go_along(package, tmp_path):
    (package.parent / "requirements.txt").write_text("# ours\nnumpy>=1.26  # arrays\n\npandas\n")
    first, second = (distributions(snapshot(package, (), tmp_path / name)) for name in ("a", "b"))
    assert first == second
    _, launcher, _ = first
    assert b"install_requires=['numpy>=1.26', 'pandas']" in gzip.decompress(launcher.content)


def test_a_list_of_requirements_becomes_those_of_a_distribution_or_is_refused():
    lines = ["# ours", "numpy>=1.26  # arrays\r", "", "pandas \\", " >= 2", "torch[opt] @ https://a.b/torch-2.whl#sha256=0",
             "six; python_version < '4'", ""]  # fmt: skip
    assert requirements("\n".join(lines)) == [
        "numpy>=1.26", "pandas   >= 2", "torch[opt] @ https://a.b/torch-2.whl#sha256=0", "six; python_version < '4'"
    ]  # fmt: skip
    for line in (
        "-r other.txt",
        "https://a.b/torch-2.whl",
        "git+https://a.b/c.git",
        "six==1 --hash=sha256:0",
        "./here",
    ):
        with pytest.raises(ConfigError, match=f"{re.escape(repr(line))}: Vertex AI supports neither options of pip"):
            requirements(f"numpy\n{line}\n")


@pytest.mark.engine
def test_an_object_that_was_cut_off_is_written_anew_and_no_other(tmp_path, monkeypatch):
    port = free_port()
    with serve_gcs(port):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        files = GcsFileSystem(anonymous=True, scheme="http", endpoint_override=f"127.0.0.1:{port}")
        whole, half = Distribution("whole.whl", b"whole"), Distribution("half.whl", b"half of it")
        upload([whole], "gs://lake/staging")
        with files.open_output_stream(half.uri("lake/staging")) as out:
            out.write(half.content[:4])
        before = files.get_file_info(whole.uri("lake/staging")).mtime
        upload([whole, half], "gs://lake/staging")
        assert files.get_file_info(whole.uri("lake/staging")).mtime == before
        with files.open_input_file(half.uri("lake/staging")) as file:
            assert file.read() == half.content
        with pytest.raises(Refused, match="There is no bucket gs://nowhere"):
            upload([whole], "gs://nowhere/staging")


def test_ranks_follow_from_the_description_of_the_cluster():
    cluster = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"], "workerpool2": ["d:2222"]}
    told = {
        task: variables({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})
        for task in (("workerpool0", 0), ("workerpool1", 1), ("workerpool2", 0))
    }
    assert {name: told["workerpool1", 1][name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "2222"
    }  # fmt: skip
    assert told["workerpool0", 0]["RANK"] == "0"
    assert "RANK" not in told["workerpool2", 0]
    assert json.loads(told["workerpool2", 0]["TF_CONFIG"])["task"] == {"type": "ps", "index": 0}
    assert "RANK" not in variables(
        {"cluster": {"workerpool0": ["a:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    )
