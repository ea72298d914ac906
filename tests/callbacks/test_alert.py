"""Alerts: rules that hold in a real training, and channels on loopback that work, fail and hang."""

import json
import logging
import math
import os
import socketserver
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp
from footplate.callbacks import alert_channels
from footplate.callbacks.alert import Rule
from footplate.core.errors import ConfigError


class Net(fp.Module):
    """A model whose loss is what the test gives, by step."""

    def __init__(self, losses=(), at_step=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.losses = losses
        self.at_step = at_step

    def training_step(self, batch, batch_idx):
        if self.at_step:
            self.at_step(self.global_step)
        factor = self.losses[self.global_step] if self.losses else 1.0
        loss = 0 * self.layer(batch[0]).sum() + factor
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(3.0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data(rows=12):
    return DataLoader(TensorDataset(torch.ones(rows, 1)), batch_size=1)


@pytest.fixture
def fit(make_trainer):
    """Train for one epoch of 12 steps with a rule; return the messages."""

    def run(rule, model, to=None, **options):
        messages = []
        channel = to if to is not None else messages.append
        alert = fp.Alert(rule, to=channel, **options)
        make_trainer(max_epochs=1, callbacks=[alert], log_every_n_steps=1).fit(model, data())
        return messages

    return run


def test_messages_are_recorded_in_the_runs_directory_over_all_calls(fit, make_trainer, tmp_path):
    for _ in range(2):
        messages = []
        alert = fp.Alert("train_loss > 5", to=messages.append)
        run = make_trainer(max_epochs=1, callbacks=[alert], log_every_n_steps=1)
        run.fit(Net([1.0] * 8 + [9.0] * 4), data())
        assert len(messages) == 1
    recorded = [json.loads(line) for line in (Path(run.default_root_dir) / "alerts.jsonl").read_text().splitlines()]
    assert [message["rule"] for message in recorded] == ["train_loss > 5"] * 2
    assert recorded[-1] == asdict(messages[0])


class Web:
    """An HTTP server on loopback that answers with the given statuses, and 200 afterwards; None hangs."""

    def __init__(self, *statuses):
        self.statuses = list(statuses)
        self.bodies = []
        self.headers = []
        self.ended = threading.Event()
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                web.headers.append(dict(self.headers))
                web.bodies.append(json.loads(body))
                status = web.statuses.pop(0) if web.statuses else 200
                if status is None:
                    web.ended.wait()
                    return
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks/s3cr3t"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def web():
    servers = []

    def start(*statuses):
        servers.append(Web(*statuses))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Mail:
    """An SMTP server on loopback. It keeps messages, or answers the login with a status."""

    def __init__(self, login_status=235):
        self.messages = []
        self.logins = []
        mail = self

        class Handler(socketserver.StreamRequestHandler):
            def say(self, line):
                self.wfile.write(line.encode() + b"\r\n")

            def handle(self):
                self.say("220 ready")
                for raw in self.rfile:
                    line = raw.decode().strip()
                    verb = line.partition(" ")[0].upper()
                    if verb == "EHLO":
                        self.say("250-here")
                        self.say("250 AUTH PLAIN")
                    elif verb == "AUTH":
                        mail.logins.append(line)
                        self.say(f"{login_status} answer")
                    elif verb == "DATA":
                        self.say("354 go on")
                        lines = iter(self.rfile.readline, b".\r\n")
                        mail.messages.append(b"".join(lines).decode())
                        self.say("250 kept")
                    elif verb == "QUIT":
                        self.say("221 bye")
                        return
                    else:
                        self.say("250 ok")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def quick(monkeypatch):
    """Shorter pauses between attempts."""
    monkeypatch.setattr(alert_channels, "FIRST_PAUSE_S", 0.05)


def test_a_loss_that_stays_nan_sends_one_message(fit):
    (message,) = fit("loss is NaN", Net([1.0] * 4 + [math.nan] * 8))
    assert message.rule == "loss is NaN"
    assert "the training loss became NaN or infinite at step 5" in message.text
    assert math.isnan(message.value)
    assert (message.run, message.job, message.attempt) == ("run", None, 1)


def test_a_metric_beyond_its_bound_sends_one_message_each_time_it_gets_there(fit):
    values = [1.0, 5.0, 6.0, 1.0, 1.0, 7.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    first, second = fit("train_loss > 4.5", Net(values), again_after_s=0)
    assert (first.value, second.value) == (5.0, 7.0)
    assert first.step < second.step
    assert "train_loss is 5" in first.text


def test_a_metric_that_comes_back_soon_sends_nothing_more(fit):
    values = [1.0, 5.0] * 6
    assert len(fit("train_loss > 4.5", Net(values))) == 1


def test_a_metric_of_validation_is_checked(make_trainer):
    messages = []
    alert = fp.Alert("val_loss >= 3", to=messages.append)
    make_trainer(max_epochs=2, callbacks=[alert]).fit(Net(), data(), data(2))
    assert [message.value for message in messages] == [3.0]


def test_nothing_is_sent_by_a_run_that_is_well(fit):
    rules = ["loss is NaN", "train_loss is NaN", "run failed", "no step for 10 min", "train_loss < 0", "unknown > 1"]
    assert fit(rules, Net()) == []


def test_a_step_that_hangs_is_reported_while_it_hangs(fit):
    messages = []

    def wait_for_message(step):
        if step == 3:
            deadline = time.monotonic() + 60
            while not messages:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    fit("no step for 0.3 s", Net(at_step=wait_for_message), to=messages.append)
    assert messages[0].rule == "no step for 0.3 s"
    assert "no batch has ended for" in messages[0].text
    assert len(messages) == 1


def test_a_failed_run_is_reported_with_its_exception(fit):
    messages = []

    def fail(step):
        if step == 5:
            raise ValueError("bad row in s3://me:hunter2@lake/x")

    with pytest.raises(ValueError, match="bad row"):
        fit("job failed", Net(at_step=fail), to=messages.append)
    (message,) = messages
    assert "ValueError: bad row in s3://lake/x" in message.text
    assert message.step == 5


def test_ctrl_c_is_no_failure(fit):
    messages = []

    def interrupt(step):
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit("run failed", Net(at_step=interrupt), to=messages.append)
    assert messages == []


def test_each_attempt_of_a_job_reports_with_its_number(fit, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_JOB_ID", "j1")
    monkeypatch.setenv("FOOTPLATE_JOB_NAME", "flowers")
    attempts = []
    for attempt in (1, 2):
        monkeypatch.setenv("FOOTPLATE_JOB_ATTEMPT", str(attempt))
        (message,) = fit("train_loss > 0", Net())
        attempts.append((message.job, message.attempt))
        assert f"job flowers, attempt {attempt} on " in message.text
    assert attempts == [("flowers", 1), ("flowers", 2)]


def test_a_webhook_gets_all_fields_or_slacks_form(fit, web, monkeypatch):
    server = web()
    monkeypatch.setenv("HOOK_URL", server.url)
    monkeypatch.setenv("HOOK_TOKEN", "Bearer t0ken")
    channels = [
        fp.Webhook("$HOOK_URL", headers={"Authorization": "$HOOK_TOKEN"}),
        fp.Webhook(server.url, form="slack"),
    ]
    fit("train_loss > 0", Net(), to=channels)
    plain, slack = server.bodies
    assert slack.keys() == {"text"}
    assert slack["text"] == plain["text"]
    assert (plain["rule"], plain["value"], plain["run"]) == ("train_loss > 0", "1.0", "run")
    assert server.headers[0]["Authorization"] == "Bearer t0ken"


def test_a_server_with_a_temporary_failure_gets_the_message_later(fit, web, quick):
    server = web(503, 429, 500)
    fit("train_loss > 0", Net(), to=fp.Webhook(server.url))
    assert len(server.bodies) == 4


@pytest.mark.parametrize(("statuses", "requests"), [([500] * 9, 4), ([404], 1)])
def test_a_server_that_always_fails_gets_a_bounded_number_of_requests(fit, web, quick, caplog, statuses, requests):
    server = web(*statuses)
    fit("train_loss > 0", Net(), to=fp.Webhook(server.url))
    assert len(server.bodies) == requests
    assert f"was not delivered to Webhook(…): HTTP status {statuses[0]}" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_a_server_that_hangs_does_not_stall_training(make_trainer, web, quick, caplog, monkeypatch):
    monkeypatch.setattr("footplate.callbacks.alert.CLOSE_TIMEOUT_S", 1.0)
    server = web(None, None, None, None)
    ended = []
    model = Net()
    model.on_train_end = lambda: ended.append(len(server.bodies))
    alert = fp.Alert("train_loss > 0", to=fp.Webhook(server.url))
    began = time.monotonic()
    run = make_trainer(max_epochs=1, callbacks=[alert], log_every_n_steps=1)
    run.fit(model, data())
    # The first request was still waiting for its answer when training ended.
    assert ended in ([0], [1])
    assert run.global_step == 12
    assert time.monotonic() - began < 30
    assert "s3cr3t" not in caplog.text


def test_a_server_that_is_not_there_is_a_warning_without_its_address(fit, quick, caplog):
    fit("train_loss > 0", Net(), to=fp.Webhook("http://127.0.0.1:9/hooks/s3cr3t"))
    assert "was not delivered to Webhook(…)" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_an_email_server_gets_the_message_with_a_login(fit, monkeypatch):
    server = Mail()
    monkeypatch.setenv("MAIL_PASSWORD", "hunter2")
    channel = fp.Email(
        ["a@lab.example", "b@lab.example"], sender="gpu@lab.example", host="127.0.0.1", port=server.port,
        user="gpu", password="$MAIL_PASSWORD", tls="none",
    )  # fmt: skip
    fit("train_loss > 0", Net(), to=channel)
    server.close()
    (message,) = server.messages
    assert "Subject: [footplate] run: train_loss > 0" in message
    assert "To: a@lab.example, b@lab.example" in message
    assert "train_loss is 1" in message
    assert len(server.logins) == 1
    assert "hunter2" not in message


def test_a_refused_login_is_tried_once_and_never_shown(fit, quick, caplog):
    server = Mail(login_status=535)
    channel = fp.Email(
        "a@lab.example", "gpu@lab.example", "127.0.0.1", server.port, user="gpu", password="hunter2", tls="none"
    )
    fit("train_loss > 0", Net(), to=channel)
    server.close()
    assert server.messages == []
    assert len(server.logins) == 1
    assert "was not delivered to Email(to=['a@lab.example']): SMTP status 535" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_function_that_raises_is_a_warning(fit, caplog):
    def broken(message):
        raise RuntimeError("token s3cr3t")

    caplog.set_level(logging.WARNING)
    fit("train_loss > 0", Net(), to=broken)
    assert "RuntimeError" in caplog.text
    assert "s3cr3t" not in caplog.text


@pytest.mark.slow
def test_with_two_processes_the_first_alone_sends(make_trainer, tmp_path):
    received = tmp_path / "messages"

    def keep(message):
        with received.open("a") as file:
            file.write(f"{message.rule}\n")

    make_trainer(devices=2, max_epochs=1, log_every_n_steps=1, callbacks=[fp.Alert("train_loss > 0", to=keep)]).fit(
        Net(), data()
    )
    assert received.read_text() == "train_loss > 0\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("no step for 5 min", Rule("no step for 5 min", "stuck", limit=300.0)),
        ("no step for 1.5h", Rule("no step for 1.5h", "stuck", limit=5400.0)),
        ("val/acc <= 0.5", Rule("val/acc <= 0.5", "bound", "val/acc", "<=", 0.5)),
        ("loss is nan", Rule("loss is nan", "nan", "loss")),
    ],
)
def test_rules_are_read(text, rule):
    assert Rule.parse(text) == rule


@pytest.mark.parametrize("text", ["loss", "loss == 3", "loss > much", "no step for 0 s", "no step for 5 weeks", ""])
def test_a_text_that_is_no_rule_is_refused(text):
    with pytest.raises(ConfigError, match=r'expected "loss is NaN"'):
        fp.Alert(text, to=print)


def test_channels_that_cannot_work_are_refused_before_training(fit, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError, match=r"begins with http") as failure:
        fp.Webhook("ftp://s3cr3t")
    assert "s3cr3t" not in str(failure.value)
    with pytest.raises(ConfigError, match=r"Alert\(to=3\)"):
        fp.Alert("loss is NaN", to=3)
    with pytest.raises(ConfigError, match=r"'me' is not an e-mail address"):
        fp.Email("me", "gpu@lab.example", "localhost")
    with pytest.raises(ConfigError, match=r"user and password together"):
        fp.Email("a@lab.example", "gpu@lab.example", "localhost", user="gpu")
    with pytest.raises(ConfigError, match=r"the environment variable NOT_SET is not set"):
        fit("loss is NaN", Net(), to=fp.Webhook("$NOT_SET"))
    assert os.environ.get("NOT_SET") is None
