"""A Ray cluster's Jobs API over HTTP, with its errors sorted into temporary and permanent ones.

`Away` is temporary: nobody answers, or the server has an error. `Refused` is permanent. Everything else is an answer. The
module uses Ray's own client, except for the list of nodes, and connects again after each error.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from footplate.core.optional import require
from footplate.jobs.backends.ray.resources import Nodes

TIMEOUT_S = 10.0
_NEEDS_TOKEN = (
    ". The cluster asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless ~/.ray/auth_token has it"
)
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class Away(Exception):
    """The cluster doesn't answer now. Retry later."""


class Refused(Exception):
    """The cluster refuses the request. A retry won't help."""


@dataclass(frozen=True)
class Info:
    """A Ray Job.

    Attributes:
        status: PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED.
        message: Ray's message.
        code: the exit code of its entry point; None if it has none.
        error: Ray's kind of failure; empty for none.
        working_dir: the URI of the files that the cluster keeps for it.
    """

    status: str
    message: str
    code: int | None = None
    error: str = ""
    working_dir: str = ""

    @property
    def ended(self) -> bool:
        """True if the job has ended."""
        return self.status in ENDED


class Client:
    """The Jobs API at an address such as `http://10.0.0.1:8265`. Every call may raise `Away`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._kept: Any = None

    def info(self, key: str) -> Info | None:
        """The state of a job; None if Ray doesn't know this key."""
        try:
            details = self._call("get_job_info", key)
        except Refused as error:
            if "status code 404" in str(error):
                return None
            raise Away(str(error)) from None
        return Info(
            str(details.status.value),
            details.message or "",
            details.driver_exit_code,
            details.error_type or "",
            (details.runtime_env or {}).get("working_dir", ""),
        )

    def submit(self, arguments: Mapping[str, Any]) -> None:
        """Submit a job. An existing job of this key stays as it is.

        Raises:
            Refused: Ray doesn't accept the job.
        """
        try:
            self._call("submit_job", **arguments)
        except Refused as error:
            if "already exists" not in str(error):
                raise

    def stop(self, key: str) -> None:
        """Let Ray send SIGTERM to a job's entry point. A job that has ended stays as it is."""
        try:
            self._call("stop_job", key)
        except Refused as error:
            raise Away(str(error)) from None

    def delete(self, key: str) -> None:
        """Let Ray forget a job that has ended."""
        with contextlib.suppress(Refused):
            self._call("delete_job", key)

    async def output(self, key: str) -> AsyncIterator[str]:
        """Yield the output of a job's entry point, from its beginning until the job ends, in pieces."""
        client = self._client()
        try:
            async for piece in client.tail_job_logs(key):
                yield piece
        except (OSError, RuntimeError, *_network_errors()) as error:
            raise Away(_line(error)) from None

    def whole_output(self, key: str) -> str:
        """The output of a job's entry point so far."""
        try:
            return self._call("get_job_logs", key)
        except Refused as error:
            raise Away(str(error)) from None

    def nodes(self) -> Nodes:
        """The resources of the cluster's nodes, by their ids."""
        try:
            request = urllib.request.Request(f"{self.address}/api/v0/nodes?limit=10000&detail=1", headers=_token())
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                nodes = json.load(answer)["data"]["result"]["result"]
        except urllib.error.HTTPError as error:
            hint = _NEEDS_TOKEN if error.code in (401, 403) else ""
            raise Away(f"{_line(error)}{hint}") from None
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise Away(_line(error)) from None
        return {node["node_id"]: node["resources_total"] or {} for node in nodes if node["state"] == "ALIVE"}

    def _client(self) -> Any:
        if self._kept is None:
            submission = require("ray.job_submission", "ray", "jobs on a Ray cluster")
            try:
                self._kept = submission.JobSubmissionClient(self.address)
            except (OSError, RuntimeError, *_network_errors()) as error:
                raise Away(_line(error)) from None
        return self._kept

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        client = self._client()
        try:
            return getattr(client, name)(*args, **kwargs)
        except RuntimeError as error:
            self._kept = None
            text = _line(error)
            raise (Away if "status code 5" in text and "already exists" not in text else Refused)(text) from None
        except (OSError, *_network_errors()) as error:
            self._kept = None
            raise Away(_line(error)) from None


def _token() -> dict[str, str]:
    """The header with the cluster's token, if RAY_AUTH_MODE says that it asks for one. Ray's own client sends it, too.

    Raises:
        RuntimeError: the token can't be read.
    """
    try:
        from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
    except ImportError:
        return {}
    return get_auth_headers_if_auth_enabled({})


def _network_errors() -> tuple[type[Exception], ...]:
    import aiohttp
    import requests

    return (aiohttp.ClientError, requests.RequestException)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[-500:] or type(error).__name__
