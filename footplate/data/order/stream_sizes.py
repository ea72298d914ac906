"""Number of streams, size of windows and size of megabatches of a shuffled table, from the sizes of its row groups.

`plan.py` explains streams and windows, `grouping.py` megabatches. The choice doesn't depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

# A table up to this size is one window, so all its rows are permuted together.
WHOLE_TABLE_BYTES = 64 * 2**20
# Row groups that one rank may have open.
STREAMS_BYTES = 256 * 2**20
# The open windows of one rank, where row groups are read whole.
WINDOW_BYTES = 128 * 2**20
# The open windows of one rank, where row groups are read piece by piece.
CUT_WINDOW_BYTES = 48 * 2**20
# An open row group takes some memory too, so smaller windows than this would gain nothing.
LEAST_CUT_BYTES = 8 * 2**20
MAX_STREAMS = 64
# Of more batches, the lengths in each would be a little closer, and the order a little less random. HF Trainer has 50, too.
MEGABATCH = 50
# So that grouping gains something, even if a batch is large.
LEAST_MEGABATCH = 8
# With fewer, the batches of a small table would have almost the same rows in every epoch.
LEAST_MEGABATCHES = 4
GROUPS_PER_STREAM = 10


def choose_streams(
    group_bytes: Sequence[int], in_memory: bool = False, most_streams: int = MAX_STREAMS, tables: int = 1
) -> tuple[int, int]:
    """Choose the number of streams, and the number of row groups in a window, of a shuffled table.

    With few streams, a single rank needs little memory, since it has a row group of each stream open. With many streams,
    many ranks can read apart from each other. A row group that is cut between two streams is read twice. With at least
    `GROUPS_PER_STREAM` row groups in a stream, this costs a tenth at most.

    Args:
        group_bytes: the size of each row group.
        in_memory: True for a table in memory, which is one window.
        most_streams: the largest number of streams.
        tables: how many tables are read at once. They share the memory of one.
    """
    total = sum(group_bytes)
    if in_memory or total <= WHOLE_TABLE_BYTES // tables:
        return 1, max(1, len(group_bytes))
    mean = max(1, total // len(group_bytes))
    most = min(most_streams, len(group_bytes) // GROUPS_PER_STREAM, STREAMS_BYTES // tables // mean)
    # A power of two.
    streams = 1 << (max(1, most).bit_length() - 1)
    return streams, max(1, WINDOW_BYTES // tables // (streams * mean))


def choose_window_rows(group_bytes: Sequence[int], rows: int, streams: int) -> int:
    """Choose `Order.window_rows` for row groups that are read piece by piece.

    The open windows of a single rank then take `CUT_WINDOW_BYTES`, if there are few streams, but each at least
    `LEAST_CUT_BYTES`.

    Args:
        group_bytes: the size of each row group.
        rows: the number of rows of all row groups.
        streams: the number of streams.
    """
    row_bytes = max(1, sum(group_bytes) // max(1, rows))
    return max(1, max(CUT_WINDOW_BYTES // streams, LEAST_CUT_BYTES) // row_bytes)


def choose_megabatch(group_bytes: Sequence[int], rows: int, batch_size: int) -> int:
    """Choose how many global batches are sorted by length together. Their rows take `WINDOW_BYTES`, if a batch isn't large.

    Args:
        group_bytes: the size of each row group.
        rows: the number of rows of all row groups.
        batch_size: rows of a global batch.
    """
    row_bytes = max(1, sum(group_bytes) // max(1, rows))
    fitting = max(LEAST_MEGABATCH, WINDOW_BYTES // (batch_size * row_bytes))
    return max(1, min(MEGABATCH, fitting, rows // batch_size // LEAST_MEGABATCHES))
