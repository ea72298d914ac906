"""Requests to Google's REST APIs, with one sentence for each kind of failure that says what to do.

There are two kinds. `Unanswered` may pass: no connection, a time-out, 429, 5xx. The caller retries later; a request that
creates something may have succeeded after all. `Refused` is permanent: the request is wrong, or not allowed, or its object
doesn't exist.

Google's own libraries find the credentials (application default credentials). A token is sent to `*.googleapis.com` over
TLS, and nowhere else. gcloud's own variables, `CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM` and `…_LOGGING`, may name
another host there, such as a private endpoint, or a server on loopback, which gets no token.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from footplate.core.errors import ConfigError, FootplateError
from footplate.core.optional import require

log = logging.getLogger(__name__)

CONNECT_S, READ_S = 5.0, 30.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
PURPOSE = "Running jobs on Vertex AI"

Service = Literal["aiplatform", "logging"]

_NAMES = {"aiplatform": "Vertex AI", "logging": "Cloud Logging"}
_ROLES = {"aiplatform": "roles/aiplatform.user", "logging": "roles/logging.viewer"}


class Unanswered(FootplateError):
    """A request without an answer, or with a temporary error. It may have had its effect after all."""


class Refused(ConfigError):
    """A request that fails however often it is repeated.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def endpoint(service: Service, region: str, environ: Mapping[str, str] = os.environ) -> str:
    """The URL of a service, without a slash at its end.

    Raises:
        ConfigError: the environment names a host that must not get a token, or the region is wrong.
    """
    # The region becomes part of the host's name.
    if not re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", region):
        raise ConfigError(f"region {region!r}: expected one such as us-central1.")
    variable = f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}"
    override = environ.get(variable)
    if not override:
        return (
            f"https://{region}-aiplatform.googleapis.com"
            if service == "aiplatform"
            else f"https://{service}.googleapis.com"
        )
    parts = urlsplit(override)
    host = parts.hostname or ""
    ours = parts.scheme == "https" and (host == "googleapis.com" or host.endswith(".googleapis.com"))
    if parts.username or not (ours or (parts.scheme in ("http", "https") and host in LOOPBACK)):
        raise ConfigError(
            f"{variable} names the host {host!r}: expected one of googleapis.com with https://, or one of this machine "
            "(127.0.0.1). A token is sent nowhere else."
        )
    return override.rstrip("/")


class Client:
    """Makes requests to the services of a project.

    Args:
        project: the project's id.
        region: the region of its jobs.

    Raises:
        MissingExtra: google-auth or requests isn't installed.
        Refused: there are no credentials.
    """

    def __init__(self, project: str, region: str) -> None:
        self._project = project
        self._bases: dict[Service, str] = {name: endpoint(name, region) for name in _NAMES}  # pyright: ignore
        self._requests = require("requests", "vertex", PURPOSE)
        self._session: Any = None

    def ask(
        self,
        service: Service,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Make a request, and return the answer's JSON.

        Args:
            service: the service.
            method: `GET` or `POST`.
            path: the path after the host, such as `/v1/projects/…`.
            body: the JSON to send.
            params: the query.

        Raises:
            Unanswered: a retry may help.
            Refused: a retry won't help.
        """
        url = self._bases[service] + path
        try:
            answer = self._session_for(url).request(
                method, url, json=body, params=params, timeout=(CONNECT_S, READ_S), allow_redirects=False
            )
        except self._requests.exceptions.RequestException as error:
            raise Unanswered(f"{_NAMES[service]} can't be reached: {_reason(error)}.") from None
        except self._auth_errors().GoogleAuthError as error:
            if error.retryable or isinstance(error, self._auth_errors().TransportError):
                raise Unanswered(f"Google issues no token now: {_first_line(error)}.") from None
            raise Refused(f"Google no longer accepts the credentials ({_first_line(error)}). {LOG_IN}", 401) from None
        if answer.status_code != 200:
            raise self._error(service, answer.status_code, answer.content)
        try:
            values = answer.json()
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise Unanswered(f"{_NAMES[service]} answers with something that isn't JSON.")
        return values

    def _session_for(self, url: str) -> Any:
        if urlsplit(url).hostname in LOOPBACK:
            session = self._requests.Session()
            # Use neither a proxy nor ~/.netrc.
            session.trust_env = False
            return session
        if self._session is None:
            self._session = _authorized()
        return self._session

    def _auth_errors(self) -> Any:
        return require("google.auth.exceptions", "vertex", PURPOSE)

    def _error(self, service: Service, status: int, content: bytes) -> FootplateError:
        """The failure that an answer other than 200 means."""
        message, reason = _parse_error(content)
        name, quote = _NAMES[service], f" It says: {message.rstrip('.')}." if message else ""

        # A repeated request may succeed.
        if status == 429:
            return Unanswered(
                f"{name} gets too many requests, or a quota of {self._project} is used up (429).{quote} Raise quotas at "
                "https://console.cloud.google.com/iam-admin/quotas."
            )
        if status >= 500 or status == 408:
            return Unanswered(f"{name} fails ({status}).{quote}")

        # A repeated request fails again.
        if status == 401:
            return Refused(f"{name} doesn't accept the credentials (401).{quote} {LOG_IN}", status)
        if status == 403 and reason == "SERVICE_DISABLED":
            return Refused(
                f"{name} is not enabled in the project {self._project}. Enable it: "
                f"gcloud services enable {service}.googleapis.com --project {self._project}",
                status,
            )
        if status == 403:
            return Refused(
                f"{name} doesn't allow this account to do that in the project {self._project} (403).{quote} The role that "
                f"allows it is {_ROLES[service]}. An owner of the project grants it: "
                f"gcloud projects add-iam-policy-binding {self._project} --member=user:YOU --role={_ROLES[service]}",
                status,
            )
        if status == 404:
            return Refused(f"{name} doesn't know it (404).{quote} Check project and region.", status)
        return Refused(f"{name} refuses the request ({status}).{quote}", status)


LOG_IN = (
    "Log in: gcloud auth application-default login; or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key."
)


def _authorized() -> Any:
    """A session that sends a token with each request, and renews it before it expires."""
    auth = require("google.auth", "vertex", PURPOSE)
    transport = require("google.auth.transport.requests", "vertex", PURPOSE)
    try:
        credentials, _ = auth.default(scopes=[SCOPE])
    except auth.exceptions.DefaultCredentialsError:
        raise Refused(f"There are no credentials for Google Cloud on this machine. {LOG_IN}", 401) from None
    return transport.AuthorizedSession(credentials)


def _parse_error(content: bytes) -> tuple[str, str]:
    """The message of an error, and the reason in its details, such as `SERVICE_DISABLED`."""
    import json

    try:
        error = json.loads(content)["error"]
        details = [detail for detail in error.get("details", []) if isinstance(detail, dict)]
        reason = next((str(detail["reason"]) for detail in details if "reason" in detail), "")
        return " ".join(str(error.get("message", "")).split())[:500], reason
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", ""


def _reason(error: BaseException) -> str:
    """The reason of a failed connection, without the request, which the library's own text repeats."""
    name = type(error).__name__
    return {"ReadTimeout": f"no answer within {READ_S:g} s", "ConnectTimeout": "it doesn't answer"}.get(name, name)


def _first_line(error: BaseException) -> str:
    return (str(error.args[0] if error.args else error) or type(error).__name__).splitlines()[0][:300].rstrip(".")
