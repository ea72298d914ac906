"""Submitted jobs: `footplate jobs list | describe | stacks | profile | stream-logs | cancel | wait | delete | …`.

`wait` and `stream-logs` end with the job: 0 if it succeeded, otherwise 1. Ctrl-C ends these commands, not the job.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from footplate.cli.arguments import make_parser
from footplate.cli.formats import add_format, show_as
from footplate.cli.profile import add_steps
from footplate.cli.stacks import add_native
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from footplate.core.goodput import Ledger
    from footplate.jobs.operations import Jobs
    from footplate.jobs.record import Job
    from footplate.jobs.states import State
    from footplate.jobs.store.jobs import Summary

SHOWN = 100
# The shell function of completion.py that completes names of jobs.
COMPLETE_NAMES = "_footplate_job_names"
_EVERY_S = 5.0
_ABOUT = {
    "list": "list jobs, the newest first",
    "describe": "describe a job: its history, its processes, and its time and money by cause",
    "stacks": "show where a running job's processes are now, and which ranks wait for which",
    "profile": "profile the next steps of a running job's training, on all its ranks",
    "stream-logs": "print a job's output, from the beginning until the job ends",
    "cancel": "end a job; its processes first get time to save",
    "wait": "wait until a job ends",
    "delete": "delete a job that has ended, and its logs",
    "resubmit": "put a failed or cancelled job into the queue again",
    "clean": "delete packages and environments that no job needs; supervisors do so once a day, after 30 days without use",
    "daemon": "keep jobs going: run, and start every few seconds what can start; for a service that starts at boot",
}


def add_to(commands: Any, only: str | None = None) -> None:
    """Add the actions to those of `jobs`, or only one of them."""
    for action, about in _ABOUT.items():
        if only not in (None, action):
            continue
        command = make_parser(f"jobs {action}", f"{about[0].upper()}{about[1:]}.")
        if action not in ("list", "clean", "daemon"):
            name: Any = command.add_argument("name", help="the job's name")
            # shtab reads this attribute.
            name.complete = {"bash": COMPLETE_NAMES, "zsh": COMPLETE_NAMES, "fish": f"({COMPLETE_NAMES})"}
        if action == "list":
            command.add_argument("--filter", help="such as state=RUNNING or labels.team=vision")
            command.add_argument(
                "--sort-by", help="such as state,~startTime; ~ reverses the order; the default is ~createTime"
            )
            command.add_argument("--limit", type=int, default=SHOWN, help="the largest number of jobs; 0 for all")
        if action == "stream-logs":
            command.add_argument("--tail", type=int, help="print only this many lines of the existing output")
        if action == "stacks":
            add_native(command)
        if action == "profile":
            add_steps(command)
        if action in ("list", "cancel", "wait", "resubmit"):
            add_format(command)
        if action == "cancel":
            command.add_argument(
                "--machine-lost", action="store_true", help="don't wait for the job's machine, which won't come back"
            )
        if action == "clean":
            command.add_argument("--unused-for", default="30d", help="delete only what has been unused for this time")
            command.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
        if action == "describe":
            add_format(command, "yaml")
        commands.add_subcommand(action, command, help=about)


def run(action: str, parsed: Namespace) -> int:
    """Run an action. Returns the exit code.

    Raises:
        FootplateError: there is no such job, or its state doesn't allow the action.
    """
    from footplate.jobs.operations import Jobs

    jobs = Jobs.from_env()
    return _ACTIONS[action](jobs, parsed)


def stream(jobs: Jobs, name: str, tail: int | None = None) -> int:
    """Print a job's output until the job ends. Returns 0 if it succeeded, otherwise 1.

    Args:
        jobs: the jobs of this machine.
        name: the job's name.
        tail: print only this many lines of the existing output.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; the job goes on.
    """
    from footplate.jobs.states import State
    from footplate.jobs.supervision.follow import Line

    state: State | None = None
    attempt = 0
    try:
        for event in jobs.follow(name, tail=tail):
            if not isinstance(event, Line):
                state = event
                print(_one_line(jobs.store.find(name), state), file=sys.stderr, flush=True)
                continue
            if event.attempt != attempt:
                attempt = event.attempt
                if attempt > 1:
                    print(f"--- attempt {attempt} ---", file=sys.stderr, flush=True)
            end = "" if event.text.endswith(("\n", "\r")) else "\n"
            print(f"[{event.source}] {event.text}", end=end, flush=True)
    except KeyboardInterrupt:
        print(f"{name} goes on. Watch it again: footplate jobs stream-logs {name}", file=sys.stderr)
        raise
    return int(state != State.SUCCEEDED)


def _one_line(job: Job, state: State) -> str:
    from footplate.jobs.states import State

    why = f": {job.cause}" if job.cause and job.state == state else ""
    waits = ": waits in the queue" if state == State.QUEUED else ""
    return f"{job.name} is {state}{why or waits}"


def _list(jobs: Jobs, parsed: Namespace) -> int:
    from footplate.cli.formats import aligned
    from footplate.jobs.listing import select

    if parsed.limit < 0:
        raise ConfigError(f"--limit {parsed.limit}: expected the number of jobs to show, or 0 for all.")
    jobs.reconcile()
    rows, count = select(jobs.store, parsed.filter, parsed.sort_by, parsed.limit or None)
    shown = [_row(summary) for summary in rows]
    columns = {"jobId": "job", "state": "state", "createTime": "created", "took": "took", "cause": "cause"}
    table = [
        {**values, "createTime": values["createTime"][5:16], "took": _took(row)}
        for values, row in zip(shown, rows, strict=True)
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    show_as(parsed.format, shown, lambda: aligned(table, columns, width) if shown else "There are no such jobs.")
    if len(rows) < count:
        print(f"{count - len(rows)} more: --limit {count}", file=sys.stderr)
    return 0


def _row(summary: Summary) -> dict[str, Any]:
    return {
        "jobId": summary.name,
        "state": str(summary.state),
        "createTime": _time(summary.created),
        "startTime": _time(summary.started),
        "endTime": _time(summary.ended),
        "attempt": summary.attempt,
        "backend": summary.backend,
        "host": summary.host,
        "priority": summary.priority,
        "labels": json.loads(summary.labels),
        "cause": summary.cause,
    }


def _took(summary: Summary) -> str:
    """The running time of a job, rounded for people."""
    if summary.started is None:
        return ""
    seconds = round((summary.ended or time.time()) - summary.started)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


def _describe(jobs: Jobs, parsed: Namespace) -> int:
    from footplate.core.goodput.text import lines_of
    from footplate.jobs.goodput import job_ledger

    job = jobs.find(parsed.name)
    goodput = job_ledger(jobs.home, jobs.store, job)
    shown = description(jobs, job, goodput)
    show_as(parsed.format, shown, lambda: "\n".join([*_lines(shown), "", *lines_of(goodput)]))
    return 0


def _stacks(jobs: Jobs, parsed: Namespace) -> int:
    from footplate.jobs.questions import processes_of

    print(processes_of(jobs.store, jobs.find(parsed.name), "stacks").stacks(parsed.native), end="")
    return 0


def _profile(jobs: Jobs, parsed: Namespace) -> int:
    from footplate.cli.profile import profile
    from footplate.core.profile_requests import check_steps
    from footplate.jobs.questions import processes_of

    check_steps(parsed.steps)
    processes = processes_of(jobs.store, jobs.find(parsed.name), "profile")
    return profile(lambda: processes.profile(parsed.steps), parsed.name)


def tell(jobs: Jobs, parsed: Namespace, sentence: str) -> None:
    """Print a sentence about a job or, with `--format`, everything about it."""
    show_as(parsed.format, description(jobs, jobs.store.find(parsed.name)), lambda: sentence)


def description(jobs: Jobs, job: Job, goodput: Ledger | None = None) -> dict[str, Any]:
    """A job with its history, as plain values.

    Args:
        jobs: the jobs of this machine.
        job: the job.
        goodput: the job's ledger; None to compute it.
    """
    from footplate.jobs.goodput import job_ledger
    from footplate.jobs.hangs import hangs_of
    from footplate.jobs.tuning.results import training_output

    output = training_output(jobs.store, job)
    goodput = goodput or job_ledger(jobs.home, jobs.store, job)
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
                "time": _time(transition.at),
                "from": str(transition.source) if transition.source else None,
                "to": str(transition.target),
                "attempt": transition.attempt,
                "cause": transition.cause,
            }
            for transition in jobs.store.transitions(job.name)
        ],
        "processes": [
            {
                "attempt": process.attempt,
                "role": process.role,
                "index": process.index,
                "pid": process.pid,
                "began": _time(process.began),
                "ended": _time(process.ended),
                "outcome": process.outcome,
            }
            for process in jobs.store.processes(job.name)
        ],
        "hangs": [
            {"attempt": hang.attempt, "sentence": hang.sentence, "stacks": str(hang.file)}
            for hang in hangs_of(jobs.home, job.name)
        ],
        **({} if output is None else {"trainingOutput": output}),
        "goodput": goodput.to_dict(),
        "spec": {key: value for key, value in job.spec.items() if key != "notices"},
    }


def _lines(shown: dict[str, Any]) -> list[str]:
    """A description for a terminal: the facts, then the trials of a tuning, the history, the processes."""
    from footplate.cli.trials import trial_lines

    facts = [f"{key:<11} {value}" for key, value in shown.items() if value and not isinstance(value, (dict, list))]
    steps = [
        f"  {step['time']}  {step['to']:<11}" + (f" attempt {step['attempt']}" if step["attempt"] else "")
        + (f": {step['cause']}" if step["cause"] else "")
        for step in shown["transitions"]
    ]  # fmt: skip
    ran = [
        f"  attempt {process['attempt']}  {process['role']} {process['index']}: "
        f"{process['outcome'] or 'runs, or was lost'}"
        for process in shown["processes"]
    ]
    hung = [
        line
        for hang in shown["hangs"]
        for line in (f"  attempt {hang['attempt']}  {hang['sentence']}", f"             all stacks: {hang['stacks']}")
    ]
    output = shown.get("trainingOutput")
    tried = [f"  {line}".rstrip() for line in trial_lines(output)] if output else []
    parts = {"trials:": tried, "history:": steps, "processes:": ran, "hangs:": hung}
    return facts + [line for title, lines in parts.items() if lines for line in ("", title, *lines)]


def _stream_logs(jobs: Jobs, parsed: Namespace) -> int:
    if parsed.tail is not None and parsed.tail < 0:
        raise ConfigError(f"--tail {parsed.tail}: expected a number of lines, 0 or more.")
    return stream(jobs, parsed.name, parsed.tail)


def _cancel(jobs: Jobs, parsed: Namespace) -> int:
    tell(jobs, parsed, f"{parsed.name} is {jobs.cancel(parsed.name, parsed.machine_lost)}")
    return 0


def _wait(jobs: Jobs, parsed: Namespace) -> int:
    from footplate.jobs.states import State

    job = jobs.wait(parsed.name)
    tell(jobs, parsed, _one_line(job, job.state))
    return int(job.state != State.SUCCEEDED)


def _delete(jobs: Jobs, parsed: Namespace) -> int:
    jobs.delete(parsed.name)
    print(f"{parsed.name} is deleted. The files in its job directory are still there.")
    return 0


def _resubmit(jobs: Jobs, parsed: Namespace) -> int:
    tell(jobs, parsed, f"{parsed.name} is {jobs.resubmit(parsed.name)}")
    return 0


def _clean(jobs: Jobs, parsed: Namespace) -> int:
    from footplate.jobs.spec.naming import duration, seconds

    try:
        unused_s = seconds(duration(parsed.unused_for))
    except ValueError as error:
        raise ConfigError(f"--unused-for {parsed.unused_for}: {error}.") from None
    wastes = jobs.clean(unused_s, parsed.dry_run)
    for waste in wastes:
        days = waste.unused_s / 86400
        size = f"{waste.nbytes / 2**20:>9.1f} MiB"
        print(f"{waste.kind:<12} {waste.path.name[:20]:<20} {size}, unused for {days:.1f} days")
    verb = "would be deleted" if parsed.dry_run else "deleted"
    print(f"{len(wastes)} {verb}, {sum(waste.nbytes for waste in wastes) / 2**20:.1f} MiB")
    return 0


def _daemon(jobs: Jobs, parsed: Namespace) -> int:
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"supervising the jobs in {jobs.home.root}", flush=True)
    while True:
        try:
            jobs.reconcile()
        except (ConfigError, OSError) as error:
            # The disk is full, or the server can't be reached. The next pass may work.
            print(error, file=sys.stderr, flush=True)
        time.sleep(_EVERY_S)


_ACTIONS: dict[str, Callable[[Jobs, Any], int]] = {
    "list": _list,
    "describe": _describe,
    "stacks": _stacks,
    "profile": _profile,
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
