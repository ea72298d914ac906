"""Batches of documents of similar length: how much of them is padding, and what that costs a training and a loader.

    python benchmarks/group_by_length.py --json benchmarks/results/group_by_length.json

The lengths of the documents are log-normal, from 1 to 1,024 tokens, with a median of 150. Batches have 16 documents. The
entrants are a shuffled loader, and the same with `group_by_length`. Both are measured twice:

- *Training*: a transformer of two layers is trained for one pass over 2,000 documents in memory, in one thread. The rate
  counts tokens without padding, by processor time.
- *Loading*: one pass over Parquet files of 100,000 documents, without a model. The time of a document includes reading
  the lengths.

Then the orders of a table of 700 row groups are computed for 8 ranks, without reading anything. The figure is how many rows
all ranks read in an epoch, for each row of the table.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from common import LESS, MORE, QUICK_ROUNDS, Figures, arguments, interleave, machine, median, ratio, report

import footplate as fp
from footplate.data.order.grouping import GroupedEpoch
from footplate.data.order.plan import Epoch, Order
from footplate.data.order.stream_sizes import choose_megabatch, choose_streams

BATCH, LONGEST, WORDS, WIDTH = 16, 1024, 1000, 64
TRAINED, LOADED, ROUNDS = 2_000, 100_000, 5
ENTRANTS = {"shuffled": None, "grouped by length": "tokens"}
GROUPS, QUICK_GROUPS, ROWS_PER_GROUP, RANKS, RANK_ROWS = 700, 50, 2_000, 8, 32


def draw_lengths(count: int) -> np.ndarray:
    """The lengths of some documents, (count,) int32."""
    return np.clip(np.random.default_rng(0).lognormal(np.log(150), 0.8, count), 1, LONGEST).astype(np.int32)


def documents(count: int) -> pa.Table:
    """Documents of random tokens."""
    lengths = draw_lengths(count)
    tokens = np.random.default_rng(1).integers(1, WORDS, lengths.sum(), np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))})


class Reader(torch.nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the targets that aren't padding."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        hidden = self.layers(self.words(tokens[:, :-1]), mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def train(table: fp.Table, column: str | None) -> Figures:
    """Train for one pass. Return the share of padding, and tokens a processor second."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = places = 0
    began = time.process_time()
    for batch in fp.Loader(table, BATCH, shuffle=True, group_by_length=column):
        model(batch["tokens"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += int(batch["tokens_length"].sum())
        places += batch["tokens"].numel()
    cpu_s = time.process_time() - began
    return {"padding": 1 - tokens / places, "tokens_per_cpu_s": tokens / cpu_s}


def load(directory: Path, column: str | None) -> Figures:
    """Load one pass. Return the processor time of a document."""
    began, rows = time.process_time(), 0
    for batch in fp.Loader(fp.Table(directory), BATCH, shuffle=True, group_by_length=column):
        rows += len(batch["tokens"])
    return {"load_us": 1e6 * (time.process_time() - began) / rows}


def rows_read(lengths: np.ndarray) -> dict[str, float]:
    """Rows that all ranks read in an epoch, for each row of the table, without grouping and with it."""
    sizes = np.full(len(lengths) // ROWS_PER_GROUP, ROWS_PER_GROUP)
    group_bytes = [ROWS_PER_GROUP * 4 * int(lengths.mean())] * len(sizes)
    streams, window = choose_streams(group_bytes)
    order = Order(RANKS * RANK_ROWS, 0, True, streams=streams, window=window)
    megabatch = choose_megabatch(group_bytes, len(lengths), order.batch_size)
    orders = {"shuffled": Epoch(sizes, order, 1), "grouped": GroupedEpoch(sizes, order, 1, lengths, megabatch)}
    read = {}
    for name, epoch in orders.items():
        windows = [
            {part.window for batch in range(epoch.num_batches()) for part in epoch.window_slices(batch, rank, RANKS)}
            for rank in range(RANKS)
        ]
        read[name] = sum(epoch.window_rows(window) for of_rank in windows for window in of_rank) / len(lengths)
    return read


def main() -> None:
    options = arguments(__doc__ or "")
    trained, loaded, rounds = (64, 1_000, QUICK_ROUNDS) if options.quick else (TRAINED, LOADED, ROUNDS)
    torch.set_num_threads(1)
    host = machine()
    with tempfile.TemporaryDirectory() as directory:
        pq.write_table(documents(loaded), Path(directory, "documents.parquet"), row_group_size=ROWS_PER_GROUP)
        table = fp.Table(documents(trained))
        results = interleave(
            list(ENTRANTS), lambda name: train(table, ENTRANTS[name]) | load(Path(directory), ENTRANTS[name]), rounds
        )
    columns = {
        "padding": "padding share",
        "tokens_per_cpu_s": "tokens per processor second",
        "load_us": "processor µs to load a document",
    }
    rows = [
        {"name": name, **{figure: median(runs, figure) for figure in columns}, "rounds": runs}
        for name, runs in results.items()
    ]
    shuffled, grouped = ENTRANTS
    ratios = {
        "grouped_vs_shuffled_training": ratio(
            results, grouped, shuffled, "tokens_per_cpu_s", f"tokens of a training per processor second, {MORE}"
        ),
        "grouped_vs_shuffled_loading": ratio(
            results, grouped, shuffled, "load_us", f"processor time to load a document, {LESS}"
        ),
    }
    mixed = draw_lengths((QUICK_GROUPS if options.quick else GROUPS) * ROWS_PER_GROUP)
    figures = {"rows_read": {"any row group": rows_read(mixed), "sorted by length": rows_read(np.sort(mixed))}}
    for kind, read in figures["rows_read"].items():
        print(f"rows read by {RANKS} ranks, {kind}: {read['shuffled']:.2f} shuffled, {read['grouped']:.2f} grouped")
    packages = ("footplate", "torch", "pyarrow", "numpy")
    report("group_by_length", "Grouping by length", columns, rows, ratios, figures, host, packages, options.json)


if __name__ == "__main__":
    main()
