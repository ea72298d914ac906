"""`footplate COMMAND …`: finds the command, runs it, and turns what happens into an exit code.

    0     done
    1     the user's code, or Footplate's, raised an exception: its traceback is shown; or what was looked at isn't well: by
          `doctor`, `jobs check`, `catalog check`, …; or a job that was waited for has failed
    2     a mistake that the user can correct: a flag, a configuration, a table, a checkpoint; one message, no traceback
    130   Ctrl-C, after the run was saved
    143   SIGTERM, after the run was saved

Nothing heavy is imported here: `footplate --help` and `--version` answer without torch.
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
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        The exit code; see the module's docstring.

    Raises:
        SystemExit: 0 after `--help`, 143 after SIGTERM.
        Exception: what the user's code raised; the interpreter shows its traceback and exits with 1.
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
    _speak_plainly()
    # Loader threads and torch's share the cores: one that waits must sleep, not spin. Read once, when torch is loaded.
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
    except BrokenPipeError:  # `footplate table … | head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code


def _speak_plainly() -> None:
    """Footplate's log and its warnings go to standard error, as sentences."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("footplate").setLevel(logging.INFO)
    warnings.formatwarning = _plain_warning(warnings.formatwarning)


def _plain_warning(before: Callable[..., str]) -> Callable[..., str]:
    ours = str(Path(__file__).parent.parent)

    def form(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any) -> str:
        if filename.startswith(ours):
            return f"warning: {message}\n"
        return before(message, category, filename, *rest, **named)

    return form
