"""`footplate jobs list | describe | stream-logs | cancel | wait | delete | resubmit | clean | daemon`: what was submitted.

`wait` and `stream-logs` end with the job: 0 when it has succeeded, 1 when it hasn't. Ctrl-C ends them, not the job.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from footplate.cli import plain
from footplate.cli.formats import add_format, show_as
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from footplate.jobs.operations import Jobs
    from footplate.jobs.record import Job
    from footplate.jobs.states import State
    from footplate.jobs.store.jobs import Summary

SHOWN = 100
COMPLETE_NAMES = "_footplate_job_names"  # the shell function of completion.py that does it
_EVERY_S = 5.0
_ABOUT = {
    "list": "jobs, the newest first",
    "describe": "all that is known of a job",
    "stream-logs": "what a job's processes write, from the beginning to the end",
    "cancel": "end a job; its processes are asked first, so that they can save",
    "wait": "wait for a job's end",
    "delete": "forget a job that has ended, with its logs",
    "resubmit": "put a job that failed or was cancelled into the queue again",
    "clean": "delete packages and environments that no job needs; supervisors do so, once a day, after 30 days without use",
    "daemon": "stay, and see to it every few seconds that jobs go on; for starting with the machine",
}


def add_to(commands: Any, kind: Any, only: str | None = None) -> None:
    """Add the actions to those of `jobs`, or only one of them, with parsers of a kind."""
    for action, about in _ABOUT.items():
        if only not in (None, action):
            continue
        made = plain.make(kind, f"jobs {action}", f"{about[0].upper()}{about[1:]}.")
        if action not in ("list", "clean", "daemon"):
            named = made.add_argument("name", help="the job's name")
            named.complete = dict.fromkeys(("bash", "zsh"), COMPLETE_NAMES)  # as shtab has it
        if action == "list":
            made.add_argument("--filter", help="such as state=RUNNING or labels.team=vision")
            made.add_argument(
                "--sort-by", help="such as state,~startTime; ~ turns the order round; by default ~createTime"
            )
            made.add_argument("--limit", type=int, default=SHOWN, help="at most so many; 0 for all")
        if action == "stream-logs":
            made.add_argument(
                "--tail", type=int, help="of what has been written so far, only this many lines at the end"
            )
        if action in ("list", "cancel", "wait", "resubmit"):
            add_format(made)
        if action == "cancel":
            made.add_argument(
                "--machine-lost", action="store_true", help="end it without its machine, which won't come back"
            )
        if action == "clean":
            made.add_argument("--unused-for", default="30d", help="only what nobody has used for so long")
            made.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
        if action == "describe":
            add_format(made, "yaml")
        commands.add_subcommand(action, made, help=about)


def run(action: str, given: Namespace) -> int:
    """Do one of the actions; returns the exit code.

    Raises:
        FootplateError: there is no such job, or it isn't in a state for this.
    """
    from footplate.jobs.operations import Jobs

    jobs = Jobs.from_env()
    return _ACTIONS[action](jobs, given)


def stream(jobs: Jobs, name: str, tail: int | None = None) -> int:
    """Print what a job's processes write until it ends; returns 0 when it has succeeded, else 1.

    Args:
        jobs: the jobs of this machine.
        name: the job's.
        tail: of what has been written so far, print only this many lines at the end.

    Raises:
        KeyboardInterrupt: Ctrl-C; the job goes on.
    """
    from footplate.jobs.states import State
    from footplate.jobs.supervision.follow import Line

    state: State | None = None
    attempt = 0
    try:
        for event in jobs.follow(name, tail=tail):
            if not isinstance(event, Line):
                state = event
                print(_said(jobs.store.find(name), state), file=sys.stderr, flush=True)
                continue
            if event.attempt != attempt:
                attempt = event.attempt
                if attempt > 1:
                    print(f"--- attempt {attempt} ---", file=sys.stderr, flush=True)
            end = "" if event.text.endswith(("\n", "\r")) else "\n"
            print(f"[{event.source}] {event.text}", end=end, flush=True)
    except KeyboardInterrupt:
        print(f"{name} goes on. See it again: footplate jobs stream-logs {name}", file=sys.stderr)
        raise
    return int(state != State.SUCCEEDED)


def _said(job: Job, state: State) -> str:
    from footplate.jobs.states import State

    why = f": {job.cause}" if job.cause and job.state == state else ""
    waits = ": waits for its turn" if state == State.QUEUED else ""
    return f"{job.name} is {state}{why or waits}"


def _list(jobs: Jobs, given: Namespace) -> int:
    from footplate.cli.formats import aligned
    from footplate.jobs.listing import select

    if given.limit < 0:
        raise ConfigError(f"--limit {given.limit}: expected how many jobs to show, or 0 for all.")
    jobs.reconcile()
    rows, count = select(jobs.store, given.filter, given.sort_by, given.limit or None)
    shown = [_row(one) for one in rows]
    columns = {"jobId": "job", "state": "state", "createTime": "created", "took": "took", "cause": "cause"}
    table = [
        {**one, "createTime": one["createTime"][5:16], "took": _took(row)} for one, row in zip(shown, rows, strict=True)
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    show_as(given.format, shown, lambda: aligned(table, columns, width) if shown else "There are no such jobs.")
    if len(rows) < count:
        print(f"{count - len(rows)} more: --limit {count}", file=sys.stderr)
    return 0


def _row(one: Summary) -> dict[str, Any]:
    return {
        "jobId": one.name,
        "state": str(one.state),
        "createTime": _time(one.created),
        "startTime": _time(one.started),
        "endTime": _time(one.ended),
        "attempt": one.attempt,
        "backend": one.backend,
        "host": one.host,
        "priority": one.priority,
        "labels": json.loads(one.labels),
        "cause": one.cause,
    }


def _took(one: Summary) -> str:
    """How long a job has run, as people write it."""
    if one.started is None:
        return ""
    seconds = round((one.ended or time.time()) - one.started)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _describe(jobs: Jobs, given: Namespace) -> int:
    shown = description(jobs, jobs.find(given.name))
    show_as(given.format, shown, lambda: "\n".join(_lines(shown)))
    return 0


def tell(jobs: Jobs, given: Namespace, sentence: str) -> None:
    """Say in a sentence how it is with a job now, or, to a program, all that is known of it."""
    show_as(given.format, description(jobs, jobs.store.find(given.name)), lambda: sentence)


def description(jobs: Jobs, job: Job) -> dict[str, Any]:
    """A job with its history, as plain values."""
    return {
        "jobId": job.name,
        "state": str(job.state),
        "cause": job.cause,
        "createTime": _time(job.created),
        "startTime": _time(job.started),
        "endTime": _time(job.ended),
        "backend": job.backend,
        "host": job.host,
        "attempt": job.attempt,
        "failures": job.failures,
        "losses": job.losses,
        "priority": job.priority,
        "labels": job.labels,
        "holds": {"cpus": job.needs.cpus, "gpus": job.needs.gpus, "memoryGb": job.needs.memory_gb},
        "logs": str(jobs.home.job(job.name)),
        "transitions": [
            {
                "time": _time(one.at),
                "from": str(one.source) if one.source else None,
                "to": str(one.target),
                "attempt": one.attempt,
                "cause": one.cause,
            }
            for one in jobs.store.transitions(job.name)
        ],
        "processes": [
            {
                "attempt": one.attempt,
                "role": one.role,
                "index": one.index,
                "pid": one.pid,
                "began": _time(one.began),
                "ended": _time(one.ended),
                "outcome": one.outcome,
            }
            for one in jobs.store.processes(job.name)
        ],
        "spec": {key: value for key, value in job.spec.items() if key != "notices"},
    }


def _lines(shown: dict[str, Any]) -> list[str]:
    """A description for a terminal: the facts, then what has happened."""
    facts = [f"{key:<11} {value}" for key, value in shown.items() if value and not isinstance(value, (dict, list))]
    steps = [
        f"  {one['time']}  {one['to']:<11}" + (f" attempt {one['attempt']}" if one["attempt"] else "")
        + (f": {one['cause']}" if one["cause"] else "")
        for one in shown["transitions"]
    ]  # fmt: skip
    ran = [
        f"  attempt {one['attempt']}  {one['role']} {one['index']}: {one['outcome'] or 'runs, or was lost'}"
        for one in shown["processes"]
    ]
    return [*facts, "", "what has happened:", *steps, *(["", "processes:", *ran] if ran else [])]


def _stream_logs(jobs: Jobs, given: Namespace) -> int:
    if given.tail is not None and given.tail < 0:
        raise ConfigError(f"--tail {given.tail}: expected a number of lines, 0 or more.")
    return stream(jobs, given.name, given.tail)


def _cancel(jobs: Jobs, given: Namespace) -> int:
    tell(jobs, given, f"{given.name} is {jobs.cancel(given.name, given.machine_lost)}")
    return 0


def _wait(jobs: Jobs, given: Namespace) -> int:
    from footplate.jobs.states import State

    job = jobs.wait(given.name)
    tell(jobs, given, _said(job, job.state))
    return int(job.state != State.SUCCEEDED)


def _delete(jobs: Jobs, given: Namespace) -> int:
    jobs.delete(given.name)
    print(f"{given.name} is deleted; what it has written to its job directory is still there.")
    return 0


def _resubmit(jobs: Jobs, given: Namespace) -> int:
    tell(jobs, given, f"{given.name} is {jobs.resubmit(given.name)}")
    return 0


def _clean(jobs: Jobs, given: Namespace) -> int:
    from footplate.jobs.spec.naming import duration, seconds

    try:
        unused_s = seconds(duration(given.unused_for))
    except ValueError as error:
        raise ConfigError(f"--unused-for {given.unused_for}: {error}.") from None
    found = jobs.clean(unused_s, given.dry_run)
    for one in found:
        days = one.unused_s / 86400
        print(f"{one.kind:<12} {one.path.name[:20]:<20} {one.nbytes / 2**20:>9.1f} MiB, unused for {days:.1f} days")
    what = "would be deleted" if given.dry_run else "deleted"
    print(f"{len(found)} {what}, {sum(one.nbytes for one in found) / 2**20:.1f} MiB")
    return 0


def _daemon(jobs: Jobs, given: Namespace) -> int:
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"looking after the jobs in {jobs.home.root}", flush=True)
    while True:
        try:
            jobs.reconcile()
        except (ConfigError, OSError) as error:  # a full disk, a server that is away: it may be there the next time
            print(error, file=sys.stderr, flush=True)
        time.sleep(_EVERY_S)


_ACTIONS: dict[str, Callable[[Jobs, Any], int]] = {
    "list": _list,
    "describe": _describe,
    "stream-logs": _stream_logs,
    "cancel": _cancel,
    "wait": _wait,
    "delete": _delete,
    "resubmit": _resubmit,
    "clean": _clean,
    "daemon": _daemon,
}
ACTIONS: Sequence[str] = tuple(_ACTIONS)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
