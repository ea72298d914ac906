"""Where this machine keeps its jobs: one folder, which is the user's alone.

~/.footplate/               FOOTPLATE_HOME names another
  jobs.db                   the store, unless FOOTPLATE_STORE names a server
  sweep.lock                held by whoever looks whose turn it is
  jobs.lock                 held by whoever puts a job in, takes one out, or cleans up
  packages/, unpacked/, environments/   what jobs run, by digest
  trash/                    what is being deleted
  guests/KEY/               on a node of a cluster, where an attempt runs that was submitted elsewhere
  jobs/NAME/                of one job
    NAME-NUMBER             empty: its id, by which it is told from another of its name
    package                 the digest of its program
    supervisor.lock         held by its supervisor
    supervisor.log          what that has to say
    environment.json        the variables that its processes get
    given.json              the variables that --env gave
    attempt-1/master-0.log  what a process wrote; a second file, master-0.log.1, follows a full one
    attempt-1/master-0.log.cut  how much of it was deleted, if it was longer than FOOTPLATE_LOG_MB
    attempt-1/usage.csv     how busy its processes kept the machine
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from footplate.core.errors import ConfigError, Unavailable
from footplate.jobs.supervision.locks import Held, held

PACKAGE = "package"
PATIENCE_S = 600.0  # a package of hundreds of megabytes is taken under the lock


@dataclass(frozen=True)
class Home:
    """The folder, and the store's address if it isn't in it.

    Attributes:
        root: an absolute path.
        store: of a PostgreSQL server; None for the file in the folder.
    """

    root: Path
    store: str | None = None

    @classmethod
    def here(cls) -> Home:
        """As `FOOTPLATE_HOME` and `FOOTPLATE_STORE` say; makes the folder.

        Raises:
            ConfigError: it can't be made.
        """
        given = os.environ.get("FOOTPLATE_HOME") or "~/.footplate"
        try:
            root = Path(given).expanduser().absolute()
        except RuntimeError:
            raise ConfigError(f"FOOTPLATE_HOME={given}: there is no such user here. Give a folder's path.") from None
        try:
            root.mkdir(parents=True, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{root}, where jobs are kept, can't be made: {error.strerror}. Set FOOTPLATE_HOME to another folder."
            ) from None
        return cls(root, os.environ.get("FOOTPLATE_STORE") or None)

    def variables(self) -> dict[str, str]:
        """The environment variables by which another process finds the same home."""
        return {"FOOTPLATE_HOME": str(self.root), **({"FOOTPLATE_STORE": self.store} if self.store else {})}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one who puts a job in, takes one out, or cleans up.

        Raises:
            Unavailable: somebody else has been at it for too long; there is no space, or no right, to do it.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held(self.root / "jobs.lock", PATIENCE_S))
            except Held:
                raise Unavailable(
                    f"another process has held {self.root / 'jobs.lock'} for {PATIENCE_S:g} s: see what it does, and try "
                    "again."
                ) from None
            try:
                yield
            except OSError as error:
                raise Unavailable(f"{error}. Free space, or mend permissions, and try again.") from None

    def job(self, name: str) -> Path:
        """A job's folder. Names are checked when a job is submitted, and can't leave it."""
        return self.root / "jobs" / name

    def attempt(self, name: str, attempt: int) -> Path:
        """Where the output of an attempt is."""
        return self.job(name) / f"attempt-{attempt}"

    def guest(self, key: str) -> Path:
        """Where an attempt runs on a node that doesn't have the directory in which its job was submitted."""
        return self.root / "guests" / key
