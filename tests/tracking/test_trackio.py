"""Trackio: its own code stores rows in a directory, or in its server on loopback, which is killed and frozen."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port

import footplate as fp
from footplate.core.errors import ConfigError, MissingExtra
from footplate.tracking import Trackio
from footplate.tracking.batching import batched
from footplate.tracking.event_queue import Progress, pending
from footplate.tracking.trackio import deliver_pending, destination
from tracking.attempts import expected, killed_attempt, log_steps, wait_until

TOKEN = "t0ken/5ec&et"
engine = pytest.mark.engine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trackio's directory."""
    for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "TRACKIO_WRITE_TOKEN", "TRACKIO_STORAGE_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path / "trackio"


class TrackioServer:
    """Trackio's own server, on a port that it keeps when it is started again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = (
            "import trackio; trackio.show(open_browser=False, block_thread=True, host='127.0.0.1', "
            f"server_port={self.port}, share=False)"
        )
        environment = {**os.environ, "TRACKIO_DIR": str(self.home), "TRACKIO_WRITE_TOKEN": TOKEN}
        with self.home.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen([sys.executable, "-c", program], stdout=log, stderr=log, env=environment)
        wait_until(self._answers)

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        """Stop the server for a while: it accepts connections and answers none."""
        assert self._process is not None
        return _stopped(self._process)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, name: str, **arguments: Any) -> Any:
        """Call a function of its HTTP interface."""
        body = json.dumps({"args": [], "kwargs": arguments}).encode()
        request = Request(f"{self.url}/api/{name}", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())["data"]

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/version", timeout=1) as answer:
                return answer.status == 200
        except (URLError, TimeoutError, ConnectionError):
            return False


@contextlib.contextmanager
def _stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.fixture
def server(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackioServer]:
    """A server with a directory of its own."""
    (tmp_path / "served").mkdir()
    server = TrackioServer(tmp_path / "served")
    monkeypatch.setenv("TRACKIO_SERVER_URL", server.url)
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", TOKEN)
    yield server
    server.kill()


def rows(home: Path, project: str = "default") -> list[dict[str, Any]]:
    """The rows of a project in Trackio's database, in the order in which they came."""
    if not (home / f"{project}.db").exists():
        return []
    with contextlib.closing(sqlite3.connect(home / f"{project}.db")) as database:
        # The database exists before its tables do.
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'metrics'").fetchone():
            return []
        records = database.execute(
            "SELECT run_id, run_name, step, timestamp, metrics FROM metrics ORDER BY id"
        ).fetchall()
    return [
        {"run_id": run_id, "run": run, "step": step, "time": time, **json.loads(metrics)}
        for run_id, run, step, time, metrics in records
    ]


def curve(home: Path, name: str = "loss", project: str = "default") -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows(home, project) if name in row]


@engine
def test_trackio_reads_parameters_metrics_and_other_values(run_dir: Path, home: Path):
    logger = Trackio(project="flowers", run_name="first", group="garden")
    logger.setup(run_dir, {"model": {"lr": 0.1}, "uri": "s3://me:secret@lake/x"})
    log_steps(logger, range(3))
    logger.log_metrics({"val_loss": float("nan"), "step": 1.0}, 2)
    logger.log_image("samples", [np.zeros((4, 5)), np.ones((4, 5, 3))], 2, ["dark", "light"])
    logger.log_histogram("weights", np.arange(100.0), 2)
    logger.log_text("answer", "<b>```42</b>", 2)
    logger.log_table("mistakes", ["row", "label"], [[1, "boot"], [2, "shirt"]], 2)
    logger.finalize("success")
    assert pending(run_dir, "trackio") == []
    assert sorted(path.name for path in run_dir.iterdir()) == [".trackio.lock", "trackio.json"]

    records = rows(home, "flowers")
    assert [row["step"] for row in records] == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert {(row["run_id"], row["run"]) for row in records} == {(logger.run_id, "first")}
    assert records[0]["time"] <= records[-1]["time"]
    values = {name: value for row in records for name, value in row.items()}
    assert (values["val_loss"], values["__step"]) == ("NaN", 1.0)
    assert values["samples"] == {
        "_type": "trackio.image",
        "file_path": values["samples"]["file_path"],
        "caption": "dark",
    }
    assert (home / "media" / values["samples/1"]["file_path"]).read_bytes().startswith(b"\x89PNG")
    assert sum(values["weights"]["values"]) == 100
    assert values["answer"] == {"_type": "trackio.markdown", "_value": "````\n<b>```42</b>\n````"}
    assert values["mistakes"]["_value"] == [{"row": 1, "label": "boot"}, {"row": 2, "label": "shirt"}]

    # Trackio's own interface.
    program = """
        import json, trackio
        (run,) = trackio.Api().runs("flowers")
        print(json.dumps({"name": run.name, "config": run.config}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    read = json.loads(done.stdout.splitlines()[-1])
    assert read["name"] == "first"
    assert (read["config"]["model/lr"], read["config"]["uri"]) == (0.1, "s3://lake/x")
    assert read["config"]["_Group"] == "garden"


@engine
def test_the_training_process_never_imports_trackio(run_dir: Path, home: Path):
    script = f"""
        import pathlib, random, sys
        from footplate.tracking import Trackio
        random.seed(1)
        before = random.getstate()
        logger = Trackio()
        logger.setup(pathlib.Path({str(run_dir)!r}), {{}})
        logger.log_metrics({{"loss": 1.0}}, 0, 0)
        logger.finalize("failed")
        assert "trackio" not in sys.modules
        assert random.getstate() == before
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert curve(home) == [(0, 1.0)]


@engine
def test_a_run_restarted_twice_has_the_curve_of_an_uninterrupted_run(run_dir: Path, home: Path):
    """Each attempt is killed with 5 steps after its checkpoint, which the next attempt repeats."""
    state = None
    for first in (0, 10):
        state = killed_attempt("Trackio", run_dir, state, range(first, first + 15), checkpoint_at=first + 9)
    logger = Trackio()
    logger.load_state_dict(state)
    logger.setup(run_dir, {})
    log_steps(logger, range(20, 30))
    logger.finalize("success")
    assert curve(home) == expected(range(30))
    assert {row["run_id"] for row in rows(home)} == {logger.run_id}
    assert len({row["run"] for row in rows(home)}) == 1


def resumed_logger(run_dir: Path) -> Trackio:
    """A logger that goes on after step 4 of a run whose first attempt has reached step 9."""
    first = Trackio()
    first.setup(run_dir, {})
    log_steps(first, range(10))
    state = {**first.state_dict(), "step": 4}
    first.finalize("interrupted")
    second = Trackio()
    second.load_state_dict(state)
    second.setup(run_dir, {})
    return second


@engine
def test_a_metric_that_a_killed_attempt_did_not_reach_at_a_step_is_logged_by_the_next(run_dir: Path, home: Path):
    second = resumed_logger(run_dir)
    for step in range(5, 12):
        second.log_metrics({"loss": step / 10, "val_loss": 1.0}, step)
    second.finalize("success")
    assert curve(home) == expected(range(12))
    assert [step for step, _ in curve(home, "val_loss")] == list(range(5, 12))


@engine
def test_rows_that_were_stored_before_their_uploader_died_are_stored_once(run_dir: Path, home: Path):
    """The uploader of a resumed attempt is killed before it notes its progress."""
    second = resumed_logger(run_dir)
    log_steps(second, range(5, 20))
    second.log_image("black", np.zeros((2, 2)), 19)
    wait_until(lambda: len(rows(home)) == 21)
    (queue,) = pending(run_dir, "trackio")
    attempt = second._attempt
    assert attempt is not None
    uploader = attempt._uploader._process
    assert uploader is not None
    uploader.kill()
    uploader.wait()
    noted = Progress.load(run_dir, "trackio")
    Progress(noted.key, noted.run_id, {queue.name: 0}, None, (), noted.state).save(run_dir, "trackio")
    log_steps(second, range(20, 30))
    second.finalize("success")
    assert curve(home) == expected(range(30))
    assert len(rows(home)) == 31
    assert len(list((home / "media").rglob("*.png"))) == 1


@engine
def test_results_are_added_to_the_run_of_another_process(run_dir: Path, home: Path):
    trained = Trackio(run_name="mine")
    trained.setup(run_dir, {"lr": 0.5})
    log_steps(trained, range(6))
    trained.finalize("success")
    logger = Trackio()
    logger.append(run_dir, {"lr": 0.1})
    logger.log_metrics({"test_loss": 2.0}, 5, 0)
    logger.finalize("success")
    assert logger.run_id == trained.run_id
    assert curve(home, "test_loss") == [(5, 2.0)]
    assert {row["run"] for row in rows(home)} == {"mine"}


@engine
def test_a_locked_database_costs_nothing_and_gets_all_later(run_dir: Path, home: Path, caplog):
    logger = Trackio()
    logger.setup(run_dir, {})
    log_steps(logger, range(5))
    wait_until(lambda: len(rows(home)) == 5)
    with contextlib.closing(sqlite3.connect(home / "default.db")) as database:
        database.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        log_steps(logger, range(5, 10))
        logger.finalize("interrupted")
        assert time.monotonic() - began < 60
    assert "Trackio at" in caplog.text
    assert "did not receive all of this run" in caplog.text
    assert deliver_pending(run_dir)
    assert curve(home) == expected(range(10))


@engine
def test_on_a_network_file_system_trackio_adds_the_rows_when_it_is_opened(run_dir: Path, home: Path, monkeypatch):
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    logger = Trackio()
    logger.setup(run_dir, {"lr": 0.5})
    log_steps(logger, range(5))
    logger.finalize("success")
    assert rows(home) == []

    program = "from trackio.fragments import import_inbox_dir as read; print(read())"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], check=True)
    assert curve(home) == expected(range(5))


@engine
def test_a_server_gets_the_run_with_its_pictures(run_dir: Path, home: Path, server: TrackioServer):
    server.start()
    logger = Trackio(project="flowers", server_url=f"{server.url}/?write_token={TOKEN.replace('&', '%26')}")
    logger.setup(run_dir, {"lr": 0.5})
    log_steps(logger, range(3))
    logger.log_metrics({"val_loss": math.inf}, 2)
    logger.log_image("black", np.zeros((2, 3)), 2)
    logger.finalize("success")
    assert not home.exists()
    assert curve(server.home, project="flowers") == expected(range(3))
    values = {name: value for row in rows(server.home, "flowers") for name, value in row.items()}
    assert values["val_loss"] == "Infinity"
    assert (server.home / "media" / values["black"]["file_path"]).read_bytes().startswith(b"\x89PNG")
    assert server.ask("get_run_summary", project="flowers", run_id=logger.run_id)["config"]["lr"] == 0.5
    # The token is in no file.
    assert all(TOKEN not in path.read_text() for path in run_dir.iterdir())


@engine
def test_a_server_that_was_never_there_gets_all_later(run_dir: Path, server: TrackioServer, caplog):
    logger = Trackio()
    logger.setup(run_dir, {"lr": 0.1})
    log_steps(logger, range(20))
    logger.log_image("black", np.zeros((2, 2)), 19)
    logger.finalize("success")
    assert "did not receive all of this run" in caplog.text
    assert "footplate.tracking.trackio.deliver_pending" in caplog.text
    assert TOKEN not in caplog.text

    server.start()
    assert deliver_pending(run_dir)
    assert curve(server.home) == expected(range(20))
    assert "black" in rows(server.home)[-1]


@engine
@pytest.mark.slow
def test_a_server_that_freezes_or_dies_in_the_middle_gets_all_once(run_dir: Path, server: TrackioServer):
    server.start()
    logger = Trackio()
    logger.setup(run_dir, {})
    log_steps(logger, range(50))
    wait_until(lambda: len(rows(server.home)) == 50)
    with server.frozen():
        log_steps(logger, range(50, 100))
        logger.flush()
        # The request reaches the server, which answers when nobody waits any more.
        wait_until(lambda: Progress.load(run_dir, "trackio").error is not None)
    wait_until(lambda: len(rows(server.home)) >= 100)
    server.kill()
    log_steps(logger, range(100, 150))
    logger.flush()
    server.start()
    logger.finalize("success")
    assert curve(server.home) == expected(range(150))


@engine
def test_a_wrong_token_is_reported_and_the_records_are_kept(run_dir: Path, server: TrackioServer, caplog, monkeypatch):
    server.start()
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "wrong")
    logger = Trackio()
    logger.setup(run_dir, {})
    log_steps(logger, range(3))
    logger.finalize("interrupted")
    assert "refused the request with status 400" in caplog.text
    assert "write_token is required" in caplog.text
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", TOKEN)
    assert deliver_pending(run_dir)
    assert curve(server.home) == expected(range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"project": "my flowers"}, r"project='my flowers': expected a name of letters, digits, `_` and `-`"),
        ({"project": ""}, r"project='': expected a name"),
        ({"run_name": "../first"}, r"run_name='\.\./first': expected a name without `/`"),
        ({"run_name": ".."}, r"run_name='\.\.': expected a name"),
    ],
)
def test_arguments_without_meaning_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Trackio(**arguments)


@pytest.mark.parametrize("url", ["flowers.example", "ftp://flowers.example", "http://"])
def test_an_address_of_another_kind_is_refused(home: Path, url: str):
    with pytest.raises(ConfigError, match=r"server_url=.*: expected http://… or https://…"):
        destination(url)


def test_a_missing_token_and_a_space_are_errors_before_training(run_dir: Path, home: Path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"Trackio at https://t\.example:1: there is no write token .*TRACKIO_WRITE_TOKEN"
    ):
        Trackio(server_url="https://t.example:1/?write_token=").setup(run_dir, {})
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/flowers")
    with pytest.raises(ConfigError, match=r"TRACKIO_SPACE_ID='me/flowers': .*Unset it.*trackio sync"):
        Trackio().setup(run_dir, {})


def test_the_directory_is_that_of_trackio(monkeypatch, tmp_path: Path):
    for name in ("TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    program = """
        import importlib, json, os, sys
        import huggingface_hub.constants, trackio.utils
        for variables in json.loads(sys.argv[1]):
            os.environ.update(variables)
            importlib.reload(huggingface_hub.constants)
            print(importlib.reload(trackio.utils).TRACKIO_DIR.absolute())
    """
    # Each has those before it, too.
    settings = ({}, {"XDG_CACHE_HOME": f"{tmp_path}/cache"}, {"HF_HOME": "~/hf"}, {"TRACKIO_DIR": "runs/trackio"})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), json.dumps(settings)],
        capture_output=True,
        text=True,
        check=True,
    )
    directories = done.stdout.splitlines()
    for variables, directory in zip(settings, directories, strict=True):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert destination(None) == directory
    assert len({*directories}) == 4


def test_without_trackio_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtra, match=r'Logging to Trackio needs trackio.*pip install "footplate\[trackio\]"'):
        fp.Trackio()


@given(st.lists(st.one_of(st.none(), st.integers(1, 5)), max_size=20), st.integers(1, 8))
def test_batches_keep_all_records_in_order_with_the_position_after_each(sizes: list[int | None], most: int):
    """None is a record that isn't a metric; a number is the values of a record of metrics."""
    records = [
        (
            {"kind": "media"} if size is None else {"kind": "metrics", "values": dict.fromkeys(range(size))},
            10 * (place + 1),
        )
        for place, size in enumerate(sizes)
    ]
    batches = list(batched(records, most))
    assert [record for batch, _ in batches for record in batch] == [record for record, _ in records]
    ends = [records[sum(len(batch) for batch, _ in batches[: place + 1]) - 1][1] for place in range(len(batches))]
    assert [position for _, position in batches] == ends
    for batch, _ in batches:
        values = [len(record["values"]) for record in batch if record["kind"] == "metrics"]
        assert len(batch) == 1 or (len(values) == len(batch) and sum(values[:-1]) < most)
