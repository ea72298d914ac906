"""The trials of a tuning as a table, for `footplate jobs describe` and `footplate tune`."""

from __future__ import annotations

from typing import Any

from footplate.cli.formats import aligned


def trial_lines(output: dict[str, Any], width: int | None = None) -> list[str]:
    """The trials, the best first, and a line about the best.

    Args:
        output: the results of a tuning, as `Tuning.to_dict` makes them.
        width: lines are cut at this width; None cuts none.
    """
    from footplate.jobs.tuning.results import summary, trial_table

    columns, rows = trial_table(output)
    table = aligned(rows, columns, width).splitlines() if rows else ["no trial has begun"]
    return [*table, "", *summary(output).splitlines()]
