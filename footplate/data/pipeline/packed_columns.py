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

    Attributes:
        items: for each column, the tokens of each chunk.
        chunk: the chunk of each sequence, (sequences,) int64.
        start: where its tokens begin in the chunk, (sequences,) int64.
        length: the number of its tokens, (sequences,) int64.
        first_piece: the number of its first piece, (sequences,) int64.
        pieces: the number of its pieces, (sequences,) int64.
        piece_length: the number of tokens of every piece of the window, (pieces,) int64.
    """

    items: list[list[np.ndarray]]
    chunk: np.ndarray
    start: np.ndarray
    length: np.ndarray
    first_piece: np.ndarray
    pieces: np.ndarray
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
        items = [self._items(name, column) for name, column in zip(self.names, values, strict=True)]
        chunk, start, length, first, pieces = rows if order is None else rows[:, order]
        return Sequences(items, chunk, start, length, first, pieces, np.concatenate(piece_lengths))

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

    def _number(
        self, sequences: Sequences, start: int, stop: int, document_ids: np.ndarray, position_ids: np.ndarray
    ) -> None:
        """Write the ids of some sequences into two arrays of shape (rows, sequence length)."""
        # The padding of a sequence counts as one more piece, whose number is 0.
        pieces = sequences.pieces[start:stop] + 1
        ends = np.cumsum(pieces)
        # number: (pieces,), of each piece in its sequence, from 1
        number = np.arange(1, ends[-1] + 1) - np.repeat(ends - pieces, pieces)
        number[ends - 1] = 0
        length = np.empty(len(number), np.int64)
        length[ends - 1] = self.packing.sequence_length - sequences.length[start:stop]
        is_document = number > 0
        first = np.repeat(sequences.first_piece[start:stop], pieces - 1)
        length[is_document] = sequences.piece_length[first + number[is_document] - 1]

        document_ids.reshape(-1)[:] = np.repeat(number, length)
        # begin: (pieces,), the place of each piece among all tokens of these sequences
        begin = np.cumsum(length) - length
        np.subtract(np.arange(position_ids.size), np.repeat(begin, length), out=position_ids.reshape(-1))
