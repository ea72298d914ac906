"""Google's possible answers, each in a sentence that says what to do; and the recipients of a token."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from footplate.core.errors import ConfigError
from footplate.jobs.backends.vertex import destination
from footplate.jobs.backends.vertex.client import Client, Refused, Unanswered, endpoint
from jobs.backends.vertex_server import Cloud, Trouble, error, serve

JOBS = "/v1/projects/my-project/locations/us-central1/customJobs"


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    cloud = Cloud("", tmp_path)
    cloud.executes = False
    with serve(cloud) as address:
        for service in ("AIPLATFORM", "LOGGING"):
            monkeypatch.setenv(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}", f"{address}/")
        yield cloud


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (
            error(401, "Invalid credentials"),
            Refused,
            "It says: Invalid credentials. Log in: gcloud auth application-default login",
        ),
        (
            error(403, "It is disabled.", reason="SERVICE_DISABLED"),
            Refused,
            "not enabled in the project my-project. Enable it: gcloud services enable aiplatform.googleapis.com --project",
        ),
        (
            error(403, "Permission 'aiplatform.customJobs.create' denied"),
            Refused,
            "Permission 'aiplatform.customJobs.create' denied. The role that allows it is roles/aiplatform.user",
        ),
        (error(404, "Not found"), Refused, "Check project and region."),
        (
            error(400, "List of found errors: 1. Field: job_spec"),
            Refused,
            "Vertex AI refuses the request (400). It says: List",
        ),
        (
            error(429, "Quota exceeded"),
            Unanswered,
            "Raise quotas at https://console.cloud.google.com/iam-admin/quotas",
        ),
        (error(503, "try later"), Unanswered, "Vertex AI fails (503). It says: try later"),
        ((500, {"what": []}), Unanswered, "Vertex AI fails (500)."),
        (None, Unanswered, "Vertex AI can't be reached: ConnectionError."),
        ((200, []), Unanswered, "answers with something that isn't JSON"),
    ],
)
def test_every_failure_is_a_sentence_that_says_what_to_do(cloud, answer, kind, says):
    cloud.troubles.append(Trouble("GET", "customJobs", answer))
    with pytest.raises(kind) as raised:
        Client("my-project", "us-central1").ask("aiplatform", "GET", JOBS, params={"filter": "labels.a=b"})
    assert says in str(raised.value)


def test_nobody_there_is_trouble_that_passes(monkeypatch):
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM", "http://127.0.0.1:9")
    with pytest.raises(Unanswered, match="can't be reached"):
        Client("my-project", "us-central1").ask("aiplatform", "GET", JOBS)


def test_without_credentials_it_says_how_to_get_some(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(Refused, match=r"no credentials for Google Cloud .* gcloud auth application-default login"):
        Client("my-project", "us-central1").ask("aiplatform", "GET", JOBS)


@pytest.mark.slow  # google-auth itself asks a few times
@pytest.mark.parametrize(
    ("status", "says", "kind", "text"),
    [
        (503, "unavailable", Unanswered, "Google issues no token now"),
        (
            400,
            "invalid_grant",
            Refused,
            "Google no longer accepts the credentials .* gcloud auth application-default",
        ),
    ],
)
def test_tokens_that_are_refused_are_the_users_to_mend_and_a_failing_server_of_tokens_is_not(
    tmp_path, monkeypatch, status, says, kind, text
):
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    cloud = Cloud("", tmp_path)
    cloud.troubles.append(Trouble("POST", "/token", (status, {"error": says}), times=100))
    with serve(cloud) as address:
        account = {"type": "service_account", "client_email": "a@b.iam", "private_key": key.decode(), "project_id": "p"}
        (tmp_path / "key.json").write_text(json.dumps({**account, "token_uri": f"{address}/token"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
        with pytest.raises(kind, match=text):
            Client("my-project", "us-central1").ask("aiplatform", "GET", JOBS)
    assert cloud.requests


def test_services_are_where_google_has_them_unless_gclouds_variables_say_otherwise():
    assert endpoint("aiplatform", "europe-west4", {}) == "https://europe-west4-aiplatform.googleapis.com"
    assert endpoint("logging", "europe-west4", {}) == "https://logging.googleapis.com"
    private = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_LOGGING": "https://logging-mine.p.googleapis.com/"}
    assert endpoint("logging", "europe-west4", private) == "https://logging-mine.p.googleapis.com"


@pytest.mark.parametrize(
    "url",
    [
        "https://attacker.example/", "https://googleapis.com.attacker.example/", "https://evilgoogleapis.com",
        "http://us-central1-aiplatform.googleapis.com", "https://me@aiplatform.googleapis.com", "http://10.0.0.1:80",
        "https://aiplatform.googleapis.com@attacker.example/", "file:///etc/passwd", "127.0.0.1:80",
    ],
)  # fmt: skip
def test_a_host_that_a_token_must_not_go_to_is_refused(url):
    with pytest.raises(ConfigError, match="A token is sent nowhere else"):
        endpoint("aiplatform", "us-central1", {"CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": url})


@pytest.mark.parametrize(
    "region", ["attacker.example/", "attacker.example#", "us-central1.attacker.example/", "", "a@b-c1"]
)
def test_a_region_is_no_way_to_another_host(region):
    with pytest.raises(ConfigError, match="expected one such as us-central1"):
        endpoint("aiplatform", region, {})


def test_the_project_is_looked_up_where_gclouds_users_have_it(tmp_path):
    (tmp_path / "configurations").mkdir()
    (tmp_path / "active_config").write_text("mine\n")
    (tmp_path / "configurations" / "config_mine").write_text("[core]\nproject = from-gcloud\naccount = 50%\n")
    environ = {"CLOUDSDK_CONFIG": str(tmp_path)}
    assert destination.project(None, environ) == "from-gcloud"
    assert destination.project(None, {**environ, "GOOGLE_CLOUD_PROJECT": "from-environ"}) == "from-environ"
    assert destination.project("from-flag", {**environ, "GOOGLE_CLOUD_PROJECT": "from-environ"}) == "from-flag"
    with pytest.raises(ConfigError, match="give --project"):
        destination.project(None, {"CLOUDSDK_CONFIG": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="--project 'x/y': expected a project's id"):
        destination.project("x/y", {})


@pytest.mark.parametrize(
    ("given", "job_dir", "expected"),
    [
        ("gs://mine/path/", None, "gs://mine/path"),
        ("mine", None, "gs://mine"),
        (None, "gs://bucket/job/dir", "gs://bucket"),
    ],
)
def test_the_staging_bucket_is_that_of_the_job_directory_unless_given(given, job_dir, expected):
    assert destination.staging(given, job_dir) == expected


@pytest.mark.parametrize("given", ["s3://mine", "gs://", "gs://UPPER", None])
def test_what_is_no_bucket_is_refused(given):
    with pytest.raises(ConfigError, match="--staging-bucket"):
        destination.staging(given, "runs/job")
