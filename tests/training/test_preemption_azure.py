"""The notices of Microsoft's Azure, from a metadata server on loopback that answers like Microsoft's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from footplate.training.preemption import azure, notices
from training.metadata_server import Answer, MetadataServer, heard, threads


class Microsoft(Answer):
    """Lists the events in `events`. The machine's name is `trainer_0`."""

    def answer(self) -> tuple[int, str]:
        if self.headers["Metadata"] != "true":
            return 400, ""
        if self.path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return 200, "trainer_0"
        if self.path != "/metadata/scheduledevents?api-version=2020-07-01":
            return 404, ""
        values = self.server.values
        return values.get("status", 200), values.get("text") or json.dumps(values.get("document", document()))


def document(*events: dict[str, Any]) -> dict[str, Any]:
    return {"DocumentIncarnation": 1 + len(events), "Events": list(events)}


def event(kind: str, *machines: str) -> dict[str, Any]:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297", "EventType": kind, "ResourceType": "VirtualMachine",
        "Resources": list(machines), "EventStatus": "Scheduled", "NotBefore": "Wed, 25 Nov 2026 14:00:00 GMT",
        "Description": "", "EventSource": "Platform", "DurationInSeconds": -1,
    }  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    server = MetadataServer(Microsoft)
    monkeypatch.setenv("FOOTPLATE_AZURE_METADATA", server.host)
    monkeypatch.setattr(azure, "POLL_S", 0.02)
    monkeypatch.setattr(notices, "RETRY_S", 0.02)
    yield server
    server.close()


@pytest.mark.parametrize("kind", azure.ENDS)
def test_an_event_that_ends_the_machine_is_heard(server, kind):
    change = document(event("Freeze", "trainer_0"), event(kind, "trainer_1", "trainer_0"))
    assert heard(server, lambda: server.values.update(document=change)) == [azure.ENDS[kind]]


@pytest.mark.parametrize(
    "other", [event("Freeze", "trainer_0"), event("Preempt", "trainer_1"), event("Later", "trainer_0")]
)
def test_a_freeze_and_events_of_other_machines_end_nothing(server, other):
    assert heard(server, lambda: server.values.update(document=document(other)), wait_s=0.2) == []
    assert not threads()


@pytest.mark.parametrize("broken", [{"status": 500}, {"text": "<html>"}, {"text": '{"Events": [{}]}'}, {"text": "[]"}])
def test_a_server_that_fails_is_asked_again_and_said_so_once(server, broken, caplog):
    server.values.update(broken)

    def mend():
        server.values.clear()
        server.values["document"] = document(event("Preempt", "trainer_0"))

    assert heard(server, mend, requests=5) == [azure.ENDS["Preempt"]]
    assert len([record for record in caplog.records if "Asking again" in record.getMessage()]) == 1
