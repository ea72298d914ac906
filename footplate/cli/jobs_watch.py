"""`footplate jobs list | describe | stream-logs | cancel | wait | delete | resubmit | daemon`: jobs that were submitted.

`wait` and `stream-logs` end with the job: 0 when it has succeeded, 1 when it hasn't. Ctrl-C ends them, not the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from footplate.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from footplate.jobs.record import Job
    from footplate.jobs.states import State
    from footplate.jobs.store.jobs import Summary
    from footplate.jobs.verbs import Jobs

SHOWN = 100
_EVERY_S = 5.0
_FILTERS = ("name", "state", "host", "backend")
_ABOUT = {
    "list": "jobs, the newest first",
    "describe": "all that is known of a job",
    "stream-logs": "what a job's processes write, from the beginning to the end",
    "cancel": "end a job; its processes are asked first, so that they can save",
    "wait": "wait for a job's end",
    "delete": "forget a job that has ended, with its logs",
    "resubmit": "put a job that failed or was cancelled into the queue again",
    "daemon": "stay, and see to it every few seconds that jobs go on; for starting with the machine",
}


def add_to(commands: Any, only: str | None = None) -> None:
    """Add the actions to those of `jobs`, or only one of them."""
    from footplate.cli.formats import add_format
    from footplate.cli.parsing import make_parser

    for action, about in _ABOUT.items():
        if only not in (None, action):
            continue
        made = make_parser(f"jobs {action}", f"{about[0].upper()}{about[1:]}.")
        if action not in ("list", "daemon"):
            made.add_argument("name", type=str, help="the job's name")
        if action == "list":
            made.add_argument(
                "--filter", type=str | None, default=None, help="such as state=RUNNING or labels.team=vision"
            )
            made.add_argument("--limit", type=int, default=SHOWN, help="at most so many; 0 for all")
            add_format(made)
        if action == "describe":
            add_format(made, "yaml")
        commands.add_subcommand(action, made, help=about)


def run(action: str, given: Namespace) -> int:
    """Do one of the actions; returns the exit code.

    Raises:
        FootplateError: there is no such job, or it isn't in a state for this.
    """
    from footplate.jobs.verbs import Jobs

    jobs = Jobs.here()
    return _ACTIONS[action](jobs, given)


def stream(jobs: Jobs, name: str) -> int:
    """Print what a job's processes write until it ends; returns 0 when it has succeeded, else 1.

    Raises:
        KeyboardInterrupt: Ctrl-C; the job goes on.
    """
    from footplate.jobs.local.follow import Line
    from footplate.jobs.states import State

    state: State | None = None
    attempt = 0
    try:
        for event in jobs.follow(name):
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
    from footplate.cli.formats import grid, show_as

    if given.limit < 0:
        raise ConfigError(f"--limit {given.limit}: expected how many jobs to show, or 0 for all.")
    wanted = _filters(given.filter)
    jobs.sweep()
    found = [one for one in jobs.store.list(wanted.get("state")) if _passes(one, wanted)]
    rows = found[: given.limit] if given.limit else found
    shown = [_row(one) for one in rows]
    columns = {"jobId": "job", "state": "state", "createTime": "created", "took": "took", "cause": "cause"}
    table = [
        {**one, "createTime": one["createTime"][5:16], "took": _took(row)} for one, row in zip(shown, rows, strict=True)
    ]
    show_as(given.format, shown, lambda: grid(table, columns, "cause") if shown else "There are no such jobs.")
    if len(rows) < len(found):
        print(f"{len(found) - len(rows)} more: --limit {len(found)}", file=sys.stderr)
    return 0


def _filters(text: str | None) -> dict[str, Any]:
    """What `--filter` asks for: keys and the values that they must have."""
    from footplate.jobs.states import State

    wanted: dict[str, Any] = {}
    for part in (text or "").split(" AND ") if text else ():
        key, equals, value = part.strip().partition("=")
        key = {"jobId": "name"}.get(key, key)
        if not equals or not (key in _FILTERS or key.startswith("labels.")):
            known = [*_FILTERS, "labels.NAME"]
            hint = did_you_mean(key, known)
            raise ConfigError(f'--filter "{part.strip()}": expected KEY=VALUE, several with AND between them. {hint}')
        if key == "state":
            if value.upper() not in list(State):
                raise ConfigError(f'--filter state="{value}": there is no such state. {did_you_mean(value, State)}')
            value = State(value.upper())
        wanted[key] = value
    return wanted


def _passes(one: Summary, wanted: dict[str, Any]) -> bool:
    labels = json.loads(one.labels) if any(key.startswith("labels.") for key in wanted) else {}
    return all(
        (labels.get(key.removeprefix("labels.")) if key.startswith("labels.") else getattr(one, key)) == value
        for key, value in wanted.items()
    )


def _row(one: Summary) -> dict[str, Any]:
    return {
        "jobId": one.name,
        "state": str(one.state),
        "createTime": _time(one.created),
        "startTime": _time(one.started),
        "endTime": _time(one.ended),
        "attempt": one.attempt,
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
    from footplate.cli.formats import show_as

    job = jobs.find(given.name)
    shown = description(jobs, job)
    show_as(given.format, shown, lambda: "\n".join(_lines(shown)))
    return 0


def description(jobs: Jobs, job: Job) -> dict[str, Any]:
    """A job with its history, as plain values."""
    return {
        "jobId": job.name,
        "state": str(job.state),
        "cause": job.cause,
        "createTime": _time(job.created),
        "startTime": _time(job.started),
        "endTime": _time(job.ended),
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
    return stream(jobs, given.name)


def _cancel(jobs: Jobs, given: Namespace) -> int:
    print(f"{given.name} is {jobs.cancel(given.name)}")
    return 0


def _wait(jobs: Jobs, given: Namespace) -> int:
    from footplate.jobs.states import State

    job = jobs.wait(given.name)
    print(_said(job, job.state))
    return int(job.state != State.SUCCEEDED)


def _delete(jobs: Jobs, given: Namespace) -> int:
    jobs.delete(given.name)
    print(f"{given.name} is deleted; what it has written to its job directory is still there.")
    return 0


def _resubmit(jobs: Jobs, given: Namespace) -> int:
    print(f"{given.name} is {jobs.resubmit(given.name)}")
    return 0


def _daemon(jobs: Jobs, given: Namespace) -> int:
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"looking after the jobs in {jobs.home.root}", flush=True)
    while True:
        try:
            jobs.sweep()
        except ConfigError as error:  # a full disk, a server that is away: it may be there the next time
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
    "daemon": _daemon,
}
ACTIONS: Sequence[str] = tuple(_ACTIONS)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
