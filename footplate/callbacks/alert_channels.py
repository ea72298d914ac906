"""Channels of alerts: a webhook, an e-mail server, or a Python function; and the thread that sends messages to them.

    alert callback ──► queue ──► thread ──► channel, at most 4 attempts, each with a time limit

Training never waits for a channel. A message that can't be delivered is a warning. A warning never shows an address or a
password, because the address of a webhook is a secret. The modules of HTTP and SMTP are imported when a message is sent,
since every program imports this file.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from footplate.core.errors import ConfigError
from footplate.core.threads import join
from footplate.tracking.file_moves import append_whole

if TYPE_CHECKING:
    from smtplib import SMTP

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
MOST_ATTEMPTS = 4
FIRST_PAUSE_S = 1.0
MOST_WAITING = 100
# Statuses of HTTP that may go away.
TEMPORARY = {408, 425, 429}


@dataclass(frozen=True)
class AlertMessage:
    """What a channel receives.

    Attributes:
        rule: the rule that holds, such as "loss is NaN".
        text: a sentence for people.
        run: the name of the run's directory.
        job: the name of the job; None outside a job.
        attempt: the number of the job's attempt; 1 outside a job.
        host: the name of the machine.
        step: the global step.
        epoch: the epoch.
        value: the value of the metric; None for other rules.
        time_s: seconds since 1970.

    Examples:
        >>> def show(message: fp.AlertMessage) -> None:
        ...     print(f"{message.run}, step {message.step}: {message.text}")
        >>> trainer = fp.Trainer(callbacks=[fp.Alert("loss is NaN", to=show)])
    """

    rule: str
    text: str
    run: str
    job: str | None
    attempt: int
    host: str
    step: int
    epoch: int
    value: float | None
    time_s: float


class Refused(Exception):
    """A channel refused a message permanently."""


class Webhook:
    """An HTTP address that receives a POST request with JSON.

    Args:
        url: the address; `$NAME` reads it from an environment variable when training starts.
        form: "json" sends all fields of an `AlertMessage`; "slack" sends Slack's form, a `text`.
        headers: further headers. A value `$NAME` is read from an environment variable, too.

    Raises:
        ConfigError: an address that is not http or https, or an unknown form.

    Examples:
        >>> slack = fp.Webhook("$SLACK_URL", form="slack")
        >>> trainer = fp.Trainer(callbacks=[fp.Alert("run failed", to=slack)])
    """

    def __init__(
        self, url: str, form: Literal["json", "slack"] = "json", headers: dict[str, str] | None = None
    ) -> None:
        if form not in ("json", "slack"):
            raise ConfigError(f'Webhook(form={form!r}): expected "json" or "slack".')
        self._url = url
        self._form = form
        self._headers = dict(headers or {})
        if not url.startswith("$"):
            self._check(url)

    def check(self) -> None:
        """Raise ConfigError if a variable is missing."""
        self._check(_secret(self._url, "Webhook(url=…)"))
        for name, value in self._headers.items():
            _secret(value, f"Webhook(headers={{{name!r}: …}})")

    def send(self, message: AlertMessage) -> None:
        """Send a message.

        Raises:
            Refused: the server refused the message permanently.
            OSError: the server can't be reached, or has a temporary problem.
        """
        import urllib.error
        import urllib.request

        # JSON has no NaN.
        fields = asdict(message) | {"value": None if message.value is None else str(message.value)}
        content = {"text": message.text} if self._form == "slack" else fields
        headers = {name: _secret(value, "") for name, value in self._headers.items()}
        request = urllib.request.Request(
            _secret(self._url, ""), json.dumps(content).encode(), {"Content-Type": "application/json", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code not in TEMPORARY:
                raise Refused(f"HTTP status {error.code}") from None
            raise OSError(f"HTTP status {error.code}") from None

    def __repr__(self) -> str:
        return "Webhook(…)"

    @staticmethod
    def _check(url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("Webhook(url=…): expected an address that begins with http:// or https://.")


class Email:
    """An e-mail server that receives a message by SMTP.

    Args:
        to: an address, or several.
        sender: the sender's address.
        host: the server.
        port: its port; 587 by default, 465 with `tls="tls"`, 25 with `tls="none"`.
        user: the name of an account; None sends without a login.
        password: its password; `$NAME` reads it from an environment variable when training starts.
        tls: "starttls", "tls" from the beginning, or "none".

    Raises:
        ConfigError: an argument has an invalid value.

    Examples:
        >>> mail = fp.Email("team@example.com", sender="runs@example.com", host="smtp.example.com")
        >>> trainer = fp.Trainer(callbacks=[fp.Alert("run failed", to=mail)])
    """

    def __init__(
        self,
        to: str | Sequence[str],
        sender: str,
        host: str,
        port: int | None = None,
        user: str | None = None,
        password: str | None = None,
        tls: Literal["starttls", "tls", "none"] = "starttls",
    ) -> None:
        if tls not in ("starttls", "tls", "none"):
            raise ConfigError(f'Email(tls={tls!r}): expected "starttls", "tls" or "none".')
        if (user is None) != (password is None):
            raise ConfigError("Email: give user and password together.")
        self._to = [to] if isinstance(to, str) else list(to)
        for address in [*self._to, sender]:
            if not re.fullmatch(r"[^@\s]+@[^@\s]+", address):
                raise ConfigError(f"Email: {address!r} is not an e-mail address.")
        self._sender = sender
        self._host = host
        self._port = port or {"starttls": 587, "tls": 465, "none": 25}[tls]
        self._user = user
        self._password = password
        self._tls = tls

    def check(self) -> None:
        """Raise ConfigError if a variable is missing."""
        if self._password is not None:
            _secret(self._password, "Email(password=…)")

    def send(self, message: AlertMessage) -> None:
        """Send a message.

        Raises:
            Refused: the server refused the message or the login permanently.
            OSError: the server can't be reached, or has a temporary problem.
        """
        import smtplib
        import ssl
        from email.message import EmailMessage

        mail = EmailMessage()
        # A header can't have line breaks.
        mail["Subject"] = " ".join(f"[footplate] {message.run}: {message.rule}".split())
        mail["From"], mail["To"] = self._sender, ", ".join(self._to)
        fields = "".join(f"{name}: {value}\n" for name, value in asdict(message).items() if name != "text")
        mail.set_content(f"{message.text}\n\n{fields}")
        try:
            with self._connect() as server:
                if self._tls == "starttls":
                    server.starttls(context=ssl.create_default_context())
                if self._user is not None and self._password is not None:
                    server.login(self._user, _secret(self._password, ""))
                server.send_message(mail)
        except smtplib.SMTPResponseException as error:
            kind = Refused if error.smtp_code >= 500 else OSError
            raise kind(f"SMTP status {error.smtp_code}") from None
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            kind = Refused if min(codes) >= 500 else OSError
            raise kind(f"SMTP statuses {sorted(codes)} for the recipients") from None

    def __repr__(self) -> str:
        return f"Email(to={self._to})"

    def _connect(self) -> SMTP:
        import smtplib
        import ssl

        if self._tls == "tls":
            context = ssl.create_default_context()
            return smtplib.SMTP_SSL(self._host, self._port, timeout=REQUEST_TIMEOUT_S, context=context)
        return smtplib.SMTP(self._host, self._port, timeout=REQUEST_TIMEOUT_S)


Channel = Webhook | Email | Callable[[AlertMessage], Any]


class Sender:
    """A thread that sends messages to channels, each at most `MOST_ATTEMPTS` times.

    Args:
        channels: the channels.
        record: a file to which each message is appended, as a line of JSON; None for no file.
    """

    def __init__(self, channels: Sequence[Channel], record: Path | None = None) -> None:
        self._channels = channels
        self._record = record
        self._messages: queue.Queue[AlertMessage | None] = queue.Queue(MOST_WAITING)
        self._deadline_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="footplate-alerts", daemon=True)
        self._thread.start()

    def put(self, message: AlertMessage) -> None:
        """Queue a message. Never blocks; if a hundred messages wait, the message is dropped."""
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            log.warning("The alert %r is dropped: %d messages wait.", message.rule, MOST_WAITING)

    def close(self, timeout_s: float) -> None:
        """Send the remaining messages within `timeout_s`, and end the thread unless a channel hangs."""
        self._deadline_s = time.monotonic() + timeout_s
        try:
            self._messages.put_nowait(None)
        except queue.Full:
            log.warning("%d alerts are not sent.", MOST_WAITING)
            return
        join(self._thread, timeout_s, "a channel of an alert doesn't answer")

    def _run(self) -> None:
        while True:
            message = self._messages.get()
            if message is None:
                return
            self._write_down(message)
            for channel in self._channels:
                self._send(channel, message)

    def _write_down(self, message: AlertMessage) -> None:
        if self._record is None:
            return
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            append_whole(self._record, json.dumps(asdict(message)).encode() + b"\n")
        except OSError as error:
            log.warning("The alert %r can't be written to %s: %s", message.rule, self._record, error)

    def _send(self, channel: Channel, message: AlertMessage) -> None:
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                if isinstance(channel, (Webhook, Email)):
                    channel.send(message)
                else:
                    channel(message)
                return
            except Exception as error:
                final = attempt == MOST_ATTEMPTS or not isinstance(error, OSError)
                if final or time.monotonic() + pause_s > self._deadline_s:
                    log.warning("The alert %r was not delivered to %r: %s", message.rule, channel, _reason(error))
                    return
            time.sleep(pause_s)
            pause_s *= 2


def _secret(value: str, argument: str) -> str:
    """Return a value, or that of the variable that it names.

    Raises:
        ConfigError: the variable isn't set.
    """
    if not value.startswith("$"):
        return value
    secret = os.environ.get(value[1:])
    if not secret:
        raise ConfigError(f"{argument}: the environment variable {value[1:]} is not set.")
    return secret


def _reason(error: Exception) -> str:
    """Describe a failure without text that may hold an address or a password."""
    from urllib.error import URLError

    if isinstance(error, URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    ours = isinstance(error, (Refused, OSError)) and str(error).startswith(("HTTP status", "SMTP status"))
    if ours or (isinstance(error, OSError) and error.strerror):
        return str(error)
    return type(error).__name__
