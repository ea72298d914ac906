"""Lists of tokens from Parquet to shuffled, padded batches: Footplate, its peers, and the limit that reading sets.

    bash benchmarks/peers/data.sh && python benchmarks/data_tokens.py --json benchmarks/results/data_tokens.json

200,000 documents of 50 to 1,000 int32 tokens, batches of 32, two threads or worker processes. The limit is pyarrow reading
all row groups with two threads; the batches, padded, and of int64 as an embedding takes them, are about four times as
large as what is read. `data_common.py` says how to take it in pieces.
"""

from __future__ import annotations

from pathlib import Path

import common
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_common import (
    Entrant,
    best,
    chosen,
    complete,
    data_directory,
    earlier,
    measure,
    merged,
    next_round,
    paired,
    parse,
    peers_formats,
    report,
)

BATCH = 32
FILES = 10
ROWS_PER_GROUP = 2000
KIND = "documents"

FOOTPLATE = Entrant("footplate", "tokens_footplate")
LIMIT = Entrant("limit: read only", "tokens_limit")
PEERS = [
    Entrant("hf datasets, map", "tokens_hf_map", "data"),
    Entrant("hf datasets, streaming", "tokens_hf_streaming", "data"),
    Entrant("lance", "tokens_lance", "lake"),
]


def make(directory: Path, rows: int) -> None:
    """The Parquet files, and the same as the peers have it."""
    rng = np.random.default_rng(0)
    (directory / "parquet").mkdir()
    for number in range(FILES):
        lengths = rng.integers(50, 1000, rows // FILES)
        tokens = pa.array(rng.integers(0, 50_000, lengths.sum()).astype(np.int32))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(offsets, tokens)})
        pq.write_table(table, directory / "parquet" / f"{number:03}.parquet", row_group_size=ROWS_PER_GROUP)
    peers_formats(directory, {"hf": "data", "lance": "lake"})
    (directory / "complete").touch()


def main() -> None:
    options = parse(__doc__ or "", [KIND])
    machine = common.machine()
    found = earlier(options.json, options.add)
    before = found.get(KIND, {})
    with data_directory(options.data) as root:
        directory = root / KIND
        if not complete(directory):
            make(directory, options.rows or (20_000 if options.quick else 200_000))
        entrants = chosen([LIMIT, FOOTPLATE, *PEERS], options.only)
        more = measure(entrants, directory, BATCH, options.rounds, options.seconds, next_round(before))
    rounds = merged(before, more)
    fastest = best(rounds, PEERS, "whole")
    first = best(rounds, PEERS, "first_batch_s", least=True)
    ratios = {
        "footplate_vs_limit": paired(rounds, FOOTPLATE.name, LIMIT.name, "steady"),
        "footplate_vs_best_peer": paired(rounds, FOOTPLATE.name, fastest, "whole"),
        "first_batch_vs_best_peer": paired(rounds, FOOTPLATE.name, first, "first_batch_s"),
    }
    peers = {"footplate_vs_best_peer": fastest, "first_batch_vs_best_peer": first}
    report("data_tokens", "lists of tokens to batches", {KIND: rounds}, ratios, peers, machine, options.json)


if __name__ == "__main__":
    main()
