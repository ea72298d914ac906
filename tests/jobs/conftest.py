"""A home for each test, in which real jobs run: real supervisors and real processes, all gone after the test."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from footplate.jobs.backends import get_backend
from footplate.jobs.operations import Jobs
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.supervision.identity import Identity
from footplate.jobs.supervision.locks import Held, held

PATIENCE_S = 300.0  # for work that takes a second on an idle machine, and for a job on Ray 15 s

CLUSTER = """
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-4
  workerCount: 1
  workerType: n1-standard-4
  parameterServerCount: 1
  parameterServerType: n1-standard-4
  evaluatorCount: 1
  evaluatorType: n1-standard-4
"""

TWO = """
trainingInput:
  scaleTier: CUSTOM
  masterType: n1-standard-8
  workerCount: 1
  workerType: n1-standard-8
"""
NET = """\
import torch
import footplate as fp

class Net(fp.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def until(condition: Callable[[], Any]) -> Any:
    """Wait until a function returns a true value, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return result


def is_held(lock: Path) -> bool:
    """Return True if a process holds a lock now."""
    try:
        with held(lock):
            return False
    except Held:
        return True


class Bench:
    """Jobs, and the actions of tests on them."""

    def __init__(self, jobs: Jobs, directory: Path) -> None:
        self.jobs = jobs
        self.directory = directory
        self.backend = "local"
        self.options: Mapping[str, str] = {}  # the options of the command that choose the backend
        self.job_dir = str(directory / "out")

    def program(self, source: str) -> None:
        """Write `trainer.task`. It can use `place`, the directory of the test, and `until_there(name)`."""
        package = self.directory / "trainer"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        head = f"""
            import json, os, signal, sys, time
            from pathlib import Path
            place = Path({str(self.directory)!r})
            attempt, role = int(os.environ["FOOTPLATE_JOB_ATTEMPT"]), json.loads(os.environ["TF_CONFIG"])["task"]["type"]
            def until_there(name):
                while not (place / name).exists():
                    time.sleep(0.01)
            """
        (package / "task.py").write_text(textwrap.dedent(head) + textwrap.dedent(source))

    def submit(self, name: str = "my_job", args: tuple[str, ...] = (), text: str = "", **flags: str) -> tuple[str, ...]:
        """Submit the program. `flags` have underscores for dashes."""
        from footplate.jobs.spec.draft import draft
        from footplate.jobs.spec.resolving import resolve
        from footplate.jobs.spec.yamlfile import parse

        given = {"module-name": "trainer.task", "region": "us-central1", "job-dir": self.job_dir}
        given |= {key.replace("_", "-"): value for key, value in flags.items()}
        job = resolve(draft(parse(text), given, args, name))
        place = get_backend(self.backend).destination(self.options)
        return self.jobs.submit(job, self.directory / "trainer", self.backend, place)

    def there(self, name: str) -> Path:
        """Wait for a file in the test's directory. A failure shows each job's states and output."""
        path = self.directory / name
        try:
            until(path.exists)
        except AssertionError:
            raise AssertionError(f"{path} never came.\n{self._told()}") from None
        return path

    def is_in(self, state: State, name: str = "my_job") -> None:
        """Wait until a job is in a state."""
        until(lambda: self.jobs.store.state(name) == state)

    def supervisor(self, name: str = "my_job") -> int:
        """The process id of a job's supervisor."""
        return until(lambda: (self.jobs.store.find(name).owner or {}).get("pid"))

    def states(self, name: str = "my_job") -> list[str]:
        """All states of a job so far."""
        return [str(transition.target) for transition in self.jobs.store.transitions(name)]

    def output(self, name: str = "my_job", attempt: int = 1, who: str = "master-0") -> str:
        """The output of a process."""
        return (self.jobs.home.attempt(name, attempt) / f"{who}.log").read_text()

    def _told(self) -> str:
        """The states of all jobs, and the ends of the files that their attempts and supervisors wrote."""
        lines = [f"{job.name}: {', '.join(self.states(job.name))}" for job in self.jobs.store.list()]
        for path in sorted(self.jobs.home.root.rglob("*.log")):
            lines += [f"--- {path}", *path.read_text(errors="replace").splitlines()[-20:]]
        return "\n".join(lines)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with a_bench(tmp_path, monkeypatch) as made:
        yield made


@contextmanager
def a_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench in a directory, as a context."""
    monkeypatch.setenv("FOOTPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOOTPLATE_STORE", raising=False)
    monkeypatch.setenv("FOOTPLATE_CPUS", "64")
    directory = tmp_path / "work"
    directory.mkdir()
    monkeypatch.chdir(directory)
    made = Bench(Jobs.from_env(), directory)
    yield made
    for job in made.jobs.store.of_host(os.uname().nodename, SUPERVISED):
        owner = Identity.from_dict(job.owner)
        if owner is not None and owner.alive():
            with suppress(ProcessLookupError):
                os.kill(owner.pid, signal.SIGKILL)
        for process in made.jobs.store.processes(job.name):
            until(lambda process=process: (known := Identity.of(process.pid)) is None or known.began != process.mark)
    made.jobs.store.close()
