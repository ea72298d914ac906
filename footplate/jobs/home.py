"""The folder in which this machine keeps its jobs. Only its user can read it.

~/.footplate/               FOOTPLATE_HOME names another
  jobs.db                   the store, unless FOOTPLATE_STORE names a server
  sweep.lock                held during a reconcile pass
  jobs.lock                 held while a job is entered or deleted, and during a cleanup
  packages/, unpacked/, environments/   the programs of jobs, by digest
  trash/                    files that are being deleted
  guests/KEY/               on a cluster's node: the directory of an attempt that was submitted elsewhere
  jobs/NAME/                one job
    NAME-NUMBER             empty; the name is the job's id, which no other job of this name has
    package                 the digest of its program
    supervisor.lock         held by its supervisor
    supervisor.log          the supervisor's messages
    environment.json        the variables of its processes
    given.json              the variables of --env
    attempt-1/master-0.log  the output of a process; when the file is full, master-0.log.1 follows
    attempt-1/master-0.log.cut  the number of bytes that were deleted, if the output was longer than FOOTPLATE_LOG_MB
    attempt-1/hang-1.txt    the stacks of all ranks of a launch that hung; the first line says which rank was where
    attempt-1/usage.csv     how much of the machine its processes used
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs.supervision.locks import Held, held

PACKAGE = "package"
# A package of hundreds of megabytes is put into a snapshot under the lock.
LOCK_S = 600.0
# Names are letters, digits and underscores, so an id can't lead out of the home.
_ID = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,127})-\d{1,20}")


@dataclass(frozen=True)
class Home:
    """The folder, and the address of the store if that is elsewhere.

    Attributes:
        root: an absolute path.
        store: the URL of a PostgreSQL server; None for the file in the folder.
    """

    root: Path
    store: str | None = None

    @classmethod
    def from_env(cls) -> Home:
        """The home that `FOOTPLATE_HOME` and `FOOTPLATE_STORE` name. Its folder is created.

        Raises:
            ConfigError: the folder can't be created.
        """
        home = cls.existing_or_not()
        root = home.root
        try:
            root.mkdir(parents=True, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{root}, the folder for jobs, can't be created: {error.strerror}. Set FOOTPLATE_HOME to another folder."
            ) from None
        return home

    @classmethod
    def existing_or_not(cls) -> Home:
        """The home that `FOOTPLATE_HOME` and `FOOTPLATE_STORE` name, for a reader. Its folder isn't created.

        Raises:
            ConfigError: `FOOTPLATE_HOME` is no path.
        """
        folder = os.environ.get("FOOTPLATE_HOME") or "~/.footplate"
        try:
            root = Path(folder).expanduser().absolute()
        except RuntimeError:
            raise ConfigError(
                f"FOOTPLATE_HOME={folder}: this machine has no such user. Give a folder's path."
            ) from None
        return cls(root, os.environ.get("FOOTPLATE_STORE") or None)

    def name_of(self, job_id: str) -> str | None:
        """The name of the job with an id; None if this home doesn't have the job.

        Args:
            job_id: the id, as a file has it. So it may be any text.
        """
        match = _ID.fullmatch(job_id)
        # A later job of the same name has another id.
        return match[1] if match is not None and (self.job(match[1]) / job_id).exists() else None

    def variables(self) -> dict[str, str]:
        """The environment variables that lead another process to the same home."""
        return {"FOOTPLATE_HOME": str(self.root), **({"FOOTPLATE_STORE": self.store} if self.store else {})}

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock under which jobs are entered, deleted and cleaned up.

        Raises:
            Unavailable: another process has held the lock for too long; there is no space, or no permission.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held(self.root / "jobs.lock", LOCK_S))
            except Held:
                raise Unavailable(
                    f"another process has held {self.root / 'jobs.lock'} for {LOCK_S:g} s: see what it does, and try "
                    "again."
                ) from None
            try:
                yield
            except OSError as error:
                raise Unavailable(f"{error}. Free space, or repair permissions, and try again.") from None

    def job(self, name: str) -> Path:
        """The folder of a job. Names are checked when a job is submitted, so the path can't leave the home."""
        return self.root / "jobs" / name

    def attempt(self, name: str, attempt: int) -> Path:
        """The folder with the output of an attempt."""
        return self.job(name) / f"attempt-{attempt}"

    def node_directory(self, key: str) -> Path:
        """The working directory of an attempt on a node that lacks the directory of the submission."""
        return self.root / "guests" / key
