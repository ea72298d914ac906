"""A cloud's preemption notice, from a metadata server on loopback that answers like Google's."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import textwrap
import threading
import time
from urllib.parse import parse_qs, urlparse

import pytest

from footplate import checkpoint
from footplate.training import preemption


class Metadata(http.server.ThreadingHTTPServer):
    """Answers `wait_for_change` as documented: at once if `last_etag` is not the current one, else at the next change."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.changed = threading.Condition()
        self.asked: list[str] = []
        self.broken = False

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def change(self, name: str, value: str) -> None:
        with self.changed:
            self.values[name] = value
            self.changed.notify_all()


class Answer(http.server.BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        url = urlparse(self.path)
        name, query = url.path.rpartition("/")[2], parse_qs(url.query)
        self.server.asked.append(self.path)
        if self.server.broken:
            self.connection.close()
            return
        if self.headers["Metadata-Flavor"] != "Google" or not url.path.startswith("/computeMetadata/v1/instance/"):
            self.send_error(403)
            return
        with self.server.changed:
            if query["last_etag"] == [self.server.values[name]]:
                self.server.changed.wait_for(lambda: query["last_etag"] != [self.server.values[name]], 30)
            value = self.server.values[name]
        self.send_response(200)
        self.send_header("ETag", value)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(value.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def metadata(monkeypatch):
    server = Metadata()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    yield server
    server.shutdown()
    server.server_close()


def heard(metadata, name, value, wait_s=60.0):
    said: list[str] = []
    came = threading.Event()

    def end(reason):
        said.append(reason)
        came.set()

    with preemption.watching(end):
        deadline = time.monotonic() + 60
        while len(metadata.asked) < 4 and time.monotonic() < deadline:  # both have had a first answer and ask again
            time.sleep(0.01)
        metadata.change(name, value)
        came.wait(wait_s)
    return said


def test_a_preemption_is_heard_at_once(metadata):
    assert heard(metadata, "preempted", "TRUE") == ["this machine is being preempted"]
    assert sum("preempted" in path for path in metadata.asked) == 2, "the question that was open had no answer"


def test_a_stop_for_maintenance_is_heard(metadata):
    assert heard(metadata, "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE") == [
        "this machine is being stopped for maintenance"
    ]


def test_a_machine_that_is_moved_while_it_runs_trains_on(metadata):
    assert heard(metadata, "maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", 0.5) == []


def test_a_metadata_server_that_fails_is_asked_again(metadata, monkeypatch, caplog):
    monkeypatch.setattr(preemption, "RETRY_S", 0.05)
    metadata.broken = True
    threading.Timer(0.3, lambda: setattr(metadata, "broken", False)).start()
    assert heard(metadata, "preempted", "TRUE") == ["this machine is being preempted"]
    assert sum("asking again" in record.getMessage() for record in caplog.records) <= 2


def test_no_thread_outlives_the_watch_though_its_question_is_open(metadata, caplog):
    assert heard(metadata, "maintenance-event", "NONE", 0.1) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "footplate-notices"]
    assert not caplog.text


def test_elsewhere_no_server_is_asked(monkeypatch):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    before = {*threading.enumerate()}
    with preemption.watching(pytest.fail):
        begun = [one for one in threading.enumerate() if one not in before and one.name == "footplate-notices"]
        assert not begun or preemption.ComputeEngine().is_present()


TRAINS = """
    import sys, time
    import footplate as fp
    from models.small import Classifier, loader

    class Slow(fp.Callback):
        def on_train_batch_end(self, trainer, *_):
            time.sleep(0.01)
            if trainer.global_step == 5:
                print("trains", flush=True)

    fp.Trainer(accelerator="cpu", max_epochs=1000, default_root_dir=sys.argv[1], callbacks=Slow(), seed=1,
               enable_progress_bar=False, enable_model_summary=False).fit(Classifier(), loader())
"""


@pytest.mark.slow
def test_a_run_on_a_machine_that_is_preempted_saves_and_ends_with_143(metadata, tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(textwrap.dedent(TRAINS))
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "run"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == "trains\n"
    metadata.change("preempted", "TRUE")
    assert process.wait(60) == 143
    process.stdout.close()
    found = checkpoint.newest([tmp_path / "run"])
    assert checkpoint.read_meta(found)["global_step"] >= 5
