"""A cloud's preemption notice, from a metadata server on loopback that answers like Google's."""

from __future__ import annotations

import threading
from urllib.parse import parse_qs, urlparse

import pytest

from footplate.training import preemption
from footplate.training.preemption import notices
from training.metadata_server import PATIENCE_S, Answer, MetadataServer, heard, saves_and_ends_with_143, threads


class Metadata(MetadataServer):
    """Answers `wait_for_change` as documented: at once if `last_etag` is not the current one, else at the next change."""

    def __init__(self) -> None:
        super().__init__(Google)
        self.values |= {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.changed = threading.Condition()
        self.over = False

    def change(self, name: str, value: str) -> None:
        with self.changed:
            self.values[name] = value
            self.changed.notify_all()


class Google(Answer):
    server: Metadata  # pyright: ignore[reportIncompatibleVariableOverride]

    def answer(self) -> tuple[int, str]:
        url = urlparse(self.path)
        name, query = url.path.rpartition("/")[2], parse_qs(url.query)
        values, (etag,) = self.server.values, query["last_etag"]
        if values.get("broken"):
            raise ConnectionError
        if self.headers["Metadata-Flavor"] != "Google" or not url.path.startswith("/computeMetadata/v1/instance/"):
            return 403, ""
        with self.server.changed:
            if etag == values[name]:
                self.server.changed.wait_for(lambda: self.server.over or etag != values[name], 30)
            self.headers_out["ETag"] = values[name]
            return 200, values[name]


@pytest.fixture
def metadata(monkeypatch):
    server = Metadata()
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    yield server
    # A question that is still open would go on in its thread, beside later tests.
    with server.changed:
        server.over = True
        server.changed.notify_all()
    server.close()


def heard_of(metadata, name, value, wait_s=PATIENCE_S):
    # Both values have had a first answer, and are asked for again.
    return heard(metadata, lambda: metadata.change(name, value), requests=4, wait_s=wait_s)


def test_a_preemption_is_heard_at_once(metadata):
    assert heard_of(metadata, "preempted", "TRUE") == ["this machine is being preempted"]
    assert sum("preempted" in path for _, path in metadata.asked) == 2, "the question that was open had no answer"


def test_a_stop_for_maintenance_is_heard(metadata):
    assert heard_of(metadata, "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE") == [
        "this machine is being stopped for maintenance"
    ]


def test_a_machine_that_is_moved_while_it_runs_trains_on(metadata):
    assert heard_of(metadata, "maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", 0.5) == []


def test_a_metadata_server_that_fails_is_asked_again(metadata, monkeypatch, caplog):
    monkeypatch.setattr(notices, "RETRY_S", 0.05)
    metadata.values["broken"] = True
    threading.Timer(0.3, lambda: metadata.values.pop("broken")).start()
    assert heard_of(metadata, "preempted", "TRUE") == ["this machine is being preempted"]
    assert sum("asking again" in record.getMessage() for record in caplog.records) <= 2


def test_no_thread_outlives_the_watch_though_its_question_is_open(metadata, caplog):
    assert heard_of(metadata, "maintenance-event", "NONE", 0.1) == []
    assert not threads()
    assert not caplog.text


FIRMWARE = {
    "product_name": ("Google Compute Engine", "ComputeEngine"),
    "sys_vendor": ("Amazon EC2", "EC2"),
    "chassis_asset_tag": ("7783-7084-3265-9085-8269-3286-77", "Azure"),
    "bios_vendor": ("SeaBIOS", None),
}


@pytest.mark.parametrize("file", FIRMWARE)
def test_a_clouds_machine_is_known_by_its_firmware(file, tmp_path, monkeypatch):
    for name in ("GCE_METADATA_HOST", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "FOOTPLATE_AZURE_METADATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(notices, "DMI", tmp_path)
    text, cloud = FIRMWARE[file]
    (tmp_path / file).write_text(text + "\n")
    assert [kind.__name__ for kind in preemption.CLOUDS if kind().is_present()] == ([cloud] if cloud else [])


def test_elsewhere_no_server_is_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(notices, "DMI", tmp_path)
    with preemption.watching(pytest.fail):
        assert not threads()


@pytest.mark.slow
def test_a_run_on_a_machine_that_is_preempted_saves_and_ends_with_143(metadata, tmp_path):
    saves_and_ends_with_143(tmp_path, lambda: metadata.change("preempted", "TRUE"))
