"""`footplate verify RUN --from A --to B`: train a stretch of a run again, and compare its states with the checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format, show_as

if TYPE_CHECKING:
    from footplate.replaying.verify import Verification

_SHOWN = 5


def parser(name: str) -> Parser:
    """Make the parser of `verify`."""
    parser = make_parser(
        name,
        "Train a stretch of a run of `footplate fit` again, and name the first checkpoint whose state differs. Start it "
        "where the run was started. The run's directory stays as it is. The exit code is 1 if a state differs.",
    )
    parser.add_argument("run", help="the directory of a run; a path or a URI")
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        help="begin from the newest checkpoint at or before this step; 0 begins with new weights; by default begin from "
        "the oldest checkpoint, or with new weights if the run has only one checkpoint",
    )
    parser.add_argument("--to", dest="last", type=int, help="compare the checkpoints up to this step; by default all")
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Verify the stretch; returns 1 if a state differs, else 0.

    Raises:
        FootplateError: a mistake in the arguments; the run can't be rebuilt, or there is nothing to compare.
    """
    args = parser(name).parse_args(argv)

    from footplate.replaying.verify import verify

    # What the program of the run prints doesn't belong to JSON or YAML.
    with contextlib.nullcontext() if args.format == "table" else contextlib.redirect_stdout(sys.stderr):
        verification = verify(args.run, args.first, args.last)
    show_as(args.format, {**asdict(verification), "steps": verification.steps}, lambda: describe(verification))
    return int(verification.difference is not None)


def describe(verification: Verification) -> str:
    """Describe the result, a line for each checkpoint, and the steps of a difference."""
    begin = "the beginning of the run" if verification.checkpoint is None else verification.checkpoint
    lines = [f"trained again from {begin}"]
    lines += [
        f"step {checkpoint.step:,}: {'same' if checkpoint.same else 'DIFFERS'}  {checkpoint.path}"
        for checkpoint in verification.compared
    ]
    lines += [f"not compared: {path}" for path in verification.skipped]
    if verification.difference is None or verification.steps is None:
        return "\n".join([*lines, "All states are the same."])

    names = verification.difference.differing
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    what = ", ".join(names[:_SHOWN]) + more if names else "plain values, such as a learning rate"
    first, last = verification.steps
    steps = f"in step {last:,}" if first == last else f"in one of the steps {first:,} to {last:,}"
    return "\n".join([*lines, f"The states diverge {steps}. Different: {what}."])
