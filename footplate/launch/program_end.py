"""The end of a program in a process that was forked from another: as an interpreter ends, without tearing modules down.

The modules belong to the fork server as well. To tear them down, an interpreter would copy the memory that both share. That
takes longer than all else, and native libraries tend to crash in it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from typing import NoReturn


def exit_code(end: SystemExit) -> int:
    """The exit code of a program. A text is printed, as an interpreter does."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def end_program(code: int) -> NoReturn:
    """Wait for the threads that aren't daemons, call what `atexit` has, write what the streams hold, and end.

    Args:
        code: the exit code.
    """
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # pyright: ignore[reportAttributeAccessIssue]
        try:
            finish()
        except BaseException:
            traceback.print_exc()
    flush_streams()
    os._exit(code)


def flush_streams() -> None:
    """Write what the standard streams hold."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
