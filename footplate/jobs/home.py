"""Where this machine keeps its jobs: one folder, which is the user's alone.

~/.footplate/               FOOTPLATE_HOME names another
  jobs.db                   the store, unless FOOTPLATE_STORE names a server
  sweep.lock                held by whoever looks whose turn it is
  packages/, environments/  what jobs run, by digest
  jobs/NAME/                of one job
    supervisor.lock         held by its supervisor
    supervisor.log          what that has to say
    environment.json        the variables that its processes get
    attempt-1/master-0.log  what a process wrote; a second file, master-0.log.1, follows a full one
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from footplate.errors import ConfigError


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
        root = Path(os.environ.get("FOOTPLATE_HOME") or "~/.footplate").expanduser().absolute()
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

    def job(self, name: str) -> Path:
        """A job's folder. Names are checked when a job is submitted, and can't leave it."""
        return self.root / "jobs" / name

    def attempt(self, name: str, attempt: int) -> Path:
        """Where the output of an attempt is."""
        return self.job(name) / f"attempt-{attempt}"
