"""The state of a worker process that a call of its function may change, and how to bring it back.

A process that is to run the function once more must look like a new one to it. `ProcessState` is taken before the first
call. Afterwards

1. `restore` sets what Python can set: variables, directory, signal handlers, streams, loggers, and so on;
2. `forget_modules` takes the user's own modules out of `sys.modules`. The next call imports them anew. Otherwise a flag or
   a cache in such a module could have another value than in a rank with a new process. Installed packages stay;
3. `remains` names what can't be taken back: a thread or a child process that the function has started, a module that can't
   be imported twice, a module that something still refers to. Then the process must end. The reference to a module shows
   what the user's code has registered with a library, such as a hook, a replaced function or an exit handler. After the
   next import, it would be there twice.
"""

from __future__ import annotations

import gc
import importlib.machinery
import logging
import os
import signal
import socket
import sys
import threading
import time
import typing
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from footplate.core.identity.module_origin import installed_directories
from footplate.core.stacks import answering

# Time for threads that were asked to end.
JOIN_S = 1.0
# Threads that serve the process, and not the call. The second one redraws progress bars that still exist.
LASTING_THREADS = {*answering.OURS, "tqdm_monitor"}
_MARK = "__footplate_mark__"


class _Mark:
    """An object in the namespace of a module. It lives as long as the namespace."""


@dataclass
class _Logger:
    """The settings of a logger."""

    level: int
    handlers: list[logging.Handler]
    filters: list[Any]
    propagate: bool
    disabled: bool

    @classmethod
    def of(cls, logger: logging.Logger) -> _Logger:
        return cls(logger.level, list(logger.handlers), list(logger.filters), logger.propagate, logger.disabled)

    def give_to(self, logger: logging.Logger) -> None:
        logger.setLevel(self.level)
        logger.handlers[:], logger.filters[:] = self.handlers, self.filters
        logger.propagate, logger.disabled = self.propagate, self.disabled


class ProcessState:
    """The state of this process. Make it in the main thread, before the first call."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._path = list(sys.path)
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._hooks = (sys.excepthook, threading.excepthook, sys.displayhook)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._umask = _umask()
        self._recursion_limit = sys.getrecursionlimit()
        self._collector = (gc.isenabled(), gc.get_threshold())
        self._socket_timeout = socket.getdefaulttimeout()
        self._warnings = list(warnings.filters)
        self._loggers = {logger: _Logger.of(logger) for logger in _loggers()}
        self._modules = frozenset(sys.modules)
        self._threads = frozenset(threading.enumerate())
        self._marks: dict[str, weakref.ref[_Mark]] = {}
        self._lasting: list[str] = []

    def restore(self) -> None:
        """Bring back what Python can set. Call this in the main thread."""
        os.environ.clear()
        os.environ.update(self._environment)
        sys.path[:] = self._path
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.excepthook, threading.excepthook, sys.displayhook = self._hooks
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        os.umask(self._umask)
        sys.setrecursionlimit(self._recursion_limit)
        enabled, thresholds = self._collector
        gc.set_threshold(*thresholds)
        (gc.enable if enabled else gc.disable)()
        socket.setdefaulttimeout(self._socket_timeout)
        warnings.resetwarnings()
        warnings.filters[:] = self._warnings  # pyright: ignore[reportIndexIssue]
        for logger in _loggers():
            self._loggers.get(logger, _Logger(logging.NOTSET, [], [], True, False)).give_to(logger)

    def forget_modules(self) -> None:
        """Take the user's own modules out of `sys.modules`."""
        self._marks.clear()
        self._lasting.clear()
        modules = {name: module for name, module in sys.modules.items() if isinstance(module, ModuleType)}
        users = {name: module for name, module in modules.items() if self._is_users(name)}
        del modules
        for name, module in users.items():
            if isinstance(getattr(module, "__loader__", None), importlib.machinery.ExtensionFileLoader):
                self._lasting.append(name)
            mark = vars(module)[_MARK] = _Mark()
            self._marks[name] = weakref.ref(mark)
            del mark
        for name, module in users.items():
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)

    def remains(self) -> str:
        """What is left of the call and can't be taken back, as the end of a sentence; "" if there is nothing."""
        # Subscripted types such as Optional[UsersClass] are cached.
        for clear in typing._cleanups:  # pyright: ignore[reportAttributeAccessIssue]
            clear()
        gc.collect()
        threads = self._threads_left()
        if threads:
            return f"it has left a thread ({threads[0].name})"
        children = sorted(_children())
        if children:
            return f"it has left a process ({children[0]})"
        if classes := _sent_classes():
            return f"something in the process still refers to the class {classes[0]}, which was sent with the call"
        if self._lasting:
            return f"the module {self._lasting[0]} is compiled and can't be loaded twice"
        alive = [name for name, mark in self._marks.items() if mark() is not None]
        if alive:
            return f"something in the process still refers to code of the module {alive[0]}"
        return ""

    def _is_users(self, name: str) -> bool:
        """Return True if a module was imported by a call, and its package isn't installed."""
        package = sys.modules.get(name.partition(".")[0])
        if name in self._modules or package is None:
            return False
        locations = [file] if (file := getattr(package, "__file__", None)) else list(getattr(package, "__path__", ()))
        return bool(locations) and not any(location.startswith(_INSTALLED) for location in locations)

    def _threads_left(self) -> list[threading.Thread]:
        until = time.monotonic() + JOIN_S
        while left := [thread for thread in threading.enumerate() if self._is_new(thread)]:
            if time.monotonic() > until:
                return left
            left[0].join(max(0.0, until - time.monotonic()))
        return []

    def _is_new(self, thread: threading.Thread) -> bool:
        return thread not in self._threads and thread.name not in LASTING_THREADS


# The folders of the standard library, of installed packages, and of Footplate.
_INSTALLED = tuple(f"{folder}/" for folder in (*installed_directories(), Path(__file__).parent.parent))


def _loggers() -> Iterator[logging.Logger]:
    yield logging.getLogger()
    yield from [logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)]


def _umask() -> int:
    """The mask for the permissions of new files. It can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sent_classes() -> list[str]:
    """The classes that came by value with the call and still exist. Cloudpickle would give them to the next call, too."""
    tracked = getattr(sys.modules.get("cloudpickle.cloudpickle"), "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    return sorted(kind.__qualname__ for kind in tracked.values())


def _children() -> set[int]:
    """The child processes of this process, on Linux."""
    if "multiprocessing.process" in sys.modules:
        # This reaps those that have ended.
        sys.modules["multiprocessing.process"].active_children()
    # A helper of multiprocessing, which knows nothing of the call.
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        children.update(map(int, (task / "children").read_text().split()))
    return children - {getattr(tracker, "_pid", None)}
