"""Groups of records that a tracker's client delivers together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from footplate.tracking.event_queue import Record


def batched(records: Iterable[tuple[Record, int]], most_values: int) -> Iterator[tuple[list[Record], int]]:
    """Group records, with the position after each group: metrics in groups, all other records singly.

    Args:
        records: records with the positions after them.
        most_values: a group ends with the record in which it reaches this number of values.
    """
    group: list[Record] = []
    values = 0
    end = 0
    for record, position in records:
        is_metrics = record["kind"] == "metrics"
        if group and (not is_metrics or values >= most_values):
            yield group, end
            group, values = [], 0
        if is_metrics:
            group.append(record)
            values += len(record["values"])
        else:
            yield [record], position
        end = position
    if group:
        yield group, end
