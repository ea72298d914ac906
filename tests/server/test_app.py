"""The application without a server: requests that end too early."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from footplate.jobs.home import Home
from footplate.server.app import make_app
from footplate.server.dependencies import ServerContext


@pytest.mark.parametrize("path", ["/api/packages", "/api/check"])
def test_who_hangs_up_in_the_middle_of_a_body_is_no_defect(path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    app = make_app(ServerContext(Home(tmp_path)))
    heard = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]
    headers = [(b"host", b"localhost"), (b"x-footplate", b"1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    sent: list[Any] = []

    async def receive() -> Any:
        return heard.pop() if heard else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert 400 <= sent[0]["status"] < 500
    assert not caplog.records
