"""Lists of tokens from Parquet to shuffled, padded batches: Footplate, a peer, and the limit that reading sets.

    bash benchmarks/peers/data.sh && python benchmarks/data_tokens.py --json benchmarks/results/data_tokens.json

200,000 documents of 50 to 1,000 int32 tokens, batches of 32, two threads or worker processes. The limit is pyarrow reading
all row groups with two threads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_common import Entrant, how_long, parse, ratio, report, run, with_data

BATCH = 32
FILES = 10
ROWS_PER_GROUP = 2000

FOOTPLATE = Entrant("footplate", "tokens_footplate")
PEER = Entrant("hf datasets, map", "tokens_hf_map", "data")
LIMIT = Entrant("limit: read only", "tokens_limit")


def make(directory: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    (directory / "parquet").mkdir()
    for number in range(FILES):
        lengths = rng.integers(50, 1000, rows // FILES)
        tokens = pa.array(rng.integers(0, 50_000, lengths.sum()).astype(np.int32))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(offsets, tokens)})
        pq.write_table(table, directory / "parquet" / f"{number:03}.parquet", row_group_size=ROWS_PER_GROUP)


def main() -> None:
    options = parse(__doc__ or "")
    rows = options.rows or (20_000 if options.quick else 200_000)
    rounds, seconds = how_long(options)

    def body(directory: Path) -> None:
        found = run([LIMIT, FOOTPLATE, PEER], directory, BATCH, rounds, seconds)
        ratios = {"footplate_vs_limit": ratio(found, FOOTPLATE.name, LIMIT.name, "steady")}
        if PEER.name in found:
            ratios["footplate_vs_best_peer"] = ratio(found, FOOTPLATE.name, PEER.name, "whole")
        report("data_tokens", found, ratios, options.json)

    with_data(options.data, lambda directory: make(directory, rows), body)


if __name__ == "__main__":
    main()
