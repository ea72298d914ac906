"""The hangs of a job: the files that its launches have written, and the stacks of its processes now.

A launch inside a job writes `hang-1.txt` and so on into the attempt's folder (`launch/hang_files.py`). Other processes, and
jobs that go on, are asked now (`core/stacks/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.core.errors import Unavailable
from footplate.core.stacks.asking import ask
from footplate.core.stacks.report import report_on
from footplate.jobs.backends.local import machine
from footplate.jobs.record import Job
from footplate.jobs.states import State
from footplate.jobs.store.jobs import WrongState
from footplate.jobs.supervision.identity import Identity, boot
from footplate.launch.hang_files import hang_files

if TYPE_CHECKING:
    from footplate.jobs.home import Home
    from footplate.jobs.store.jobs import Store

LIMIT_S = 5.0
MAX_CHARACTERS = 200_000


@dataclass(frozen=True)
class HangRecord:
    """A hang that a launch has explained.

    Attributes:
        attempt: the attempt's number.
        file: the file with all stacks.
        text: the file's content; its first line is the sentence.
    """

    attempt: int
    file: Path
    text: str

    @property
    def sentence(self) -> str:
        """Which rank hung where, and which ranks waited for it."""
        return self.text.partition("\n")[0]


def hangs_of(home: Home, name: str) -> list[HangRecord]:
    """The hangs of a job, attempt by attempt. A job on another machine has none here."""
    numbers = sorted(int(path.name.removeprefix("attempt-")) for path in home.job(name).glob("attempt-*"))
    return [
        HangRecord(number, file, file.read_text(errors="replace")[:MAX_CHARACTERS])
        for number in numbers
        for file in hang_files(home.attempt(name, number))
    ]


def stacks_of(store: Store, job: Job, native: bool = False) -> str:
    """Ask a running job's processes for their stacks. Returns the text; its first line says which process is where.

    Args:
        store: the store of the job.
        job: the job.
        native: read native stacks, too, if py-spy is installed. It pauses the processes for a moment.

    Raises:
        WrongState: the job doesn't run.
        Unavailable: its processes are on another machine.
    """
    if job.state not in (State.RUNNING, State.CANCELLING):
        raise WrongState(f"{job.name} is {job.state}: only a running job has stacks.")
    if job.host != machine.host():
        raise Unavailable(f"{job.name} runs on {job.host}, and so do its processes: ask there.")
    processes = [process for process in store.processes(job.name) if process.attempt == job.attempt]
    ours = [process for process in processes if process.pid and process.ended is None]
    if processes and not ours and job.backend != "local":
        raise Unavailable(
            f"the processes of {job.name} run elsewhere ({job.backend}). Ask there, with the process's id: "
            "footplate stacks PID"
        )
    pids = [process.pid for process in ours if Identity(process.pid, process.mark, boot()).alive()]
    if not pids:
        raise WrongState(f"{job.name} has no process now. See: footplate jobs describe {job.name}")
    return report_on(ask(pids, LIMIT_S, native))
