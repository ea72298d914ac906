"""The verbs over HTTP, with a real server, real supervisors and real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from jobs.conftest import Bench, until

from footplate.jobs.states import State
from footplate.server.app import make_app
from footplate.server.dependencies import ServerContext
from server.conftest import Server, config, packed

pytestmark = pytest.mark.engine

SECRET = "s3cret-s3cret-s3cret"


def submit(server: Server, bench: Bench, name: str, **more):
    """Send the bench's program, and submit it."""
    package = server("POST", "/api/packages", packed(bench.directory), Content_Type="application/x-tar")
    assert package.status == 201, package.body
    body = {"jobId": name, "package": package.json["digest"], "config": config(bench), **more}
    return server("POST", "/api/jobs", body)


def test_a_job_from_its_package_to_its_end(server: Server, bench: Bench):
    bench.program('print(sys.argv[1:3], flush=True); until_there("go-whole_1"); print("saved")')
    answer = submit(server, bench, "whole_1", args=["--epochs", "2"])
    assert answer.status == 201
    assert answer.json["job"]["state"] in ("QUEUED", "PREPARING", "RUNNING")
    again = submit(server, bench, "whole_1")
    assert (again.status, again.code) == (409, "conflict")
    assert "there is a job whole_1 already. Choose another name, or delete it" in again.message

    running = server.is_in("RUNNING", "whole_1")
    assert server("DELETE", "/api/jobs/whole_1").status == 409
    assert server("GET", "/api/jobs/whole_1/wait?timeout=0").json["state"] == "RUNNING"
    assert running["submitted"]["trainingInput"]["args"] == ["--epochs", "2"]
    assert running["resolved"]["command"][:3] == ["python", "-m", "trainer.task"]
    (bench.directory / "go-whole_1").touch()
    ended = server("GET", "/api/jobs/whole_1/wait?timeout=120").json
    assert ended["state"] == "SUCCEEDED"
    assert [change["target"] for change in ended["transitions"]] == ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED"]
    assert ended["processes"][0]["outcome"] == "ended with exit code 0"

    assert server("GET", "/api/jobs/whole_1/logs").body == b"[1 master-0] ['--epochs', '2']\n[1 master-0] saved\n"
    assert server("GET", "/api/jobs/whole_1/logs?attempt=1&source=master-0&tail=1").body == b"saved\n"
    assert server("GET", "/api/jobs/whole_1/logs?attempt=2").body == b""
    answer = server("GET", "/api/jobs/whole_1/logs?search=SAVE")
    assert (answer.body, answer.headers["x-footplate-hits"]) == (b"[1 master-0:2] saved\n", "1")
    assert answer.headers["x-footplate-complete"] == "true"
    assert server("GET", "/api/jobs/whole_1/logs?search=s&tail=1").body == b"[1 master-0:2] saved\n"
    assert server("GET", "/api/jobs/whole_1/logs?search=saved&attempt=2").body == b""
    assert server("GET", f"/api/jobs/whole_1/logs?search={'x' * 201}").status == 422
    assert ended["hangs"] == []
    (bench.jobs.home.attempt("whole_1", 1) / "hang-1.txt").write_text("rank 1 is late\n\nall stacks\n")
    (hang,) = server("GET", "/api/jobs/whole_1").json["hangs"]
    assert hang == {"attempt": 1, "sentence": "rank 1 is late", "stacks": "rank 1 is late\n\nall stacks\n"}
    assert server("POST", "/api/jobs/whole_1/cancel").message == "whole_1 has ended already: SUCCEEDED."
    assert server("POST", "/api/jobs/whole_1/resubmit").status == 409
    assert server("DELETE", "/api/jobs/whole_1").status == 204
    gone = server("GET", "/api/jobs/whole_1")
    assert (gone.status, gone.code) == (404, "not_found")


def test_output_and_states_come_live_until_the_end(server: Server, bench: Bench):
    bench.program('print("first", flush=True); until_there("go-live_1"); print("last")')
    submit(server, bench, "live_1")
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    connection.request("GET", "/api/jobs/live_1/events")
    stream = connection.getresponse()
    assert stream.getheader("content-type", "").startswith("text/event-stream")
    heard: list[tuple[str, dict]] = []
    while ("end", {}) not in heard:
        kind = stream.readline().decode().strip()
        if not kind.startswith("event: "):
            continue
        heard.append((kind.removeprefix("event: "), json.loads(stream.readline().decode().removeprefix("data: "))))
        if heard[-1][0] == "lines" and heard[-1][1][0]["text"] == "first\n":
            (bench.directory / "go-live_1").touch()  # it came while the job was running: else this would wait for ever
    connection.close()
    lines = [line for kind, data in heard if kind == "lines" for line in data]
    assert lines == [{"attempt": 1, "source": "master-0", "text": text} for text in ("first\n", "last\n")]
    assert [data["state"] for kind, data in heard if kind == "state"][-1] == "SUCCEEDED"


def test_cancel_and_resubmit_as_on_the_command_line(server: Server, bench: Bench):
    bench.program('(place / f"cancel_1-began-{attempt}").touch(); until_there("go-cancel_1")')
    submit(server, bench, "cancel_1")
    bench.there("cancel_1-began-1")
    assert server("POST", "/api/jobs/cancel_1/cancel").json["state"] in ("CANCELLING", "CANCELLED")
    server.is_in("CANCELLED", "cancel_1")
    (bench.directory / "go-cancel_1").touch()
    assert server("POST", "/api/jobs/cancel_1/resubmit").status == 200
    assert server.is_in("SUCCEEDED", "cancel_1")["attempt"] == 2


def test_a_list_is_filtered_and_limited(server: Server, bench: Bench):
    bench.program("")
    for name, labels in (("first_of_list", {"team": "vision"}), ("second_of_list", {})):
        submit(server, bench, name, config={**config(bench), "labels": labels})
        server.is_in("SUCCEEDED", name)

    def names(**query: str) -> tuple[list[str], bool]:
        answer = server("GET", f"/api/jobs?{urlencode(query)}").json
        return [job["jobId"] for job in answer["jobs"]], answer["more"]

    assert names(filter="jobId:*_of_list") == (["second_of_list", "first_of_list"], False)
    assert names(filter="jobId:*_of_list", sortBy="createTime") == (["first_of_list", "second_of_list"], False)
    assert names(limit="1") == (["second_of_list"], True)
    assert names(filter="jobId:*_of_list", limit="1") == (["second_of_list"], True)
    assert names(filter="state=SUCCEEDED AND jobId:FIRST_OF*") == (["first_of_list"], False)
    assert names(filter="labels.team=vision") == (["first_of_list"], False)
    assert names(filter="state=RUNNING AND jobId:*_of_list") == ([], False)
    for query in ("filter=state%3DDONE", "filter=moon", "sortBy=moon"):
        refused = server("GET", f"/api/jobs?{query}")
        assert (refused.status, refused.code) == (422, "invalid")


def test_everything_that_is_wrong_with_a_spec_is_said_at_once(server: Server, bench: Bench):
    bench.program("")
    result = submit(server, bench, "no-name", config={"trainingInput": {"masterTyp": "n1-standard-4"}}, args=[])
    assert (result.status, result.code) == (422, "invalid")
    keys = {problem["key"] for problem in result.json["error"]["problems"]}
    assert {"jobId", "trainingInput.masterTyp", "trainingInput.pythonModule"} <= keys
    text = "trainingInput:\n  region: us-central1\n  masterTyp: n1-standard-4\n"
    checked = server("POST", "/api/check", {"config": text}).json
    assert not checked["valid"]
    assert "config line 3" in [problem["place"] for problem in checked["problems"]]
    checked = server("POST", "/api/check", {"config": {"trainingInput": {"masterTyp": "n1-standard-4"}}}).json
    assert {problem["place"] for problem in checked["problems"]} == {""}  # the lines of JSON are nobody's
    checked = server("POST", "/api/check", {"jobId": "fine", "config": config(bench)}).json
    assert (checked["valid"], checked["resolved"]["scaleTier"]) == (True, "BASIC")
    assert (
        "the package has no module trainer.other"
        in submit(server, bench, "wrong_1", config=config(bench, pythonModule="trainer.other")).message
    )
    assert (
        "no program: upload its package" in server("POST", "/api/jobs", {"jobId": "a", "config": config(bench)}).message
    )
    assert server("POST", "/api/jobs", {"jobId": "a", "config": "a: [", "package": "0" * 64}).status == 422
    assert "is not a backend of jobs" in submit(server, bench, "wrong_1", backend="moon").message
    assert server("POST", "/api/jobs", b"{").status == 422
    assert server("POST", "/api/jobs", {"jobId": "x" * (4 << 20)}).status == 413
    assert "wrong_1" not in {job.name for job in bench.jobs.store.list()}


@pytest.fixture(scope="module")
def guarded(serve) -> Server:
    """A server that others can reach, too."""
    server = serve("--host", "0.0.0.0", FOOTPLATE_TOKEN=SECRET, HF_TOKEN="hf_abcdefghijkl")
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    server.headers = {"Authorization": f"Bearer {SECRET}"}
    return server


def test_a_directory_is_taken_only_where_nobody_else_can_ask(server: Server, guarded: Server, bench: Bench):
    bench.program("")
    body = {"jobId": "directory_1", "packagePath": str(bench.directory / "trainer"), "config": config(bench)}
    assert server("POST", "/api/jobs", body).status == 201
    for path, module in (("nowhere", "trainer.task"), ("a" * 5000, "trainer.task"), ("trainer", "trainer.other")):
        wrong = {"packagePath": str(bench.directory / path), "config": config(bench, pythonModule=module)}
        refused = server("POST", "/api/jobs", {**wrong, "jobId": "wrong_2"})
        assert (refused.status, refused.code) == (422, "invalid")
        assert len(refused.json["error"]["problems"]) == 1
        assert not server("POST", "/api/check", {**wrong, "jobId": "wrong_2"}).json["valid"]
    refused = guarded("POST", "/api/jobs", {**body, "jobId": "other"})
    assert (refused.status, refused.code) == (422, "invalid")
    assert "packagePath: only a server that listens on its own machine alone" in refused.message


def test_without_the_token_nothing_is_answered_and_no_job_inherits_it(guarded: Server, bench: Bench):
    server = guarded
    refused = server("GET", "/api/jobs", Authorization="")
    assert (refused.status, refused.code, refused.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
    assert server("GET", "/api/openapi.json", Authorization=f"Bearer {SECRET}!").status == 401
    assert server("GET", "/", Authorization="").status == 200
    bench.program(
        """
        print(dict(os.environ), flush=True)
        print(Path(f"/proc/{os.getppid()}/environ").read_bytes(), flush=True)
        raise SystemExit(f"lost hf_abcdefghijkl at https://me:mine@host") if attempt else None
        """
    )
    assert submit(server, bench, "token_1", args=["--key", "hf_abcdefghijkl"]).status == 201
    job = server.is_in("FAILED", "token_1")
    written = bench.output("token_1")
    assert SECRET not in written
    shown = server("GET", "/api/jobs/token_1/logs").body.decode() + json.dumps(job)
    shown += server("GET", "/api/jobs/token_1/events").body.decode() + server("GET", "/api/jobs").body.decode()
    assert "[hidden]" in shown
    assert server("GET", "/api/jobs/token_1/logs?search=hf_abc").body == b""
    for secret in (SECRET, "hf_abcdefghijkl", "me:mine@"):
        assert secret not in shown


def test_names_and_paths_stay_where_they_belong(server: Server, bench: Bench):
    (bench.directory / "secret.txt").write_text("of somebody")
    for path in (
        "/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/static/../../auth.py", "//etc/passwd", "/%2fetc%2fpasswd",
        "/api/jobs/..%2f..", "/api/jobs/%2e%2e/logs", "/api/jobs/..%2fnamed_1/events", "/api/jobs/a%00b", "/%00",
    ):  # fmt: skip
        answer = server("GET", path)
        assert answer.status in (404, 422), path
        assert b"import" not in answer.body
        assert b"root:" not in answer.body


def test_every_answer_says_that_nothing_else_may_be_loaded(server: Server):
    for path in ("/", "/app.js", "/api/jobs", "/api/jobs/none", "/nothing", "/api/openapi.json"):
        headers = server("GET", path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    assert server("GET", "/", Host="evil.example").status == 403
    assert server("POST", "/api/jobs/any_1/cancel", X_Footplate="").code == "forbidden"
    assert server("OPTIONS", "/api/jobs", Origin="http://evil.example").status == 403
    for file in Path("footplate/server/static").glob("*"):
        assert "https://" not in file.read_text()


def test_curves_of_a_run_and_of_the_machine(server: Server, bench: Bench):
    bench.program(
        """
        out = Path(os.environ["FOOTPLATE_JOB_DIR"]); out.mkdir(exist_ok=True)
        (out / "metrics.csv").write_text("step,epoch,train_loss\\n1,0,2.0\\n2,0,1.0\\n")
        until_there("go-curves_1")
        """
    )
    (bench.directory / "out/older").mkdir(parents=True)
    old = bench.directory / "out/older/metrics.csv"
    old.write_text("step,epoch,of_another_job\n1,0,2.0\n")
    os.utime(old, (1e9, 1e9))
    submit(server, bench, "curves_1")
    answer = until(
        lambda: (
            (figures := server("GET", "/api/jobs/curves_1/figures").json)["devices"] and figures["training"] and figures
        )
    )
    (bench.directory / "go-curves_1").touch()
    assert [chart["title"] for chart in answer["training"]] == ["loss"]
    loss = {"name": "train_loss", "x": [1, 2], "y": [2, 1], "total": None, "colour": None}
    assert answer["training"][0]["series"] == [loss]
    assert [chart["title"] for chart in answer["devices"]] == ["Processor", "Memory"]
    server.is_in("SUCCEEDED", "curves_1")


def test_time_and_money_of_a_job_by_cause(server: Server, bench: Bench):
    bench.program(
        """
        out = Path(os.environ["FOOTPLATE_JOB_DIR"]); out.mkdir(exist_ok=True)
        def add(kind, **values):
            with (out / "monitor.jsonl").open("a") as file:
                file.write(json.dumps({"kind": kind, "time": time.time(), **values}) + "\\n")
        add("start", step=0, world_size=2, setup_s=0.0)
        time.sleep(0.5)
        add("window", step=20, batches=20, wall_s=0.5, seconds={"input": 0.1, "step": 0.4})
        until_there("go-goodput_1")
        add("end", step=20, status="finished")
        """
    )
    submit(server, bench, "goodput_1")
    running = until(
        lambda: (
            (goodput := server("GET", "/api/jobs/goodput_1/goodput").json)["lastStep"] is not None
            and goodput["split"]
            and goodput
        )
    )
    assert (running["runs"], running["lostSteps"]) == (True, 0)
    (bench.directory / "go-goodput_1").touch()
    job = server.is_in("SUCCEEDED", "goodput_1")
    answer = server("GET", "/api/jobs/goodput_1/goodput").json
    assert (answer["began"], answer["ended"][:23], answer["runs"]) == (job["createTime"], job["endTime"][:23], False)
    seconds = {cause["cause"]: cause["seconds"] for cause in answer["causes"]}
    assert {"queued", "startup", "training", "input"} <= seconds.keys()
    assert abs(sum(seconds.values()) - answer["wallSeconds"]) < 1e-3
    assert seconds["input"] == pytest.approx(0.1, abs=0.01)
    assert answer["goodput"] == pytest.approx(
        seconds["training"] / (answer["wallSeconds"] - seconds["queued"]), abs=1e-3
    )
    assert answer["usd"] == pytest.approx(sum(cause["usd"] for cause in answer["causes"]), abs=1e-5)
    assert [(attempt["attempt"], attempt["firstStep"], attempt["lastStep"]) for attempt in answer["attempts"]] == [
        (1, 0, 20)
    ]
    assert answer["summary"].startswith("goodput: ")
    assert server("GET", "/api/jobs/goodput_2/goodput").status == 404


def test_the_server_holds_nothing_so_killing_it_loses_nothing(serve, server: Server, bench: Bench):
    first = serve()
    bench.program('(place / "killed_1-began").touch(); until_there("go-killed_1")')
    submit(first, bench, "killed_1")
    bench.there("killed_1-began")
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    (bench.directory / "go-killed_1").touch()
    assert bench.jobs.wait("killed_1").state == State.SUCCEEDED
    assert bench.jobs.store.find("killed_1").attempt == 1
    assert server("GET", "/api/jobs/killed_1").json["state"] == "SUCCEEDED"


def test_it_ends_when_it_is_told_to_though_somebody_listens(serve, bench: Bench):
    server = serve()
    bench.program('until_there("go-ends_1")')
    submit(server, bench, "ends_1")
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    connection.request("GET", "/api/jobs/ends_1/events")
    stream = connection.getresponse()
    stream.readline()
    server.process.terminate()
    assert server.process.wait(120) == 0
    connection.close()
    (bench.directory / "go-ends_1").touch()
    assert bench.jobs.wait("ends_1").state == State.SUCCEEDED


def test_many_ask_at_once(server: Server, bench: Bench):
    bench.program("")
    submit(server, bench, "many_1")
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(server("GET", "/api/jobs/many_1").status)) for _ in range(60)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 60
    server.is_in("SUCCEEDED", "many_1")


def test_what_is_no_http_does_no_harm(server: Server):
    host, _, port = urlsplit(server.url).netloc.partition(":")
    for noise in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /api/jobs HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(noise)
            assert not connection.recv(12).endswith(b"200")
    assert server("GET", "/api/jobs").status == 200


def test_a_dry_run_shows_what_would_be_asked_of_a_service(server: Server, bench: Bench):
    bench.program("")
    vertex = {"backend": "vertex", "place": {"project": "my-project", "staging-bucket": "gs://my-bucket"}}
    body = {"jobId": "dry_1", "config": config(bench, jobDir="gs://my-bucket/dry_1"), **vertex}
    without = server("POST", "/api/check", body).json
    assert (without["valid"], without["request"]) == (True, None)
    package = server("POST", "/api/packages", packed(bench.directory), Content_Type="application/x-tar").json["digest"]
    answer = server("POST", "/api/check", {**body, "package": package}).json
    assert answer["valid"]
    assert answer["request"]["url"].endswith("/projects/my-project/locations/us-central1/customJobs")
    assert "trainer.task" in json.dumps(answer["request"]["body"])
    same = server("POST", "/api/check", {**body, "packagePath": str(bench.directory / "trainer")}).json
    assert same["request"] == answer["request"]

    local = server("POST", "/api/check", {"jobId": "dry_1", "config": config(bench), "package": package}).json
    assert (local["valid"], local["request"]) == (True, None)
    image = {"trainingInput": {"region": "us-central1", "masterConfig": {"imageUri": "gcr.io/project/trainer"}}}
    refused = server("POST", "/api/check", {"jobId": "dry_1", "config": image}).json
    assert "On this machine jobs run as Python packages" in refused["problems"][0]["problem"]
    wrong = server("POST", "/api/check", {**body, "place": {"projct": "my-project"}}).json
    assert [problem["key"] for problem in wrong["problems"]] == ["place"]
    assert 'Did you mean "project"' in wrong["problems"][0]["problem"]
    tuned = {"goal": "MAXIMIZE", "params": [{"parameterName": "a", "type": "DISCRETE", "discreteValues": [1]}]}
    ray = {**body, "backend": "ray", "place": {"address": "http://127.0.0.1:1"}, "package": package}
    elsewhere = server("POST", "/api/check", ray).json
    assert elsewhere["request"]["submission_id"]
    assert "No Ray cluster takes jobs at http://127.0.0.1:1" in " ".join(elsewhere["notices"])
    assert (away := server("POST", "/api/jobs", ray)).status == 503, away.body
    ray["config"] = config(bench, hyperparameters=tuned)
    assert server("POST", "/api/check", ray).json["valid"]
    body["config"] = config(bench, jobDir="gs://my-bucket/dry_1", hyperparameters=tuned)
    tuning = server("POST", "/api/check", {**body, "package": package}).json
    assert tuning["valid"]
    assert tuning["request"]
    assert "The request is that of a trial, without its number and its parameters." in tuning["notices"]
    body["config"] = {"trainingInput": image["trainingInput"] | {"hyperparameters": tuned}}
    assert "its trials couldn't report" in server("POST", "/api/check", body).json["problems"][0]["problem"]
    assert "dry_1" not in {job.name for job in bench.jobs.store.list()}


def test_a_store_that_is_away_is_no_mistake_of_who_asks(serve, tmp_path):
    server = serve(FOOTPLATE_HOME=str(tmp_path))
    assert server("GET", "/api/jobs").status == 200
    for file in tmp_path.glob("jobs.db*"):
        file.unlink()
    (tmp_path / "jobs.db").mkdir()
    for method, path in (("GET", "/api/jobs"), ("GET", "/api/jobs/any_1"), ("POST", "/api/jobs/any_1/cancel")):
        answer = server(method, path)
        assert (answer.status, answer.code) == (503, "unavailable")
        assert "the store of jobs, can't be used" in answer.message


def test_while_somebody_listens_a_job_whose_supervisor_was_lost_goes_on(server: Server, bench: Bench):
    bench.program('(place / f"heard_1-began-{attempt}").touch(); until_there("go-heard_1")')
    submit(server, bench, "heard_1")
    bench.there("heard_1-began-1")
    supervisor = bench.supervisor("heard_1")
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    connection.request("GET", "/api/jobs/heard_1/events")
    stream = connection.getresponse()
    os.kill(supervisor, signal.SIGKILL)
    bench.there("heard_1-began-2")
    (bench.directory / "go-heard_1").touch()
    assert stream.read().decode().endswith("event: end\ndata: {}\n\n")
    connection.close()
    assert server("GET", "/api/jobs/heard_1").json["losses"] == 1


def test_the_catalog_can_be_read(server: Server):
    machines = {entry["machine"]["name"]: entry for entry in server("GET", "/api/catalog/machines").json}
    assert machines["n1-standard-8"]["machine"]["vcpus"] == 8
    assert {entry["accelerator"]["short"] for entry in server("GET", "/api/catalog/accelerators").json} >= {
        "K80",
        "H100",
    }
    assert "us-central1" in {entry["region"]["region"] for entry in server("GET", "/api/catalog/regions").json}
    query = "machine=n1-standard-32&accelerator=nvidia-tesla-v100&count=2"
    verdict = server("GET", f"/api/catalog/check?{query}").json
    assert not verdict["valid"]
    assert "allowed counts are 4 and 8" in verdict["problems"][0]
    assert server("GET", "/api/catalog/check?machine=n1-standrd-8").message.startswith('"n1-standrd-8" is no')


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/", "GET, HEAD"),
        ("POST", "/app.js", "GET, HEAD"),
        ("PUT", "/api/jobs", "GET, POST"),
        ("HEAD", "/api/jobs", "GET, POST"),
        ("PUT", "/api/jobs/some_job", "DELETE, GET"),
        ("GET", "/api/jobs/some_job/cancel", "POST"),
    ],
)
def test_another_method_is_answered_with_those_that_there_are(server: Server, method: str, path: str, allowed: str):
    answer = server(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


def test_the_head_of_the_page(server: Server):
    page = server("GET", "/")
    answer = server("HEAD", "/")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(len(page.body))


def test_a_wait_ends_when_its_client_has_gone(server: Server, bench: Bench):
    bench.program('until_there("go-abandoned_1")')
    submit(server, bench, "abandoned_1")
    app = make_app(ServerContext(bench.jobs.home))
    scope = {
        "type": "http", "method": "GET", "path": "/api/jobs/abandoned_1/wait", "query_string": b"timeout=300",
        "headers": [(b"host", b"localhost")],
    }  # fmt: skip

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    asyncio.run(asyncio.wait_for(app(scope, gone, send), 60))
    assert server("GET", "/api/jobs/abandoned_1").json["state"] != "SUCCEEDED"
    (bench.directory / "go-abandoned_1").touch()
    server.is_in("SUCCEEDED", "abandoned_1")
