"""`footplate COMMAND …`: find the command, run it, and turn its outcome into an exit code.

    0     success
    1     the user's code, or Footplate's, raised an exception, whose traceback is shown; or `doctor`, `jobs check`,
          `catalog check`, … found a problem; or the job that the command waited for has failed
    2     a mistake that the user can correct: a flag, a configuration, a table, a checkpoint; one message, no traceback
    130   Ctrl-C, after the run was saved
    143   SIGTERM, after the run was saved

This file imports nothing heavy: `footplate --help` and `--version` answer without torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from footplate.cli.commands import COMMANDS, overview
from footplate.core.errors import FootplateError, did_you_mean
from footplate.core.version import __version__

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; by default those of the process.

    Returns:
        The exit code; see the docstring of this file.

    Raises:
        SystemExit: 0 after `--help`, 143 after SIGTERM.
        Exception: the user's code raised it; the interpreter shows the traceback and exits with 1.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(overview())
        return OK
    if name == "--version":
        print(f"footplate {__version__}")
        return OK
    if name not in COMMANDS:
        mistake = f'"{name}" is no command. {did_you_mean(name, COMMANDS)}' if name else "expected a command."
        print(f"footplate: {mistake}\nSee: footplate --help", file=sys.stderr)
        return USAGE

    _set_up_logging()
    # The loader's threads and torch's share the cores, so a waiting thread must sleep, not spin. torch reads this once,
    # when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    try:
        code = importlib.import_module(COMMANDS[name].module).run(name, rest)
        sys.stdout.flush()
    except FootplateError as error:
        print(f"footplate {name}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"footplate {name}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of `footplate table … | head` has closed the pipe. The interpreter flushes standard output once more
        # when it exits, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code


def _set_up_logging() -> None:
    """Print Footplate's log messages and warnings to standard error, as plain sentences."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("footplate").setLevel(logging.INFO)
    warnings.formatwarning = _plain_warning(warnings.formatwarning)


def _plain_warning(format_others: Callable[..., str]) -> Callable[..., str]:
    """Format warnings of Footplate's files as one line, and all others as before."""
    package = str(Path(__file__).parent.parent)

    def format_warning(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any) -> str:
        if filename.startswith(package):
            return f"warning: {message}\n"
        return format_others(message, category, filename, *rest, **named)

    return format_warning
