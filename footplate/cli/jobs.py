"""`footplate jobs ACTION …`: the actions. Each has its own file, except those that watch jobs.

jobs_submit.py       submit training
jobs_local_train.py  local-train
jobs_check.py        check
translate.py         translate
jobs_watch.py        list, describe, stacks, profile, stream-logs, cancel, wait, delete, resubmit, clean, daemon
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from footplate.cli import jobs_check, jobs_local_train, jobs_submit, jobs_watch, translate
from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError
from footplate.jobs.supervision import prestart

if TYPE_CHECKING:
    from argparse import Namespace


def parser(name: str) -> Parser:
    """Make the parser of `jobs`, without its actions."""
    return make_parser(name, "Submit training jobs, and check their configuration.")


def add_actions(command: Any, only: str | None = None) -> None:
    """Add the actions to the parser. `only` names the one that is needed, if making all would take too long."""
    commands = command.add_subcommands(dest="action")
    submit = commands.add_subcommand("submit", make_parser("jobs submit", "Submit a job."), help="submit a job")
    commands.add_subcommand("check", jobs_check.parser(), help="check a job's config.yaml")
    commands.add_subcommand(
        "local-train", jobs_local_train.parser(), help="run a job's program on this machine, in the foreground"
    )
    if only in (None, "translate"):
        commands.add_subcommand("translate", translate.parser(), help="translate a job for another system")
    jobs_watch.add_to(commands, only)
    if only in (None, "submit"):
        submit.add_subcommands(dest="kind").add_subcommand("training", jobs_submit.parser(), help="a training job")


def run(name: str, argv: Sequence[str]) -> int:
    """Run an action. Returns 1 if a checked file has problems, or if the job that it waited for failed.

    Raises:
        FootplateError: the arguments are wrong, or the job can't be submitted as it is.
    """
    command = parser(name)
    end = list(argv).index("--") if "--" in argv else len(argv)
    ours, args = list(argv[:end]), list(argv[end + 1 :])
    add_actions(command, ours[0] if ours and ours[0] in ("submit", "translate", *jobs_watch.ACTIONS) else None)
    if ours[:2] == ["submit", "training"]:
        jobs_submit.refuse_unknown_options(ours[2:])
    elif args and ours[:1] not in (["translate"], ["local-train"]):
        raise ConfigError(
            f'-- {" ".join(args)}: only "jobs submit training" and "jobs local-train" pass arguments to a program.'
        )
    # The supervisor's process starts now, and imports its modules while the job is read and checked.
    submits = ours[:2] == ["submit", "training"] and not {"--dry-run", "--help", "-h"}.intersection(ours)
    with prestart.prestarted() if submits else contextlib.nullcontext():
        return _do(command.parse_args(ours), args)


def _do(parsed: Namespace, args: list[str]) -> int:
    if parsed.action == "translate":
        return translate.run(parsed, args)
    if parsed.action == "local-train":
        return jobs_local_train.run(parsed, args)
    if parsed.action == "check":
        return jobs_check.run(parsed)
    if parsed.action == "submit":
        return jobs_submit.run(parsed, args)
    return jobs_watch.run(parsed.action, parsed)
