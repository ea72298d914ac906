"""Columns from Parquet to shuffled batches of tensors: Footplate, its peers, and the limit set by reading.

    bash benchmarks/peers/data.sh && python benchmarks/data_tabular.py --json benchmarks/results/data_tabular.json

The table has 5 million rows of 40 float32 columns and a label, in row groups of 50,000. Batches have 8,192 rows. Each
entrant has two threads. The `plain` files hold random values as they are. The `snappy` files hold 12-bit values in
dictionaries, compressed.

- The limit is pyarrow, which reads all row groups with two threads.
- The floor adds one permutation of each column into reused memory, the least that a shuffle costs.
- Peers that shuffle use a buffer of 100,000 rows, or shuffle the whole table in memory.

To run this benchmark in parts, see `data_common.py`.
"""

from __future__ import annotations

from pathlib import Path

import common
import data_common
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_common import Entrant

BATCH = 8192
COLUMNS = 40
FILES = 10
ROWS_PER_GROUP = 50_000
KINDS = ("plain", "snappy")

FOOTPLATE = Entrant("footplate", "tabular_footplate")
LIMIT = Entrant("limit: read only", "tabular_limit")
FLOOR = Entrant("floor: read and permute", "tabular_floor")
PEERS = [
    Entrant("whole table in memory", "tabular_torch_memory"),
    Entrant("hf datasets, streaming", "tabular_hf_streaming", "data"),
    Entrant("lance", "tabular_lance", "lake"),
    Entrant("ray data", "tabular_ray", "lake"),
]
PETASTORM = Entrant("petastorm, batched", "tabular_petastorm", "petastorm")


def make(directory: Path, kind: str, rows: int) -> None:
    """Write the Parquet files, and the same rows in the peers' formats."""
    rng = np.random.default_rng(0)
    (directory / "parquet").mkdir()
    for number in range(FILES):
        count = rows // FILES
        columns = {f"f{column}": _values(rng, kind, count) for column in range(COLUMNS)}
        table = pa.table({**columns, "label": rng.integers(0, 10, count)})
        path = directory / "parquet" / f"{number:03}.parquet"
        if kind == "plain":
            pq.write_table(table, path, row_group_size=ROWS_PER_GROUP, compression="none", use_dictionary=False)
        else:
            pq.write_table(table, path, row_group_size=ROWS_PER_GROUP, compression="snappy")
    data_common.peers_formats(directory, {"lance": "lake"})
    (directory / "complete").touch()


def _values(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    if kind == "plain":
        return rng.normal(size=count).astype(np.float32)
    return (rng.normal(size=count) * 512).round().clip(-2048, 2047).astype(np.float32) / 512


def main() -> None:
    options = data_common.parse(__doc__ or "", KINDS)
    machine = common.machine()
    results = data_common.earlier(options.json, options.add)
    with data_common.data_directory(options.data) as root:
        for kind in options.kinds:
            rows = options.rows or (400_000 if options.quick else 5_000_000)
            directory = data_common.data_set(root / kind, make, kind, rows)
            entrants = [LIMIT, FLOOR, FOOTPLATE, *PEERS, PETASTORM]
            results[kind] = data_common.continued(results.get(kind, {}), entrants, directory, BATCH, options)
    ratios = {}
    for kind, rounds in results.items():
        prefix = "" if kind == "plain" else f"{kind}_"
        fastest = data_common.best(rounds, PEERS, "whole")
        first = data_common.best(rounds, PEERS, "first_batch_s", least=True)
        for name, other, figure in (
            ("footplate_vs_limit", LIMIT.name, "steady"),
            ("footplate_vs_floor", FLOOR.name, "steady"),
            ("footplate_vs_best_peer", fastest, "whole"),
            ("footplate_vs_petastorm", PETASTORM.name, "whole"),
            ("first_batch_vs_best_peer", first, "first_batch_s"),
        ):
            ratios[prefix + name] = data_common.paired(rounds, FOOTPLATE.name, other, figure)
    data_common.report("data_tabular", "columns to batches", results, ratios, machine, options.json)


if __name__ == "__main__":
    main()
