"""`footplate goodput RUN`: show how much of a run's time trained, and the causes of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format, show_as
from footplate.core.errors import ConfigError


def parser(name: str) -> Parser:
    """Make the parser of `goodput`."""
    parser = make_parser(
        name,
        "Show the time of a run by cause: training, waiting for input, checkpoints, validation, start-up, steps that were "
        "lost and trained again, pauses between attempts. `footplate jobs describe` shows the same for a job, with its "
        "time in the queue.",
    )
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("--last", help="show only the goodput of the latest time, such as 30m or 2h")
    parser.add_argument("--machine", help="a machine type of the catalog, for the price: n1-standard-8")
    parser.add_argument("--usd-per-hour", type=float, help="the price of all machines together, instead of --machine")
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Show the goodput; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; the directory has no record of a training.
    """
    from footplate.core.goodput import goodput
    from footplate.core.goodput.text import lines_of

    args = parser(name).parse_args(argv)
    usd_per_hour, machine = _price(args.machine, args.usd_per_hour)
    result = goodput(args.run, usd_per_hour, machine)
    if args.last is not None:
        share = result.goodput_of_last(_seconds(args.last))
        show_as(args.format, {"goodput": share}, lambda: _last(args.last, share))
    else:
        show_as(args.format, result.to_dict(), lambda: "\n".join(lines_of(result)))
    return 0


def _price(machine: str | None, usd_per_hour: float | None) -> tuple[float | None, str]:
    if machine is None or usd_per_hour is not None:
        if machine is not None:
            raise ConfigError("--machine and --usd-per-hour: give one of them.")
        if usd_per_hour is not None and not 0 <= usd_per_hour < float("inf"):
            raise ConfigError(f"--usd-per-hour {usd_per_hour:g}: expected a price, 0 or more.")
        return usd_per_hour, ""
    from footplate.catalog.lookup import find_machine
    from footplate.catalog.prices import price_of_machine

    row = find_machine(machine)
    price = price_of_machine(row)
    if price is None:
        raise ConfigError(f"--machine {machine}: the catalog has no price for it. Use --usd-per-hour.")
    return price, f"1 {row.name}, by the list price in us-central1"


def _seconds(text: str) -> float:
    from footplate.jobs.spec.naming import duration, seconds

    try:
        return seconds(duration(text))
    except ValueError as error:
        raise ConfigError(f"--last {text}: {error}.") from None


def _last(text: str, share: float | None) -> str:
    return f"goodput of the last {text}: " + ("unknown" if share is None else f"{share:.1%}")
