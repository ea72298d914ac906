"""Documents from Parquet to shuffled batches of packed sequences: Footplate, its peers, and the limit set by reading.

    bash benchmarks/peers/data.sh && python benchmarks/packing.py --json benchmarks/results/packing.json

The table has 200,000 documents of 50 to 1,000 int32 tokens. A batch has 8 sequences of 2,048 tokens. Each entrant has two
threads or worker processes. Rates count tokens without padding. They include opening the data, and packing it if the
entrant does that.

    footplate         packs by best fit while it reads Parquet. Batches have ids of documents and positions
    trl               packs the whole data set by best fit, then reads it. The same batches
    litdata, mosaic   read formats of their own, written beforehand, in which documents follow one another, without
                      boundaries

The limit is pyarrow, which reads all row groups with two threads. To run this benchmark in parts, see `data_common.py`.
"""

from __future__ import annotations

from pathlib import Path

import common
import data_common
import data_tokens
from data_common import Entrant

BATCH = 8
KIND = "packed"

FOOTPLATE = Entrant("footplate", "packed_footplate")
LIMIT = Entrant("limit: read only", "packed_limit")
PEERS = [
    Entrant("trl, best fit", "packed_trl", "trl"),
    Entrant("litdata, concatenated", "packed_litdata", "data"),
    Entrant("mosaicml streaming, concatenated", "packed_mosaicml", "data"),
]


def make(directory: Path, rows: int) -> None:
    """Write the Parquet files, and the same tokens in the peers' formats."""
    data_tokens.make_parquet(directory, rows)
    data_common.peers_formats(directory, {"litdata_tokens": "data", "mds_tokens": "data", "hf": "trl"})
    (directory / "complete").touch()


def main() -> None:
    options = data_common.parse(__doc__ or "", [KIND])
    machine = common.machine()
    rounds = data_tokens.take_rounds(KIND, make, [LIMIT, FOOTPLATE, *PEERS], BATCH, options)
    ratios = {
        "vs_limit": data_common.paired(rounds, FOOTPLATE.name, LIMIT.name, "whole"),
        "vs_best_peer": data_common.paired(rounds, FOOTPLATE.name, data_common.best(rounds, PEERS, "whole"), "whole"),
        "vs_trl": data_common.paired(rounds, FOOTPLATE.name, PEERS[0].name, "whole"),
    }
    columns = {**data_common.COLUMNS, "rows_per_cpu_s": "tokens per CPU s", "padding": "padding share"}
    data_common.report("packing", "tokens to packed batches", {KIND: rounds}, ratios, machine, options.json, columns)


if __name__ == "__main__":
    main()
