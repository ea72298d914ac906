"""A metadata server on loopback, for the notices of clouds."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from footplate import checkpoint
from footplate.training import preemption

PATIENCE_S = 60.0


class MetadataServer(http.server.ThreadingHTTPServer):
    """Serves answers.

    Attributes:
        asked: the method and the path of each request.
    """

    daemon_threads = False  # `server_close` joins them

    def __init__(self, answer: type[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), answer)
        self.asked: list[tuple[str, str]] = []
        self.values: dict[str, Any] = {}
        # `shutdown` waits for the end of an interval.
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    """Answers one request, as a cloud's documentation says; a subclass for each cloud."""

    server: MetadataServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path))
        self.headers_out: dict[str, str] = {}
        try:
            status, text = self.answer()
        except ConnectionError:
            self.connection.close()
            return
        self.send_response(status)
        for name, value in self.headers_out.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        # The client may have closed the connection.
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode())

    do_PUT = do_GET

    def answer(self) -> tuple[int, str]:
        """Return status and text; more headers go into `headers_out`. ConnectionError: hang up without an answer."""
        raise NotImplementedError

    def log_message(self, format: str, *args: object) -> None: ...


def heard(
    server: MetadataServer, change: Callable[[], None], requests: int = 3, wait_s: float = PATIENCE_S
) -> list[str]:
    """Watch the clouds, change something after some requests, and return the reasons to end that were heard."""
    said: list[str] = []
    came = threading.Event()

    def end(reason: str) -> None:
        said.append(reason)
        came.set()

    with preemption.watching(end):
        until = time.monotonic() + PATIENCE_S
        while len(server.asked) < requests and time.monotonic() < until:
            time.sleep(0.005)
        change()
        came.wait(wait_s)
    return said


def threads() -> list[threading.Thread]:
    """The threads that watch for notices now."""
    return [thread for thread in threading.enumerate() if thread.name == "footplate-notices"]


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


def saves_and_ends_with_143(directory: Path, announce: Callable[[], None]) -> None:
    """Train in another process, announce the end of the machine, and check that the run is saved."""
    script = directory / "trains.py"
    script.write_text(textwrap.dedent(TRAINS))
    process = subprocess.Popen(
        [sys.executable, script, directory / "run"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "trains\n"
    announce()
    assert process.wait(60) == 143
    process.stdout.close()
    newest = checkpoint.newest([directory / "run"])
    assert newest is not None
    assert checkpoint.read_meta(newest)["global_step"] >= 5
