"""Lists of tokens from Parquet to shuffled, padded batches: Footplate, its peers, and the limit set by reading.

    bash benchmarks/peers/data.sh && python benchmarks/data_tokens.py --json benchmarks/results/data_tokens.json

The table has 200,000 documents of 50 to 1,000 int32 tokens. Batches have 32 documents. Each entrant has two threads or
worker processes. The limit is pyarrow, which reads all row groups with two threads. The batches are padded and int64, as an
embedding takes them, so they are about four times as large as the data in the files. To run this benchmark in parts, see
`data_common.py`.
"""

from __future__ import annotations

from pathlib import Path

import common
import data_common
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_common import Entrant

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
    """Write the Parquet files, and the same rows in the peers' formats."""
    make_parquet(directory, rows)
    data_common.peers_formats(directory, {"hf": "data", "lance": "lake"})
    (directory / "complete").touch()


def make_parquet(directory: Path, rows: int) -> None:
    """Write the Parquet files."""
    rng = np.random.default_rng(0)
    (directory / "parquet").mkdir()
    for number in range(FILES):
        lengths = rng.integers(50, 1000, rows // FILES)
        tokens = pa.array(rng.integers(0, 50_000, lengths.sum()).astype(np.int32))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(offsets, tokens)})
        pq.write_table(table, directory / "parquet" / f"{number:03}.parquet", row_group_size=ROWS_PER_GROUP)


def main() -> None:
    options = data_common.parse(__doc__ or "", [KIND])
    machine = common.machine()
    earlier = data_common.earlier(options.json, options.add).get(KIND, {})
    rows = options.rows or (20_000 if options.quick else 200_000)
    with data_common.data_directory(options.data) as root:
        directory = data_common.data_set(root / KIND, make, rows)
        rounds = data_common.continued(earlier, [LIMIT, FOOTPLATE, *PEERS], directory, BATCH, options)
    fastest = data_common.best(rounds, PEERS, "whole")
    first = data_common.best(rounds, PEERS, "first_batch_s", least=True)
    ratios = {
        "footplate_vs_limit": data_common.paired(rounds, FOOTPLATE.name, LIMIT.name, "steady"),
        "footplate_vs_best_peer": data_common.paired(rounds, FOOTPLATE.name, fastest, "whole"),
        "first_batch_vs_best_peer": data_common.paired(rounds, FOOTPLATE.name, first, "first_batch_s"),
    }
    data_common.report("data_tokens", "lists of tokens to batches", {KIND: rounds}, ratios, machine, options.json)


if __name__ == "__main__":
    main()
