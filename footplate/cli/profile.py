"""`footplate profile PID | DIR`: profile the next steps of a training that runs on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.stacks import process_of
from footplate.core.errors import ConfigError
from footplate.core.profile_requests import (
    ProfileStatus,
    RunningProfile,
    check_steps,
    request_profile,
    wait_for_profile,
)
from footplate.core.stacks.asking import root_of

_TOLD = {
    "waiting": "waits for the next step",
    "recording": "records",
    "writing": "writes the files",
}


def parser(name: str) -> Parser:
    """Make the parser."""
    made = make_parser(
        name,
        "Profile the next steps of a running training, on all its ranks. The training goes on, and is as fast as before "
        "afterwards. The files are in profile-STEP in the run's directory. Ctrl-C ends this command, not the profile.",
    )
    made.add_argument("training", help="the id of a process, or a run's directory (default_root_dir)")
    add_steps(made)
    return made


def add_steps(made: Parser) -> None:
    """Add the option for the number of steps."""
    made.add_argument("--steps", type=int, default=10, help="how many steps to record; the default is 10")


def run(name: str, argv: Sequence[str]) -> int:
    """Profile a training, and print the summary. Returns 1 if there is no profile.

    Raises:
        ConfigError: there is no such process, it isn't this user's, or it doesn't train; the number of steps is wrong.
    """
    args = parser(name).parse_args(argv)
    check_steps(args.steps)
    process = root_of(process_of(args.training, "profile"))
    return profile(lambda: request_profile([process], args.steps), args.training)


def profile(request: Callable[[], RunningProfile], subject: str) -> int:
    """Profile a training, and print the summary. Returns 1 if there is no profile.

    Args:
        request: asks the training for the profile.
        subject: the training, in messages.

    Raises:
        ConfigError: the training can't be asked.
    """
    try:
        running = request()
    except ConfigError as error:
        raise type(error)(f"{subject}: {error}") from None

    def tell(status: ProfileStatus) -> None:
        if status.state in _TOLD:
            print(f"{subject} at step {running.step}: {_TOLD[status.state]} …", file=sys.stderr, flush=True)

    status = wait_for_profile(running, tell)
    if status.state != "done":
        print(f"{subject}: no profile was made: {status.error or 'the request was lost'}.", file=sys.stderr)
        return 1
    print(status.summary)
    return 0
