"""Packing of documents into sequences of a fixed length, as a pure function of the documents' lengths.

Best fit, longest first: each document goes to the fullest sequence that has room for it, or begins a new one.

    lengths 5 3 8 2 6 1, sequences of 8       [5 3] [8] [2 6] [1]       7 of 32 places are padding

A document that is longer than a sequence is cut into *pieces*: full sequences, and a rest that is packed like a document.
With `truncate`, only its first piece is kept. An empty document has no piece.

The sequences are in the order of their first documents, and so are the documents in a sequence. So an order that isn't
shuffled stays close to that of the table.

The documents of one *unit* (some neighbouring row groups) are packed together. The number of sequences of a unit depends on
nothing but its documents. So it is the same in every epoch and on every rank, and any sequence can be made from its unit
alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The size of a unit. The last sequences of a unit are seldom full. Among this many sequences, they cost little.
_LEAST_SEQUENCES = 64
_LEAST_BYTES = 4 * 2**20
_TOKEN_BYTES = 4

# Room of a sequence and its number, in one integer: the room in the upper bits.
_NUMBER_BITS = 40


@dataclass(frozen=True)
class PackPlan:
    """Sequences made of pieces of documents. The pieces of a sequence follow one another.

    Attributes:
        document: the document of each piece, (pieces,) int64.
        start: where each piece begins in its document, (pieces,) int64.
        length: the number of its tokens, (pieces,) int64.
        first_piece: where the pieces of each sequence begin, and where those of the last one end, (sequences + 1,) int64.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    first_piece: np.ndarray

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.first_piece) - 1


def plan_packing(lengths: np.ndarray, sequence_length: int, truncate: bool = False) -> PackPlan:
    """Pack documents into sequences.

    Args:
        lengths: the number of tokens of each document, (documents,) int64.
        sequence_length: the number of tokens of a sequence.
        truncate: keep only the first `sequence_length` tokens of a document.
    """
    document, start, length = _cut(np.asarray(lengths, np.int64), sequence_length, truncate)
    # sequence: (pieces,), in the order in which they were begun
    sequence = _best_fit(length, sequence_length)

    # first_use: (sequences,), the first piece of each sequence; pieces are in the order of their documents
    count = int(sequence.max(initial=-1)) + 1
    first_use = np.full(count, len(sequence))
    np.minimum.at(first_use, sequence, np.arange(len(sequence)))
    place = np.empty(count, np.int64)
    place[np.argsort(first_use)] = np.arange(count)
    sequence = place[sequence]

    order = np.argsort(sequence, kind="stable")
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(sequence, minlength=count))])
    return PackPlan(document[order], start[order], length[order], first_piece)


def gather_units(group_bytes: Sequence[int], sequence_length: int) -> np.ndarray:
    """Return where units of neighbouring row groups begin and end, (units + 1,) int64.

    A unit has at least 4 MiB of tokens and fills at least 64 sequences, unless the table is smaller. So the few sequences
    that aren't full are a small share of it. A row group that is large enough ends its unit.

    Args:
        group_bytes: the size of the documents of each row group.
        sequence_length: the number of tokens of a sequence.
    """
    least = max(_LEAST_BYTES, _LEAST_SEQUENCES * _TOKEN_BYTES * sequence_length)
    edges, size = [0], 0
    for number, nbytes in enumerate(group_bytes, 1):
        size += nbytes
        if size >= least:
            edges.append(number)
            size = 0
    # Row groups that are too few for a unit join the unit before them.
    if edges[-1] < len(group_bytes):
        edges[len(edges) - 1 if len(edges) > 1 else 1 :] = [len(group_bytes)]
    return np.array(edges, np.int64)


def _cut(lengths: np.ndarray, longest: int, truncate: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return document, start and length of each piece, in the order of the documents."""
    counts = np.minimum(lengths, 1) if truncate else -(-lengths // longest)
    document = np.repeat(np.arange(len(lengths)), counts)
    # number: (pieces,), of each piece within its document
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * longest
    return document, start, np.minimum(lengths[document] - start, longest)


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the sequence of each piece, (pieces,) int64.

    Pieces of equal length are placed together. A sequence with room for several of them takes them one after another: after
    each, it is the fullest one that has room for the next.
    """
    full = int(np.count_nonzero(lengths == capacity))
    longest_first = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(-lengths[longest_first[full:]], return_counts=True)

    # rooms: sequences with room, ascending. The first one from `length << _NUMBER_BITS` on fits best.
    rooms: list[int] = []
    # A sequence that is chosen, and how many of the following pieces it takes.
    chosen: list[int] = []
    taken: list[int] = []
    begun = full
    mask = (1 << _NUMBER_BITS) - 1
    for length, count in zip((-distinct).tolist(), counts.tolist(), strict=True):
        least = length << _NUMBER_BITS
        while count:
            at = bisect_left(rooms, least)
            if at == len(rooms):
                room = (capacity << _NUMBER_BITS) | begun
                begun += 1
            else:
                room = rooms.pop(at)
            fitting = min(count, room // least)
            chosen.append(room & mask)
            taken.append(fitting)
            count -= fitting
            room -= fitting * least
            if room > mask:
                insort(rooms, room)

    sequence = np.empty(len(lengths), np.int64)
    sequence[longest_first[:full]] = np.arange(full)
    sequence[longest_first[full:]] = np.repeat(np.array(chosen, np.int64), taken)
    return sequence
