"""Run a script or a module as the main program of a worker, as `python SCRIPT` or `python -m MODULE` would."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from footplate.core.errors import ConfigError


@dataclass(frozen=True)
class Script:
    """A script or a module, with its arguments.

    Attributes:
        target: the path of a script, or the name of a module.
        args: its arguments.
        module: whether it is a module.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False

    @property
    def name(self) -> str:
        """The name for logs."""
        return self.target if self.module else Path(self.target).stem

    def check(self) -> None:
        """Check that it exists.

        Raises:
            ConfigError: it doesn't.
        """
        if self.module and not _is_module(self.target.partition(".")[0]):
            raise ConfigError(f"-m {self.target}: there is no module of this name in sys.path or in {Path.cwd()}.")
        if not self.module and not Path(self.target).exists():
            raise ConfigError(f"{self.target}: there is no such script in {Path.cwd()}. Use -m to run a module.")

    def __call__(self) -> None:
        """Run it as the main program of this process."""
        sys.argv = [self.target, *self.args]
        sys.path.insert(0, str(Path.cwd() if self.module else Path(self.target).resolve().parent))
        try:
            if self.module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.fspath(self.target), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise


def _is_module(name: str) -> bool:
    spec = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
    return spec is not None or importlib.util.find_spec(name) is not None
