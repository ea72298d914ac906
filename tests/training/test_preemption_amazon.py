"""The notices of Amazon's EC2, from a metadata server on loopback that answers like Amazon's."""

from __future__ import annotations

import json

import pytest

from footplate.training.preemption import amazon, notices
from training.metadata_server import Answer, MetadataServer, heard, saves_and_ends_with_143, threads

ACTION = "/latest/meta-data/spot/instance-action"
TOKEN = ("PUT", "/latest/api/token")


class Amazon(Answer):
    """Answers 404 until there is an action. Gives tokens, unless `tokens` is a status with which it refuses them."""

    def answer(self) -> tuple[int, str]:
        values = self.server.values
        if (self.command, self.path) == TOKEN:
            if values.get("tokens"):
                return values["tokens"], ""
            assert 0 < int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21_600
            values["token"] = f"token-{len(self.server.asked)}"
            return 200, values["token"]
        if self.command != "GET" or self.path != ACTION:
            return 404, ""
        if self.headers["X-aws-ec2-metadata-token"] != values.get("token"):
            return 401, ""
        return (200, values["action"]) if "action" in values else (404, "")


@pytest.fixture
def server(monkeypatch):
    server = MetadataServer(Amazon)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{server.host}")
    monkeypatch.setattr(amazon, "POLL_S", 0.02)
    monkeypatch.setattr(notices, "RETRY_S", 0.02)
    yield server
    server.close()


def announce(server: MetadataServer, action: str) -> None:
    server.values["action"] = json.dumps({"action": action, "time": "2026-11-25T14:00:00Z"})


@pytest.mark.parametrize(
    ("action", "reason"), [("stop", "stopped"), ("terminate", "terminated"), ("hibernate", "hibernated")]
)
def test_an_interruption_is_heard(server, action, reason):
    assert heard(server, lambda: announce(server, action)) == [f"this spot machine will be {reason}"]
    assert server.asked.count(TOKEN) == 1


def test_an_action_that_nobody_knows_is_an_interruption(server):
    assert heard(server, lambda: server.values.update(action="soon")) == ["this spot machine will be interrupted"]


def test_without_an_interruption_the_run_goes_on(server):
    assert heard(server, lambda: None, requests=6, wait_s=0.2) == []
    assert not threads()


def test_a_token_that_has_expired_is_replaced(server):
    def expire():
        server.values["token"] = "another"
        announce(server, "stop")

    assert heard(server, expire) == ["this spot machine will be stopped"]
    assert server.asked.count(TOKEN) == 2


def test_a_server_without_tokens_is_asked_without_one(server):
    server.values["tokens"] = 404
    assert heard(server, lambda: announce(server, "terminate")) == ["this spot machine will be terminated"]


def test_a_server_that_fails_is_asked_again_and_said_so_once(server, caplog):
    server.values["tokens"] = 503

    def mend():
        server.values["tokens"] = None
        announce(server, "stop")

    assert heard(server, mend, requests=5) == ["this spot machine will be stopped"]
    warnings = [record.getMessage() for record in caplog.records if "Asking again" in record.getMessage()]
    assert len(warnings) == 1
    assert f"{server.host} answers 503 Service Unavailable" in warnings[0]


def test_no_server_is_asked_if_the_user_has_disabled_it(server, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert heard(server, lambda: announce(server, "stop"), requests=0, wait_s=0.2) == []
    assert server.asked == []


@pytest.mark.slow
def test_a_run_on_a_spot_machine_that_is_taken_away_saves_and_ends_with_143(server, tmp_path):
    saves_and_ends_with_143(tmp_path, lambda: announce(server, "terminate"))
