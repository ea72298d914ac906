"""A real server on loopback, in a process of its own, over the jobs of the test's home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browsing import browser as browser
from jobs.conftest import Bench, a_bench, until

JSON = {"Content-Type": "application/json", "X-Footplate": "1"}
# A program that trains until it may end. Its argument is the job's name.
TRAINS = """
import torch
import footplate as fp

class Net(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        (place / ("trains-" + sys.argv[1])).touch()
        time.sleep(0.05)
        return self.net(batch).mean()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (place / ("go-" + sys.argv[1])).exists():
            self.trainer.should_stop = True
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

fp.Trainer(
    accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    default_root_dir=place / ("run-" + sys.argv[1]), max_epochs=-1,
).fit(Net(), torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4))
"""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]

    @property
    def message(self) -> str:
        return self.json["error"]["message"]


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]
    headers: dict[str, str] = field(default_factory=dict)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request. A body that is not bytes is sent as JSON. `headers` have underscores for dashes."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**JSON, **self.headers, **{key.replace("_", "-"): value for key, value in headers.items()}}
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.request(method, path, data, {key: value for key, value in sent.items() if value})
            response = connection.getresponse()
            return Answer(
                response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
            )
        finally:
            connection.close()

    def is_in(self, state: str, name: str) -> dict[str, Any]:
        """Wait until a job is in a state, and return the job."""

        def look() -> Any:
            job = self("GET", f"/api/jobs/{name}").json
            return job if job.get("state") == state else None

        return until(look)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One home for the tests of a module, because a server takes a second to start. The jobs have names of their own."""
    with pytest.MonkeyPatch.context() as patch, a_bench(tmp_path_factory.mktemp("server"), patch) as made:
        yield made


@pytest.fixture(scope="module")
def serve(bench: Bench) -> Iterator[Callable[..., Server]]:
    """A function that starts a server with arguments and variables. The servers stop after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **variables: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, "-m", "footplate", "server", "--port", "0", *arguments], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **variables}, cwd=bench.directory,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "http://" in said, said
        return Server(said.split()[-1].rstrip("/"), process)

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    return serve()


def packed(directory: Path, name: str = "trainer") -> bytes:
    """A package as `tar czf - NAME` sends it."""
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.add(directory / name, name)
    return out.getvalue()


def config(bench: Bench, **more: Any) -> dict[str, Any]:
    """The spec of the bench's program."""
    spec = {"pythonModule": "trainer.task", "region": "us-central1", "jobDir": str(bench.directory / "out"), **more}
    return {"trainingInput": spec}
