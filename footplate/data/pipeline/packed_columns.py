"""The columns of packed sequences in a batch of n sequences of length L.

| value | what it is |
| --- | --- |
| a column | tensor (n, L): the pieces of documents one after another, then the padding value. Integers become int64 |
| `document_ids` | int64 (n, L): the number of a token's document in its sequence, from 1; 0 is padding |
| `position_ids` | int64 (n, L): the place of a token in its document, or in its piece, from 0. Padding counts, too |

All columns of a table are one block, since they have the same pieces. Tokens are copied once, into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from footplate.data.packing.source import Packing
from footplate.data.packing.table import ID_COLUMNS
from footplate.data.pipeline.buffers import Buffers
from footplate.data.pipeline.columns import BlockSlice, Columns, refuse_null_items, refuse_too_large, to_numpy


@dataclass(frozen=True)
class Sequences:
    """The sequences of a window, in the order in which they are handed out.

    Its pieces are in that order, too. The padding of a sequence is its last piece, and may be empty.

    Attributes:
        items: for each column, the tokens of each chunk.
        chunk: the chunk of each sequence, (sequences,) int64.
        start: where its tokens begin in the chunk, (sequences,) int64.
        length: the number of its tokens, (sequences,) int64.
        first_piece: where the pieces of each sequence begin, and where those of the last one end, (sequences + 1,) int64.
        piece_number: the number of each piece in its sequence, from 1; 0 for padding, (pieces,) int32.
        piece_begin: where each piece begins in its sequence, (pieces,) int32.
        piece_length: the number of its tokens, (pieces,) int64.
    """

    items: list[list[np.ndarray]]
    chunk: np.ndarray
    start: np.ndarray
    length: np.ndarray
    first_piece: np.ndarray
    piece_number: np.ndarray
    piece_begin: np.ndarray
    piece_length: np.ndarray


@dataclass(frozen=True)
class PackedColumns(Columns):
    """All columns of a packed table.

    Attributes:
        names: the names of the columns.
        packing: how documents became sequences.
    """

    packing: Packing

    def load(self, values: Sequence[pa.ChunkedArray], order: np.ndarray | None, buffers: Buffers) -> Sequences:
        """Return the pieces of the sequences, without a copy of their tokens."""
        parts: list[np.ndarray] = []
        piece_lengths = [np.zeros(0, np.int64)]
        first_piece = 0
        for number, chunk in enumerate(values[0].chunks):
            # edges: (sequences + 1,), in pieces; offsets: (pieces + 1,), in tokens
            edges = chunk.offsets.to_numpy().astype(np.int64)
            offsets = chunk.values.offsets.to_numpy().astype(np.int64)
            start, stop = offsets[edges[:-1]], offsets[edges[1:]]
            chunks = np.full(len(start), number)
            parts.append(np.stack([chunks, start, stop - start, edges[:-1] + first_piece, np.diff(edges)]))
            piece_lengths.append(np.diff(offsets))
            first_piece += len(piece_lengths[-1])

        # rows: (5, sequences): chunk, start, length, first piece, pieces
        rows = np.concatenate([np.zeros((5, 0), np.int64), *parts], axis=1)
        chunk, start, length, first, pieces = rows if order is None else rows[:, order]
        items = [self._items(name, column) for name, column in zip(self.names, values, strict=True)]
        return Sequences(
            items, chunk, start, length, *self._pieces(length, first, pieces, np.concatenate(piece_lengths))
        )

    def collate(self, slices: Sequence[BlockSlice], buffers: Buffers) -> dict[str, torch.Tensor]:
        """Return padded tensors, and the ids of documents and positions."""
        rows = sum(stop - start for _, start, stop in slices)
        shape = rows, self.packing.sequence_length
        kinds = [items[0].dtype for items in slices[0][0].items]
        integers = [name for name, kind in zip(self.names, kinds, strict=True) if kind.kind in "iu"]

        # All integers share one array, as other columns of one type do.
        shared = buffers.tensor((len(integers) + len(ID_COLUMNS), *shape), np.int64)
        tensors = dict(zip((*integers, *ID_COLUMNS), shared.unbind(), strict=True))
        batch: dict[str, torch.Tensor] = {}
        for number, (name, kind) in enumerate(zip(self.names, kinds, strict=True)):
            batch[name] = tensors[name] if name in tensors else buffers.tensor(shape, kind)
            self._fill(number, slices, batch[name].numpy(), self.packing.padding_value[name])

        batch |= {name: tensors[name] for name in ID_COLUMNS}
        document_ids, position_ids = (batch[name].numpy() for name in ID_COLUMNS)
        first = 0
        for sequences, start, stop in slices:
            last = first + stop - start
            self._number(sequences, start, stop, document_ids[first:last], position_ids[first:last])
            first = last
        return batch

    def _items(self, name: str, column: pa.ChunkedArray) -> list[np.ndarray]:
        """Return the tokens of each chunk of a column."""
        chunks = []
        for chunk in column.chunks:
            tokens = chunk.values.values
            refuse_null_items(name, tokens)
            chunks.append(to_numpy(tokens))
            refuse_too_large(name, chunks[-1])
        return chunks

    def _fill(self, column: int, slices: Sequence[BlockSlice], out: np.ndarray, padding: float) -> None:
        """Write the tokens of a column into `out`, (rows, sequence length)."""
        row = 0
        for sequences, start, stop in slices:
            items = sequences.items[column]
            places = (values[start:stop].tolist() for values in (sequences.chunk, sequences.start, sequences.length))
            for chunk, begin, length in zip(*places, strict=True):
                out[row, :length] = items[chunk][begin : begin + length]
                out[row, length:] = padding
                row += 1

    def _pieces(
        self, length: np.ndarray, first: np.ndarray, pieces: np.ndarray, stored: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return `first_piece`, `piece_number`, `piece_begin` and `piece_length` of sequences.

        Args:
            length: the number of tokens of each sequence, (sequences,).
            first: the number of its first piece among the stored pieces, (sequences,).
            pieces: the number of its pieces, (sequences,).
            stored: the number of tokens of each piece as it is stored, without padding.
        """
        size = self.packing.sequence_length
        first_piece = np.concatenate([[0], np.cumsum(pieces + 1)])
        padding = first_piece[1:] - 1
        # number: (pieces,), from 1
        number = np.arange(1, first_piece[-1] + 1) - np.repeat(first_piece[:-1], pieces + 1)
        number[padding] = 0

        is_document = number > 0
        piece_length = np.empty(len(number), np.int64)
        piece_length[padding] = size - length
        piece_length[is_document] = stored[np.repeat(first, pieces) + number[is_document] - 1]

        # All sequences before a piece are full of pieces, since padding counts.
        begin = np.cumsum(piece_length) - piece_length - np.repeat(size * np.arange(len(length)), pieces + 1)
        return first_piece, number.astype(np.int32), begin.astype(np.int32), piece_length

    def _number(
        self, sequences: Sequences, start: int, stop: int, document_ids: np.ndarray, position_ids: np.ndarray
    ) -> None:
        """Write the ids of some sequences into two arrays of shape (rows, sequence length)."""
        pieces = slice(sequences.first_piece[start], sequences.first_piece[stop])
        length = sequences.piece_length[pieces]
        document_ids[:] = np.repeat(sequences.piece_number[pieces], length).reshape(document_ids.shape)
        begin = np.repeat(sequences.piece_begin[pieces], length).reshape(position_ids.shape)
        np.subtract(np.arange(self.packing.sequence_length, dtype=np.int32), begin, out=position_ids)
