"""Run a function in several processes, and keep them alive.

    result = launch(train, config, world_size=4, restarts=Restarts(max_restarts=3))

The supervisor is a loop in the caller's thread. An *attempt* starts all ranks, with a rendezvous of its own. If one fails,
all are ended, the failure that caused the others is found, and `policy.decide` says whether, when and with which ranks
another attempt begins. What a run has done is not the supervisor's to keep: the function continues from its own checkpoint.

Nobody is left behind: when the supervisor dies, however it does, so do all workers.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError, LaunchError
from footplate.launch import parcel, pickling, worker
from footplate.launch.backends import Backend, Local
from footplate.launch.crew import Attempt, Crew, Wrote
from footplate.launch.failure import Failure
from footplate.launch.interrupts import Interrupts
from footplate.launch.output import Output, Show
from footplate.launch.policy import Again, GiveUp, Restarts, State, decide
from footplate.launch.watch import TICK_S, AwakeClock, Patience, Rank, Watch

log = logging.getLogger(__name__)

_CODES = {143: signal.SIGTERM, 130: signal.SIGINT}


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
) -> Any:
    """Call `fn(*args)` in `world_size` processes, again after failures; return what rank 0 returned.

    In a worker `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` are set, so that
    `torch.distributed.init_process_group("gloo")` works as it is; `footplate.launch.worker` tells the rest.

    Args:
        fn: a function; it and `args` travel by cloudpickle, so it may be of a script, without a guard, or of a notebook.
        args: its arguments.
        world_size: how many processes.
        backend: where they live; on this machine by default.
        restarts: how often, how soon and with how many ranks to try again.
        env: variables for the workers, over those of this process.
        name: what the log calls this launch.
        log_dir: where each rank's output is kept, in `attempt-0/rank-0.log` and so on; None to show it only.
        show: whose lines are shown: of `"all"` ranks, each with its rank; `"rank_0"`'s as they are; `"log_callback_only"`,
            what is given to `footplate.launch.worker.log_to_driver`, which the others show too.
        preload: libraries imported once, before the workers are forked; they must not start threads or touch a device.
        heartbeat_timeout_s: silence after which a rank counts as frozen and is killed.
        grace_s: how long workers may take to end after SIGTERM.

    Raises:
        ConfigError: a number that can't be.
        LaunchError: `fn`, `args` or the result can't be pickled; a rank was killed or lost, and no restart is left; the
            backend has no room for so many.
        SystemExit: with 143, after SIGTERM to this process, or when all ranks have ended with it by themselves.
        KeyboardInterrupt: after Ctrl-C; a second one kills the workers at once.
        Exception: what `fn` raised, with the worker's traceback in its notes, when no restart is left. A `FootplateError`
            is raised at once.
    """
    _check(world_size, restarts)
    patience = Patience(heartbeat_timeout_s, grace_s, restarts.peers_grace_s)
    payload, launched = parcel.empty(), secrets.token_hex(8)
    try:
        _pack(payload, fn, args)
        crew = backend.crew(payload, {**(env or {}), worker.LAUNCH: launched}, preload, world_size)
        output = Output(Path(log_dir) if log_dir is not None else None, show)
        try:
            with Interrupts(crew.wake) as interrupts:
                return Supervisor(crew, output, interrupts, restarts, name, patience).run(world_size)
        finally:
            crew.close()
            output.close()
    finally:
        os.close(payload)
        shutil.rmtree(worker.kept_of(launched), ignore_errors=True)


class Supervisor:
    """Runs attempts, whoever carries them, until one succeeds or no other is to follow. Arguments: see `launch`."""

    def __init__(
        self, crew: Crew, output: Output, interrupts: Interrupts, restarts: Restarts, name: str, patience: Patience
    ) -> None:
        self._crew = crew
        self._output = output
        self._interrupts = interrupts
        self._restarts = restarts
        self._name = name
        self._patience = patience
        self._clock = AwakeClock()
        self._told: signal.Signals | None = None  # the first signal that came
        self._interrupted = False  # whether SIGINT came

    def run(self, world_size: int) -> Any:
        """What `launch` returns and raises."""
        state = State(slots=tuple(range(world_size)))
        number = 0
        while True:
            watch = self._attempt(Attempt(number, state.slots, self._output.terminals()))
            failure, code = watch.cause, watch.stopped
            if self._told is not None:
                raise _end_after(self._told)
            if failure is None and code is not None:
                raise _end_after(_CODES[code])
            if failure is None:
                return self._result(watch.ranks[0])
            decision = decide(self._restarts, state, failure, watch.progressed)
            if isinstance(decision, GiveUp):
                raise _error(failure, watch, number, decision)
            self._announce(failure, number, decision)
            self._pause(decision.delay_s)
            state, number = decision.state, number + 1

    def _attempt(self, attempt: Attempt) -> Watch:
        self._output.begin(attempt.number, len(attempt.slots))
        self._crew.begin(attempt)
        watch = Watch(self._crew, attempt, self._clock, self._patience)
        while not watch.over:
            self._round(watch, TICK_S)
        for rank in watch.ranks:
            self._output.end(rank.rank)
            if rank.failure is not None and rank.failure.traceback:
                self._output.keep(rank.rank, (rank.failure.traceback + "\n").encode())
        return watch

    def _round(self, watch: Watch, timeout_s: float) -> None:
        """Take what has happened, then do what is due."""
        for event in self._crew.wait(timeout_s):
            if isinstance(event, Wrote):
                self._output.take(event)
            else:
                watch.take(event)
        while self._interrupts.received:
            signum = self._interrupts.received.popleft()
            if signum == signal.SIGINT and self._interrupted:
                watch.kill_within(0.0)
            else:
                watch.stop(signum)
            self._told = self._told or signum
            self._interrupted |= signum == signal.SIGINT
        watch.look()

    def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt; a signal ends the launch."""
        until = self._clock.look() + delay_s
        while (left := until - self._clock.look()) > 0:
            self._crew.wait(min(left, TICK_S))
            if self._interrupts.received:
                raise _end_after(self._interrupts.received[0])

    def _result(self, first: Rank) -> Any:
        assert first.report is not None
        assert first.load is not None
        if first.report.kind == "left":
            log.warning(
                "%s: rank 0 ended with SystemExit(0) before its function returned: the result is None", self._name
            )
            return None
        try:
            return first.load()
        except Exception as error:
            raise LaunchError(
                f"{self._name}: rank 0's result can't be loaded here: {type(error).__name__}: {error}. "
                "Return what can be pickled, such as numbers, tensors or a state_dict."
            ) from error

    def _announce(self, failure: Failure, number: int, decision: Again) -> None:
        when = f"in {decision.delay_s:g} s" if decision.delay_s else "now"
        given_up = f", without slot {decision.dropped}" if decision.dropped is not None else ""
        log.warning(
            "%s: %s in attempt %d; attempt %d starts %s%s (%s)",
            self._name, failure, number, number + 1, when, given_up, decision.budget,
        )  # fmt: skip
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


def _pack(payload: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        parcel.put(payload, (fn, args))
    except Exception as error:
        raise LaunchError(
            f"{pickling.name_of(fn)} and its arguments can't be sent to worker processes, because of "
            f"{pickling.culprit(fn, args)}: {type(error).__name__}: {error}. Open files, locks and connections can't be "
            "pickled: make them where they are used."
        ) from error


def _end_after(signum: signal.Signals) -> BaseException:
    return SystemExit(143) if signum == signal.SIGTERM else KeyboardInterrupt()


def failure_of(error: BaseException) -> Failure | None:
    """What happened to a rank, of an exception that a launch ended with; None of one that is not about a rank."""
    return vars(error).get("_footplate_failure")


def _error(failure: Failure, watch: Watch, number: int, decision: GiveUp) -> BaseException:
    """What is raised at home: the worker's own exception where it can be had, with its traceback in a note."""
    why = f" ({decision.why})" if decision.why else ""
    load = watch.ranks[failure.rank].load if failure.rank is not None and failure.kind == "exception" else None
    error = _loaded(load)
    if error is None:
        error = LaunchError("\n".join(filter(None, (f"{failure} in attempt {number}{why}.", failure.traceback))))
    else:
        error.add_note(f"Raised by rank {failure.rank} in attempt {number}{why}:\n{failure.traceback}")
    vars(error)["_footplate_failure"] = failure
    return error


def _loaded(load: Callable[[], Any] | None) -> BaseException | None:
    """The exception in a worker's parcel; None when it has none that can be made here."""
    try:
        value = load() if load is not None else None
    except Exception:
        return None
    return value if isinstance(value, BaseException) else None
