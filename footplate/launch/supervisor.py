"""Run a function in several processes, and restart them when they fail.

    result = launch(train, config, world_size=4, restarts=Restarts(max_restarts=3))

The supervisor is a loop in the caller's thread. An *attempt* starts all ranks, with a new rendezvous. If a rank fails, all
ranks are ended, the supervisor finds the failure that caused the other ones, and `policy.decide` says whether, when and
with which ranks another attempt begins. The supervisor keeps nothing of a run: the function continues from its own
checkpoint.

Where machines come and go (`present` of the worker group), an attempt has the ranks of those that are there. If one joins,
or has to leave, all ranks save and end, and another attempt begins. That costs no restart.

No worker is left behind: when the supervisor dies, in whichever way, all workers die too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError, LaunchError
from footplate.core.signals import heard
from footplate.launch import payload, pickling, worker
from footplate.launch.attempt_monitor import TICK_S, AttemptMonitor, AwakeClock, Rank, Timeouts
from footplate.launch.backends import Backend, Local
from footplate.launch.failure import Failure
from footplate.launch.hang_files import HANGS_DIR, HangFiles
from footplate.launch.hang_watch import STALL_S
from footplate.launch.output import Output, Show
from footplate.launch.policy import Again, GiveUp, Restarts, State, decide
from footplate.launch.worker_group import Alive, Attempt, WorkerGroup, Wrote

log = logging.getLogger(__name__)

# Time to wait for all machines, before the first attempt and before a later one, if fewer are enough.
GATHER_S, REJOIN_S = 30.0, 3.0
# Time to wait for the fewest machines that are enough.
FEWEST_S = 570.0
_SIGNAL_OF_CODE = {143: signal.SIGTERM, 130: signal.SIGINT}


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: Backend = Local(),  # noqa: B008  frozen
    restarts: Restarts = Restarts(),  # noqa: B008  frozen
    env: Mapping[str, str] | None = None,
    name: str = "launch",
    log_dir: str | os.PathLike[str] | None = None,
    show: Show = "all",
    preload: Sequence[str] = ("torch",),
    heartbeat_timeout_s: float = 30.0,
    grace_s: float = 30.0,
    hangs_dir: str | os.PathLike[str] | None = None,
    stall_s: float = STALL_S,
) -> Any:
    """Call `fn(*args)` in `world_size` processes, again after failures; return the result of rank 0.

    A worker has `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in its environment,
    so `torch.distributed.init_process_group("gloo")` works without arguments. `footplate.launch.worker` has the rest.

    Args:
        fn: a function. cloudpickle sends it and `args`, so it may be of a script, without a guard, or of a notebook.
        args: its arguments.
        world_size: how many processes.
        backend: where they run; on this machine by default.
        restarts: how often, how soon and with how many ranks to try again.
        env: variables for the workers, over those of this process.
        name: of this launch, for the log.
        log_dir: a directory for each rank's output, in `attempt-0/rank-0.log` and so on; None to show it only.
        show: the lines to show: of `"all"` ranks, each with its rank; of `"rank_0"`, unchanged; or with
            `"log_callback_only"` only the messages of `footplate.launch.worker.log_to_driver`, which are always shown.
        preload: libraries to import once, before the workers are forked. They must not start threads or touch a device.
        heartbeat_timeout_s: silence after which a rank counts as frozen and is killed.
        grace_s: how long workers may take to end after SIGTERM.
        hangs_dir: a directory for the stacks of ranks that hang, in `hang-1.txt` and so on; None for `log_dir`. In a job,
            the attempt's folder comes first.
        stall_s: time without progress after which the stacks of all ranks are collected, and a warning names the rank that
            hangs.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: `fn`, `args` or the result can't be pickled; a rank was killed or lost, and no restart is left; the
            backend hasn't enough room for the workers.
        SystemExit: with 143, after SIGTERM to this process, or when all ranks have ended with 143 themselves.
        KeyboardInterrupt: after Ctrl-C; a second one kills the workers at once.
        Exception: the exception that `fn` raised, with the worker's traceback in its notes, when no restart is left. A
            `FootplateError` is raised at once.

    Examples:
        >>> from footplate.launch import Restarts, launch
        >>> def add(a, b):
        ...     return a + b
        >>> launch(add, 1, 2, world_size=2, restarts=Restarts(max_restarts=1))
        3
    """
    _check(world_size, restarts)
    timeouts = Timeouts(heartbeat_timeout_s, grace_s, restarts.peers_grace_s, stall_s)
    hangs = HangFiles(os.environ.get(HANGS_DIR) or hangs_dir or log_dir)
    payload_fd, launch_id = payload.create(), secrets.token_hex(8)
    try:
        _pack(payload_fd, fn, args)
        variables = {**(env or {}), worker.LAUNCH: launch_id}
        group = backend.worker_group(payload_fd, variables, preload, world_size)
        output = Output(Path(log_dir) if log_dir is not None else None, show)
        try:
            with Interrupts(group.wake) as interrupts:
                return Supervisor(group, output, interrupts, restarts, name, timeouts, hangs).run(world_size)
        finally:
            group.close()
            output.close()
    finally:
        os.close(payload_fd)
        shutil.rmtree(worker.kept_of(launch_id), ignore_errors=True)


class Interrupts:
    """While entered, collects SIGTERM and SIGINT in `received` and calls `wake`. Does nothing outside the main thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.received: deque[signal.Signals] = deque()
        self._wake = wake
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        self._handlers.enter_context(heard(self._record))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _record(self, number: int, _: object) -> None:
        self.received.append(signal.Signals(number))
        self._wake()


class Supervisor:
    """Runs attempts on a worker group, until one succeeds or there is no other. Arguments: see `launch`."""

    def __init__(
        self,
        group: WorkerGroup,
        output: Output,
        interrupts: Interrupts,
        restarts: Restarts,
        name: str,
        timeouts: Timeouts,
        hangs: HangFiles,
    ) -> None:
        self._group = group
        self._output = output
        self._interrupts = interrupts
        self._restarts = restarts
        self._name = name
        self._timeouts = timeouts
        self._hangs = hangs
        self._clock = AwakeClock()
        self._first_signal: signal.Signals | None = None
        # True after SIGINT.
        self._interrupted = False
        # The slots of the launch that haven't been given up, and those of the attempt.
        self._slots: tuple[int, ...] = ()
        self._used_slots: tuple[int, ...] = ()
        # True after the ranks were asked to end, for an attempt on other machines.
        self._regrouping = False

    def run(self, world_size: int) -> Any:
        """Run all attempts. Returns and raises what `launch` does."""
        state = State(slots=tuple(range(world_size)))
        number = 0
        while True:
            self._slots, self._used_slots = state.slots, self._gather(state.slots, number)
            monitor = self._run_attempt(Attempt(number, self._used_slots, self._output.terminals()))
            failure, code = monitor.cause, monitor.stopped
            if self._first_signal is not None:
                raise _exception_after(self._first_signal)
            if self._regrouping and monitor.ended_as_asked:
                number += 1
                continue
            if failure is None and code is not None:
                raise _exception_after(_SIGNAL_OF_CODE[code])
            if failure is None:
                return self._result(monitor.ranks[0])

            decision = decide(self._restarts, state, failure, monitor.progressed)
            if isinstance(decision, GiveUp):
                raise _error(failure, monitor, number, decision, self._hangs)
            self._announce(failure, monitor, number, decision)
            self._pause(decision.delay_s)
            state, number = decision.state, number + 1

    def _gather(self, slots: tuple[int, ...], number: int) -> tuple[int, ...]:
        """The slots whose machines are there, once these are enough. Waits a little for the others.

        Raises:
            LaunchError: they are never enough.
        """
        began = self._clock.look()
        until = began + (GATHER_S if number == 0 else REJOIN_S)
        while True:
            present = self._group.present(slots)
            if present == slots:
                return slots
            if present and self._clock.look() >= until:
                log.warning("%s: attempt %d has %d of %d ranks", self._name, number, len(present), len(slots))
                return present
            if self._clock.now > began + FEWEST_S:
                raise LaunchError(
                    f"{self._name}: after {FEWEST_S:.0f} s, too few machines are there. The log names them."
                )
            self._pause(TICK_S)

    def _run_attempt(self, attempt: Attempt) -> AttemptMonitor:
        self._regrouping = False
        self._output.begin(attempt.number, len(attempt.slots))
        self._group.begin(attempt)
        monitor = AttemptMonitor(self._group, attempt, self._clock, self._timeouts)
        while not monitor.over:
            self._run_round(monitor, TICK_S)
        if monitor.hang is not None:
            self._hangs.write(monitor.hang)
        for rank in monitor.ranks:
            self._output.end(rank.rank)
            if rank.failure is not None and rank.failure.traceback:
                self._output.keep(rank.rank, (rank.failure.traceback + "\n").encode())
        return monitor

    def _run_round(self, monitor: AttemptMonitor, timeout_s: float) -> None:
        """Handle the new events and signals, then let the monitor check the time."""
        for event in self._group.wait(timeout_s):
            if isinstance(event, Wrote):
                self._output.take(event)
            else:
                monitor.take(event)
                if isinstance(event, Alive) and event.saved:
                    self._regroup(monitor)
        if self._group.leaving():
            self._regroup(monitor)
        while self._interrupts.received:
            signum = self._interrupts.received.popleft()
            if signum == signal.SIGINT and self._interrupted:
                monitor.kill_within(0.0)
            else:
                monitor.stop(signum)
            self._first_signal = self._first_signal or signum
            self._interrupted |= signum == signal.SIGINT
        monitor.look()
        if monitor.stall is not None:
            stall, monitor.stall = monitor.stall, None
            file = self._hangs.write(stall)
            log.warning(
                "%s: no progress for %.0f s: %s.%s",
                self._name, stall.stalled_s or 0.0, stall.sentence, f" All stacks: {file}" if file else "",
            )  # fmt: skip

    def _regroup(self, monitor: AttemptMonitor) -> None:
        """End the attempt if a machine has to leave, or if there are more machines than it uses."""
        if self._regrouping:
            return
        present = self._group.present(self._slots)
        if present and (self._group.leaving() or set(present) - set(self._used_slots)):
            self._regrouping = True
            log.warning("%s: the ranks save and end, and go on as %d ranks", self._name, len(present))
            monitor.ask_to_end()

    def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt. A signal ends the launch."""
        until = self._clock.look() + delay_s
        while (left := until - self._clock.look()) > 0:
            self._group.wait(min(left, TICK_S))
            if self._interrupts.received:
                raise _exception_after(self._interrupts.received[0])

    def _result(self, rank_0: Rank) -> Any:
        assert rank_0.report is not None
        assert rank_0.load is not None
        if rank_0.report.kind == "left":
            log.warning(
                "%s: rank 0 ended with SystemExit(0) before its function returned: the result is None", self._name
            )
            return None
        try:
            return rank_0.load()
        except Exception as error:
            raise LaunchError(
                f"{self._name}: rank 0's result can't be loaded here: {type(error).__name__}: {error}. "
                "Return something that can be pickled, such as numbers, tensors or a state_dict."
            ) from error

    def _announce(self, failure: Failure, monitor: AttemptMonitor, number: int, decision: Again) -> None:
        when = f"in {decision.delay_s:g} s" if decision.delay_s else "now"
        given_up = f", without slot {decision.dropped}" if decision.dropped is not None else ""
        log.warning(
            "%s: %s in attempt %d; attempt %d starts %s%s (%s)",
            self._name, failure, number, number + 1, when, given_up, decision.budget,
        )  # fmt: skip
        if monitor.hang is not None:
            log.warning("%s: %s", self._name, self._hangs.described(monitor.hang))
        if failure.traceback:
            log.info("%s", failure.traceback)


def _check(world_size: int, restarts: Restarts) -> None:
    if not hasattr(os, "fork"):
        raise LaunchError(
            "Several processes need fork, which this system doesn't have: use Linux or macOS, or one process."
        )
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: expected 1 or more.")
    fewest = restarts.min_world_size
    if fewest is not None and not 1 <= fewest <= world_size:
        raise ConfigError(f"min_world_size={fewest}: expected 1 to world_size={world_size}, or None.")


def _pack(payload_fd: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        payload.write(payload_fd, (fn, args))
    except Exception as error:
        raise LaunchError(
            f"{pickling.name_of(fn)} and its arguments can't be sent to worker processes, because of "
            f"{pickling.culprit(fn, args)}: {type(error).__name__}: {error}. Open files, locks and connections can't be "
            "pickled: make them where they are used."
        ) from error


def _exception_after(signum: signal.Signals) -> BaseException:
    return SystemExit(143) if signum == signal.SIGTERM else KeyboardInterrupt()


def failure_of(error: BaseException) -> Failure | None:
    """The failure of a rank that a launch's exception is about; None if it is about no rank."""
    return vars(error).get("_footplate_failure")


def _error(failure: Failure, monitor: AttemptMonitor, number: int, decision: GiveUp, hangs: HangFiles) -> BaseException:
    """The exception to raise: the worker's own if it can be loaded here, with its traceback in a note."""
    why = f" ({decision.why})" if decision.why else ""
    load = monitor.ranks[failure.rank].load if failure.rank is not None and failure.kind == "exception" else None
    error = _loaded_exception(load)
    hang = hangs.described(monitor.hang) if monitor.hang is not None else ""
    if error is None:
        error = LaunchError("\n".join(filter(None, (f"{failure} in attempt {number}{why}.", failure.traceback, hang))))
    else:
        # One note, since `footplate run` prints the last one instead of the exception.
        raised = f"Raised by rank {failure.rank} in attempt {number}{why}:\n{failure.traceback}"
        error.add_note("\n".join(filter(None, (raised.rstrip("\n"), hang))))
    vars(error)["_footplate_failure"] = failure
    return error


def _loaded_exception(load: Callable[[], Any] | None) -> BaseException | None:
    """The exception in a worker's payload; None if there is none that can be unpickled here."""
    try:
        value = load() if load is not None else None
    except Exception:
        return None
    return value if isinstance(value, BaseException) else None
