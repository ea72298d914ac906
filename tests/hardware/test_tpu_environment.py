"""Detection of the TPU: variables, a metadata server on loopback, the older form; and contradictions."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.hardware.tpu import metadata
from footplate.hardware.tpu.environment import TPUEnvironment, contradictions, read_environment, wrong_count
from footplate.hardware.tpu.report import examine_tpu
from footplate.hardware.tpu.xrt_config import Endpoint, explain, read_config

V5E_16 = {
    "accelerator-type": "v5litepod-16",
    "agent-worker-number": "2",
    "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3,u:u:10.0.0.4,u:u:10.0.0.5",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nRUNTIME_VERSION: 'v2-alpha-tpuv5-lite'\nWORKER_ID: '2'\nEMPTY: ''\n",
}


class Answer(http.server.BaseHTTPRequestHandler):
    """A response like Google's: attributes under their path, and none without the header."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        place, _, name = self.path.rpartition("/")
        if self.headers["Metadata-Flavor"] != "Google" or place != "/computeMetadata/v1/instance/attributes":
            self.send_error(403)
            return
        value = self.server.attributes.get(name)
        if value is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def google():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.attributes, server.asked = dict(V5E_16), []
    server.environ = {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_variables_say_slice_host_and_hosts():
    environment = read_environment(
        {"TPU_ACCELERATOR_TYPE": "v3-32", "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b, c,d"}
    )
    assert (environment.slice.name, environment.worker_id, environment.hostnames) == (
        "v3-32",
        "1",
        ("a", "b", "c", "d"),
    )
    assert contradictions(environment) == []


def test_where_nothing_says_anything_nothing_is_known():
    assert not read_environment({}).known
    assert contradictions(read_environment({})) == []


def test_the_metadata_server_says_what_the_environment_does_not(google):
    environment = read_environment({}, metadata.server(google.environ))
    assert environment.slice.name == "v5e-16"
    assert environment.worker_id == "2"
    assert environment.hostnames == ("10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5")
    assert environment.software == "v2-alpha-tpuv5-lite"
    assert contradictions(environment) == []


def test_a_variable_counts_more_than_the_metadata_server(google):
    environment = read_environment(
        {"TPU_ACCELERATOR_TYPE": "v6e-8", "TPU_WORKER_HOSTNAMES": "localhost"}, metadata.server(google.environ)
    )
    assert environment.slice.name == "v6e-8"
    assert environment.hostnames == ("localhost",)


def test_a_server_that_is_not_there_is_asked_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        silent = taken.getsockname()[1]  # which is somebody's, so nobody else listens there
        ask = metadata.server({"GCE_METADATA_HOST": f"127.0.0.1:{silent}"})
        assert not read_environment({}, ask).known


def test_a_machine_without_a_tpu_asks_nobody(google):
    assert not examine_tpu(google.environ, chips=0).environment.known
    assert google.asked == []


def test_libtpus_variable_forbids_to_ask(google):
    assert not read_environment({}, metadata.server({**google.environ, "TPU_SKIP_MDS_QUERY": "1"})).known
    assert google.asked == []


def test_an_attached_tpu_is_described_with_what_is_wrong(google):
    google.attributes["tpu-env"] = "RUNTIME_VERSION: 'tpu-vm-pt-1.13'"
    report = examine_tpu({**google.environ, "TPU_WORKER_ID": "4"}, chips=4)
    assert dict(report.facts)["slice"] == "TPU v5e: 16 chips, 4x4, 4 hosts with 4 devices each, 16 GB per chip"
    assert any('TPU_WORKER_ID="4": expected a number from 0 to 3' in line for line in report.advice)
    assert any("brings torch 1.13" in line and "v2-alpha-tpuv5-lite" in line for line in report.advice)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v9-8"}, "accelerator type is unknown"),
        ({"TPU_ACCELERATOR_TYPE": "v3-32", "TPU_WORKER_HOSTNAMES": "a"}, "names 1 host(s), but a v3-32 has 4"),
        ({"TPU_ACCELERATOR_TYPE": "v3-8", "TPU_WORKER_ID": "1"}, 'TPU_WORKER_ID="1": expected 0.'),
        ({"TPU_WORKER_ID": "first"}, "expected a number"),
    ],
)
def test_what_cannot_be_so_is_said_with_the_mend(environ, said):
    (problem,) = contradictions(read_environment(environ))
    assert said in problem


def test_the_count_of_devices_is_checked_against_the_name():
    v3 = TPUEnvironment(accelerator_type="v3-32")
    assert wrong_count(v3, 8) is None
    assert "has 8 device(s) on each of its hosts, but JAX finds 4" in wrong_count(v3, 4)
    assert wrong_count(TPUEnvironment(accelerator_type="v4-8"), 4) is None
    assert wrong_count(read_environment({"TPU_ACCELERATOR_TYPE": "v3-8", "TPU_VISIBLE_CHIPS": "0"}), 2) is None
    assert wrong_count(TPUEnvironment(), 4) is None


def test_the_older_form_names_its_endpoints():
    assert read_config("tpu_worker;0;10.0.0.2:8470") == [Endpoint("tpu_worker", 0, "10.0.0.2", 8470)]
    assert len(read_config("tpu_worker;0;10.0.0.2:8470|tpu_worker;1;10.0.0.3:8470")) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpu_worker;0;10.0.0.2:8470", "a TPU node at 10.0.0.2:8470.*(a TPU VM), and unset"),
        ("t;0;10.0.0.2:8470|t;1;10.0.0.3:8470", "on each of them"),
        ("localservice;0;localhost:51011", "of this machine, which is found without it"),
        ("grpc://10.0.0.2", "has no known form"),
    ],
)
def test_the_older_form_is_told_explain(text, said):
    sentence = explain(text)
    assert all(part in sentence for part in said.split(".*"))
    assert "unset" in sentence


@given(st.text())
def test_any_text_in_the_older_variable_gets_a_sentence(text):
    assert explain(text).endswith((".", "it."))


def doctor(**variables: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "footplate", "doctor", "--json"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_doctor_shows_the_slice_and_what_is_wrong():
    report = doctor(TPU_ACCELERATOR_TYPE="v3-8", XRT_TPU_CONFIG="tpu_worker;0;10.0.0.2:8470")
    assert report["tpu"]["slice"].startswith("TPU v3: 4 chips, 8 cores, 2x2, 1 host with 8 devices")
    assert any("TPU nodes no longer exist" in line for line in report["advice"])
