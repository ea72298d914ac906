import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from urllib.request import urlopen

import psutil
import pytest
from ports import free_port

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "true"


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "runs" / "demo"
    path.mkdir(parents=True)
    return path


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """An uploader has a low priority. On a busy machine, it may take longer than 20 s to connect."""
    monkeypatch.setattr("footplate.tracking.mlflow.RUN_ID_TIMEOUT_S", 120.0)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """An MLflow database with its tables, which take seconds to create."""
    import mlflow

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(empty_database, run_dir, monkeypatch):
    """The project's embedded store, and a client that reads it."""
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_database, run_dir.parent / "mlflow.db")
    return mlflow.MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")


class Server:
    """A real MLflow server on loopback that can be killed, frozen and started again on the same port and store."""

    def __init__(self, directory):
        self.directory = directory
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        if self.process is not None:
            return
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            f"sqlite:///{self.directory}/mlflow.db",
        ]
        command += ["--artifacts-destination", str(self.directory / "artifacts"), "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # it starts twice as fast
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urlopen(f"{self.uri}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError((self.directory / "server.log").read_text())

    @contextlib.contextmanager
    def frozen(self):
        """Stop all threads of the server for as long as the context lasts: it accepts connections and never answers."""
        leader = psutil.Process(self.process.pid)
        processes = [leader, *leader.children(recursive=True)]
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            # On a busy machine, the other threads run on until the thread that got the signal does.
            threads = [psutil.Process(thread.id) for process in processes for thread in process.threads()]
            while any(thread.status() != psutil.STATUS_STOPPED for thread in threads):
                time.sleep(0.01)
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory, empty_database):
    """A server that the tests of a module share. Each test starts or kills it as needed."""
    directory = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, directory / "mlflow.db")
    server = Server(directory)
    yield server
    server.kill()
