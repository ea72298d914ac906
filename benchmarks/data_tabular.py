"""Columns from Parquet to shuffled batches of tensors: Footplate, its peers, and the limit that reading sets.

    bash benchmarks/peers/data.sh && python benchmarks/data_tabular.py --json benchmarks/results/data_tabular.json

5 million rows of 40 float32 columns and a label, uncompressed, in row groups of 50,000; batches of 8,192; two threads. The
limit is pyarrow reading all row groups with two threads, the floor the same with each column permuted once, which is the
least that a shuffle costs. Peers that shuffle do it with a buffer of 100,000 rows, or (in memory) fully.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_common import Entrant, best, how_long, parse, ratio, report, run, with_data

BATCH = 8192
COLUMNS = 40
FILES = 10
ROWS_PER_GROUP = 50_000

PEERS = [
    Entrant("hf datasets, streaming", "tabular_hf_streaming", "data"),
    Entrant("whole table in memory", "tabular_torch_memory"),
]
PETASTORM = Entrant("petastorm, batched", "tabular_petastorm", "petastorm")
FOOTPLATE = Entrant("footplate", "tabular_footplate")
LIMIT = Entrant("limit: read only", "tabular_limit")
FLOOR = Entrant("floor: read and permute", "tabular_floor")


def make(directory: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    (directory / "parquet").mkdir()
    for number in range(FILES):
        count = rows // FILES
        columns = {f"f{column}": rng.normal(size=count).astype(np.float32) for column in range(COLUMNS)}
        table = pa.table({**columns, "label": rng.integers(0, 10, count)})
        path = directory / "parquet" / f"{number:03}.parquet"
        pq.write_table(table, path, row_group_size=ROWS_PER_GROUP, compression="none", use_dictionary=False)


def main() -> None:
    options = parse(__doc__ or "")
    rows = options.rows or (400_000 if options.quick else 5_000_000)
    rounds, seconds = how_long(options)

    def body(directory: Path) -> None:
        found = run([LIMIT, FLOOR, FOOTPLATE, *PEERS, PETASTORM], directory, BATCH, rounds, seconds)
        ratios = {"footplate_vs_limit": ratio(found, FOOTPLATE.name, LIMIT.name, "steady")}
        ratios["footplate_vs_floor"] = ratio(found, FOOTPLATE.name, FLOOR.name, "steady")
        fastest = best(found, [peer.name for peer in PEERS], "whole")
        if fastest:
            ratios["footplate_vs_best_peer"] = ratio(found, FOOTPLATE.name, fastest, "whole")
        if PETASTORM.name in found:
            ratios["footplate_vs_petastorm"] = ratio(found, FOOTPLATE.name, PETASTORM.name, "whole")
        report("data_tabular", found, ratios, options.json)

    with_data(options.data, lambda directory: make(directory, rows), body)


if __name__ == "__main__":
    main()
