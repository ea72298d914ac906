"""Cases that only Vertex AI has, with real supervisors and with real processes behind a server on loopback."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from pyarrow.fs import FileSelector, GcsFileSystem

from footplate.jobs.states import State
from jobs.backends.vertex_backend import VertexProject
from jobs.backends.vertex_server import Trouble
from jobs.conftest import Bench, until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.parametrize("place", ["vertex"], indirect=True)]


def test_secrets_of_the_shell_reach_neither_google_nor_the_disk(
    bench: Bench, place: VertexProject, monkeypatch: pytest.MonkeyPatch
):
    secret = "wJalrXUtnFEMI-not-for-google"
    for name in ("AWS_SECRET_ACCESS_KEY", "CLOUDSDK_AUTH_ACCESS_TOKEN", "FOOTPLATE_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, secret)
    bench.program("print('ran')")
    bench.submit()
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert "customJobs" in json.dumps(place.cloud.requests)
    assert secret not in json.dumps(place.cloud.requests)
    assert not [
        path for path in bench.jobs.home.root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
    ]


def test_in_an_image_of_the_users_the_package_is_installed_first(bench: Bench, place: VertexProject):
    bench.program(
        "import trainer; print(Path(trainer.__file__).with_name('words.txt').read_text(), os.environ['RANK'])"
    )
    (bench.directory / "trainer" / "words.txt").write_text("of the package")
    bench.submit(
        text="trainingInput: {scaleTier: CUSTOM, masterType: n1-standard-4, workerCount: 1, workerType: n1-standard-4}",
        master_image_uri="gcr.io/my-project/image",
    )
    job = bench.jobs.wait("my_job")
    assert job.state == State.SUCCEEDED, bench.output()
    *notes_of_pip, last = bench.output().splitlines()
    assert last == "of the package 0"
    assert all("DEPRECATION" in note for note in notes_of_pip)
    assert "containerSpec" in place.cloud.runs[0].resource["jobSpec"]["workerPoolSpecs"][0]


def test_cancelled_while_nobody_looks_after_it_the_custom_job_is_cancelled_too(bench: Bench, place: VertexProject):
    """The supervisor is killed after its request for the job, before the answer. The next supervisor must find the job."""
    place.cloud.troubles.append(Trouble("POST", "customJobs$", None, done=True))
    bench.program("time.sleep(600)")
    bench.submit()
    until(lambda: place.cloud.runs)
    os.kill(bench.supervisor(), signal.SIGKILL)
    bench.jobs.cancel("my_job")
    assert bench.jobs.wait("my_job").state == State.CANCELLED
    assert [run.resource["state"] for run in place.cloud.runs] == ["JOB_STATE_CANCELLED"]


def test_what_it_waits_for_is_said_and_what_vertex_ai_says_is_kept(bench: Bench, place: VertexProject):
    place.cloud.executes = False
    bench.program("pass")
    bench.submit()
    (run,) = until(lambda: place.cloud.runs)
    place.cloud.say(run, "service", "Waiting for job to be provisioned.")
    run.resource["state"] = "JOB_STATE_PENDING"
    until(lambda: bench.jobs.find("my_job").cause == "waits at Vertex AI for its machines")
    run.resource["state"] = "JOB_STATE_SUCCEEDED"
    assert bench.jobs.wait("my_job").state == State.SUCCEEDED
    assert bench.output(who="prepare") == "Waiting for job to be provisioned.\n"


def test_each_attempt_is_a_custom_job_and_its_package_is_sent_once(bench: Bench, place: VertexProject):
    bench.program("sys.exit(7 * (attempt == 1))")
    (bench.directory / "trainer" / "words.txt").write_text(f"of {time.time_ns()}")
    bench.submit()
    (first,) = until(lambda: place.cloud.runs)
    uris = first.resource["jobSpec"]["workerPoolSpecs"][0]["pythonPackageSpec"]["packageUris"]
    files = GcsFileSystem(anonymous=True, scheme="http", endpoint_override=place.variables["STORAGE_EMULATOR_HOST"][7:])
    written = [files.get_file_info(uri.removeprefix("gs://")).mtime for uri in uris]
    assert all(written)
    job = bench.jobs.wait("my_job")
    assert (job.state, job.attempt, job.failures) == (State.SUCCEEDED, 2, 1)
    second = place.cloud.runs[1].resource
    assert second["jobSpec"]["workerPoolSpecs"][0]["pythonPackageSpec"]["packageUris"] == uris
    assert [files.get_file_info(uri.removeprefix("gs://")).mtime for uri in uris] == written
    assert len({run.resource["labels"]["footplate_attempt"] for run in place.cloud.runs}) == len(place.cloud.runs) == 2
    names = {file.base_name for file in files.get_file_info(FileSelector("lake/staging/footplate", recursive=True))}
    assert names >= {"trainer-0.tar.gz", "footplate_launch-0.tar.gz", "launch.py"}
