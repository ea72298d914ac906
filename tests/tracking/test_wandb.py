"""W&B: its own code delivers to a server on loopback that works, dies, hangs or lies, or to files in offline mode."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import footplate as fp
from footplate.core.errors import ConfigError, MissingExtra
from footplate.tracking import WandB
from footplate.tracking.event_queue import Progress, pending
from footplate.tracking.wandb import deliver_pending
from tracking.attempts import expected, killed_attempt, log_steps, wait_until
from tracking.wandb_server import WandbServer

pytestmark = pytest.mark.engine

SECRET = "5ec2e7" * 7


@pytest.fixture
def server(monkeypatch):
    server = WandbServer()
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    # W&B sends rows every 15 seconds. It takes whole seconds.
    monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "1")
    yield server
    server.stop()


def test_parameters_metrics_and_other_values_arrive(run_dir, server):
    server.start()
    logger = WandB(project="flowers", run_name="first", tags=["garden"], notes="a note")
    logger.setup(run_dir, {"model": {"lr": 0.1}, "uri": "s3://me:secret@lake/x"})
    log_steps(logger, range(3))
    logger.log_image("samples", [np.zeros((4, 5)), np.ones((4, 5, 3))], 2, ["dark", "light"])
    logger.log_histogram("weights", np.arange(100.0))
    logger.log_text("answer", "<b>42</b>", 2)
    logger.log_metrics({"val_loss": float("nan")}, 2, 0)
    logger.finalize("success")

    run = server.runs[logger.run_id]
    assert run.curve("loss") == expected(range(3))
    assert [row["_step"] for row in run.rows] == list(range(8))
    assert run.config["model"] == {"value": {"lr": 0.1}}
    assert run.config["uri"] == {"value": "s3://lake/x"}
    assert (run.fields["displayName"], run.fields["project"], run.exit_code) == ("first", "flowers", 0)
    assert run.fields["tags"] == ["garden"]
    rows = {name: row[name] for row in run.rows for name in row}
    assert math.isnan(rows["val_loss"])
    assert (rows["samples"]["_type"], rows["samples"]["caption"]) == ("image-file", "dark")
    assert (rows["samples/1"]["width"], rows["samples/1"]["height"]) == (5, 4)
    assert sum(rows["weights"]["values"]) == 100
    assert b"&lt;b&gt;42&lt;/b&gt;" in run.files[rows["answer"]["path"]]
    assert run.files[rows["samples"]["path"]].startswith(b"\x89PNG")
    assert pending(run_dir, "wandb") == []
    assert sorted(path.name for path in run_dir.iterdir()) == [".wandb.lock", "wandb", "wandb.json"]


def test_the_training_process_never_imports_wandb(run_dir, server):
    server.start()
    script = f"""
        import pathlib, random, sys
        from footplate.tracking import WandB
        random.seed(1)
        before = random.getstate()
        logger = WandB()
        logger.setup(pathlib.Path({str(run_dir)!r}), {{}})
        logger.log_metrics({{"loss": 1.0}}, 0, 0)
        logger.finalize("failed")
        assert "wandb" not in sys.modules
        assert random.getstate() == before
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert server.run.curve("loss") == [(0, 1.0)]
    assert server.run.exit_code == 1


@pytest.mark.slow
def test_a_run_restarted_twice_has_the_curve_of_an_uninterrupted_run(run_dir, server):
    """Each attempt is killed with 5 steps after its checkpoint, which the next attempt repeats."""
    server.start()
    state = None
    for first in (0, 10):
        state = killed_attempt("WandB", run_dir, state, range(first, first + 15), checkpoint_at=first + 9)
    logger = WandB()
    logger.load_state_dict(state)
    logger.setup(run_dir, {})
    log_steps(logger, range(20, 30))
    logger.finalize("success")

    assert list(server.runs) == [logger.run_id]
    assert server.run.curve("loss") == expected(range(30))
    assert [row["_step"] for row in server.run.rows] == list(range(30))
    assert server.run.exit_code == 0


def test_results_are_added_to_the_last_step_of_the_run_of_another_process(run_dir, server):
    server.start()
    trained = WandB()
    trained.setup(run_dir, {"lr": 0.5})
    log_steps(trained, range(6))
    trained.finalize("success")
    logger = WandB()
    logger.append(run_dir, {"lr": 0.1})
    logger.log_metrics({"test_loss": 2.0}, 5, 0)
    logger.finalize("success")
    assert logger.run_id == trained.run_id
    assert server.run.curve("loss") == expected(range(6))
    assert server.run.curve("test_loss") == [(5, 2.0)]
    assert server.run.config["lr"] == {"value": 0.5}


def test_a_server_that_was_never_there_gets_all_later(run_dir, server, caplog):
    logger = WandB()
    logger.setup(run_dir, {"lr": 0.1})
    log_steps(logger, range(20))
    logger.log_image("black", np.zeros((2, 2)), 19)
    logger.finalize("success")
    assert "did not receive all of this run" in caplog.text
    assert "footplate.tracking.wandb.deliver_pending" in caplog.text

    server.start()
    assert deliver_pending(run_dir)
    assert server.run.curve("loss") == expected(range(20))
    assert "black" in server.run.rows[-1]
    assert SECRET not in caplog.text
    # W&B's own files are in `wandb`; the rest is ours.
    assert SECRET not in "".join(path.read_text() for path in run_dir.iterdir() if path.is_file())


def test_a_server_that_hangs_stops_neither_training_nor_its_end(run_dir, server):
    server.start()
    server.behave("hang")
    logger = WandB()
    began = time.monotonic()
    logger.setup(run_dir, {})
    log_steps(logger, range(5000))
    logger.flush()
    assert time.monotonic() - began < 20
    wait_until(lambda: server.requests)
    logger.finalize("interrupted")
    assert time.monotonic() - began < 90
    assert len(pending(run_dir, "wandb")) == 1

    server.behave("work")
    assert deliver_pending(run_dir)
    assert server.run.curve("loss") == expected(range(5000))
    assert server.run.exit_code == 255


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["refuse", "lose", "babble"])
def test_a_server_that_fails_or_lies_in_the_middle_gets_all_once(run_dir, server, mode):
    """A server that loses rows says that it has them. Nonsense ends W&B's own process."""
    server.start()
    logger = WandB()
    logger.setup(run_dir, {})
    log_steps(logger, range(50))
    wait_until(lambda: server.runs and server.run.curve("loss") == expected(range(50)))
    server.behave(mode)
    log_steps(logger, range(50, 100))
    logger.finalize("interrupted")
    assert len(pending(run_dir, "wandb")) == 1

    server.behave("work")
    assert deliver_pending(run_dir), Progress.load(run_dir, "wandb").error
    assert server.run.curve("loss") == expected(range(100))
    assert [row["_step"] for row in server.run.rows] == list(range(100))


@pytest.mark.slow
def test_a_server_stopped_in_the_middle_gets_all_when_it_is_back(run_dir, server):
    server.start()
    logger = WandB()
    logger.setup(run_dir, {})
    log_steps(logger, range(50))
    wait_until(lambda: server.runs and server.run.curve("loss") == expected(range(50)))
    server.stop()
    log_steps(logger, range(50, 100))
    logger.flush()
    server.start()
    log_steps(logger, range(100, 150))
    logger.finalize("success")
    assert server.run.curve("loss") == expected(range(150))
    assert pending(run_dir, "wandb") == []


def test_an_uploader_that_is_killed_is_replaced_at_the_end_at_the_latest(run_dir, server):
    server.start()
    logger = WandB()
    logger.setup(run_dir, {})
    log_steps(logger, range(20))
    wait_until(lambda: server.runs and len(server.run.curve("loss")) == 20)
    uploader = logger._attempt._uploader._process
    os.killpg(uploader.pid, signal.SIGKILL)
    uploader.wait()
    log_steps(logger, range(20, 30))
    logger.finalize("success")
    assert server.run.curve("loss") == expected(range(30))


def test_offline_files_hold_the_run_and_wandb_sync_sends_it(run_dir, server):
    logger = WandB(mode="offline")
    logger.setup(run_dir, {"lr": 0.1})
    log_steps(logger, range(15))
    logger.finalize("success")
    assert server.requests == 0
    assert pending(run_dir, "wandb") == []
    (session,) = (run_dir / "wandb").glob("offline-run-*")

    server.start()
    command = [sys.executable, "-m", "wandb", "sync", str(session)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=run_dir)
    assert done.returncode == 0, done.stderr + done.stdout
    assert server.runs[logger.run_id].curve("loss") == expected(range(15))


def test_an_offline_run_is_continued_and_keeps_its_tables(run_dir, server):
    first = WandB(mode="offline")
    first.setup(run_dir, {})
    log_steps(first, range(15))
    state = {**first.state_dict(), "step": 9}
    first.finalize("interrupted")
    second = WandB(mode="offline")
    second.load_state_dict(state)
    second.setup(run_dir, {})
    log_steps(second, range(10, 20))
    second.log_table("mistakes", ["row", "label"], [[1, "boot"], [2, "shirt"]], 19)
    second.finalize("success")
    assert len(list((run_dir / "wandb").glob(f"offline-run-*-{second.run_id}"))) == 2
    (table,) = (run_dir / "wandb").rglob("mistakes_*.table.json")
    assert json.loads(table.read_text())["data"] == [[1, "boot"], [2, "shirt"]]
    assert Progress.load(run_dir, "wandb").state["rows"] == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"project": " "}, r"project=' ': expected a name"),
        ({"mode": "later"}, r"mode='later': expected \"online\" or \"offline\""),
        ({"tags": "garden"}, r"tags='garden': expected a list"),
    ],
)
def test_arguments_without_meaning_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        WandB(**arguments)


def test_a_missing_api_key_is_an_error_before_training(run_dir, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    with pytest.raises(ConfigError, match=r"W&B at https://wandb.example: there is no API key.*wandb login"):
        WandB().setup(run_dir, {})
    Path(tmp_path / ".netrc").write_text("machine wandb.example login user password abc\n")
    Path(tmp_path / ".netrc").chmod(0o600)
    assert fp.WandB().run_id is None
    from footplate.tracking.wandb import destination

    assert destination("online") == "https://wandb.example"


def test_without_wandb_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r'Logging to W&B needs wandb.*pip install "footplate\[wandb\]"'):
        WandB()


def test_the_folder_that_wandb_leaves_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingExtra, match=r'pip install "footplate\[wandb\]"'):
        WandB()


def test_the_progress_of_a_tracker_is_a_file_of_its_own(run_dir):
    Progress(key="a", state={"rows": 3}).save(run_dir, "wandb")
    Progress(key="b").save(run_dir, "mlflow")
    assert Progress.load(run_dir, "wandb") == Progress(key="a", state={"rows": 3})
    assert "state" not in json.loads((run_dir / "mlflow.json").read_text())
