"""MLflow on a real server that dies, restarts, hangs, or never exists."""

import base64
import json
import os
import signal
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import mlflow
import pytest
import torch

import footplate.training.module as fp
from footplate.tracking import MLflow
from footplate.tracking.event_queue import Progress, pending
from footplate.tracking.mlflow import deliver_pending
from tracking.attempts import expected, log_steps, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Doubler(fp.Module):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.rand(2, 3)

    def forward(self, x):
        return 2 * x


def curve(uri, run_id):
    history = mlflow.MlflowClient(uri).get_metric_history(run_id, "loss")
    assert [point.timestamp for point in history] == sorted(point.timestamp for point in history)
    return [(point.step, point.value) for point in history]


def queued_steps(run_dir):
    (queue,) = pending(run_dir)
    records = [json.loads(line) for line in queue.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [record["step"] for record in records if record["kind"] == "metrics"]


def test_a_server_killed_in_the_middle_gets_all_of_it_in_order_when_it_is_back(run_dir, server, caplog):
    server.start()
    logger = MLflow(tracking_uri=server.uri)
    logger.setup(run_dir, {"lr": 0.1})
    log_steps(logger, range(50))
    run_id = logger.run_id
    wait_until(lambda: curve(server.uri, run_id) == expected(range(50)))

    server.kill()
    log_steps(logger, range(50, 100))
    wait_until(lambda: Progress.load(run_dir).error)
    log_steps(logger, range(100, 150))
    logger.flush()
    wait_until(lambda: queued_steps(run_dir) == list(range(150)))
    server.start()
    log_steps(logger, range(150, 200))
    wait_until(lambda: Progress.load(run_dir).error is None)
    logger.finalize("success")

    assert curve(server.uri, run_id) == expected(range(200))
    assert mlflow.MlflowClient(server.uri).get_run(run_id).info.status == "FINISHED"
    assert pending(run_dir) == []
    said = [record.getMessage() for record in caplog.records if record.name.startswith("footplate")]
    assert len(said) == 1
    assert "can't be reached" in said[0]
    assert "Training continues" in said[0]


def test_a_server_that_hangs_stops_nothing(run_dir, server):
    server.start()
    logger = MLflow(tracking_uri=server.uri)
    logger.setup(run_dir, {})
    run_id = logger.run_id
    with server.frozen():
        log_steps(logger, range(5000))
        logger.flush()
        wait_until(lambda: queued_steps(run_dir) == list(range(5000)))
        state = logger.state_dict()
        assert (state["run_id"], state["step"]) == (run_id, 4999)
    logger.finalize("success")
    assert curve(server.uri, run_id) == expected(range(5000))


def test_a_run_whose_server_was_never_there_is_delivered_whole_later(run_dir, server, caplog, monkeypatch):
    address = server.uri.replace("://", "://user:hunter2@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    server.kill()
    checkpoint = run_dir / "best.pt"
    checkpoint.write_text("weights")

    logger = MLflow(experiment="late", register_as="doubler")
    logger.setup(run_dir, {"lr": 0.1})
    log_steps(logger, range(20))
    logger.log_checkpoint(checkpoint, ("best",))
    logger.log_model(types.SimpleNamespace(module=Doubler(), run_dir=run_dir, global_step=20))
    logger.finalize("success")
    assert logger.run_id is None
    assert "did not receive all of this run" in caplog.text
    assert not deliver_pending(run_dir)

    server.start()
    assert deliver_pending(run_dir)
    client = mlflow.MlflowClient(server.uri)
    (run,) = client.search_runs([client.get_experiment_by_name("late").experiment_id])
    assert (run.info.run_id, run.info.status) == (logger.run_id, "FINISHED")
    assert run.data.params == {"lr": "0.1"}
    assert curve(server.uri, run.info.run_id) == expected(range(20))
    assert [file.path for file in client.list_artifacts(run.info.run_id, "checkpoints")] == ["checkpoints/best.pt"]
    assert len(client.search_model_versions("name = 'doubler'")) == 1

    written = "".join(path.read_text() for path in run_dir.iterdir() if path.is_file())
    assert "hunter2" not in written + caplog.text


def test_what_a_killed_attempt_could_not_send_is_sent_by_the_next(run_dir, server):
    server.kill()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        logger = MLflow(tracking_uri=server.uri)
        logger.setup(run_dir, {})
        log_steps(logger, range(30))
        logger.flush()
        os.write(writing, json.dumps(logger.state_dict()).encode())
        log_steps(logger, range(30, 45))
        logger.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    state = json.loads(os.read(reading, 10_000))
    assert state["run_id"] is None

    server.start()
    logger = MLflow(tracking_uri=server.uri)
    logger.load_state_dict(state)
    logger.setup(run_dir, {})
    log_steps(logger, range(30, 60))
    logger.finalize("success")
    assert curve(server.uri, logger.run_id) == expected(range(60))
    assert pending(run_dir) == []


def test_a_login_in_the_address_is_sent_as_the_server_expects_it(run_dir):
    logins = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            logins.append(self.headers.get("Authorization"))
            self.send_error(401)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as gate:
        threading.Thread(target=gate.serve_forever).start()
        logger = MLflow(tracking_uri=f"http://me:se%2Fcret@127.0.0.1:{gate.server_port}")
        logger.setup(run_dir, {})
        logger.finalize("interrupted")
        gate.shutdown()
    assert set(logins) == {"Basic " + base64.b64encode(b"me:se/cret").decode()}
