"""Documents from Parquet to shuffled batches of packed sequences: Footplate, its peers, and the limit set by reading.

    bash benchmarks/peers/data.sh && python benchmarks/packing.py --json benchmarks/results/packing.json

The table has 200,000 documents of 50 to 1,000 int32 tokens. A batch has 8 sequences of 2,048 tokens. Each entrant has two
threads or worker processes. Rates count tokens without padding. They include opening the data, and packing it if the
entrant does that.

    footplate         packs by best fit while it reads Parquet. Batches have ids of documents and positions
    trl               packs the whole data set by best fit, then reads it. The same batches
    litdata, mosaic   read formats of their own, written beforehand, in which documents follow one another, without
                      boundaries

There are two kinds of data:

    packed            the files are in memory. The limit is pyarrow, which reads all row groups with two threads
    streamed          the files are on an S3 server, each of whose answers takes 50 ms longer (`object_store.py`). Nothing
                      is on the local disk when a pass begins. TRL packs a whole data set, so it doesn't stream

To run this benchmark in parts, see `data_common.py`.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import common
import data_common
import data_tokens
import object_store
from common import Ratio, Rounds
from data_common import Entrant

BATCH = 8
LATENCY_MS = 50
LOCAL, REMOTE = "packed", "streamed"

FOOTPLATE = "footplate"
LIMIT = "limit: read only"
TRL = "trl, best fit"
LITDATA = "litdata, concatenated"
MOSAIC = "mosaicml streaming, concatenated"

ENTRANTS = {
    LOCAL: [
        Entrant(LIMIT, "packed_limit"),
        Entrant(FOOTPLATE, "packed_footplate"),
        Entrant(TRL, "packed_trl", "trl"),
        Entrant(LITDATA, "packed_litdata", "data"),
        Entrant(MOSAIC, "packed_mosaicml", "data"),
    ],
    REMOTE: [
        Entrant(FOOTPLATE, "streamed_footplate"),
        Entrant(LITDATA, "streamed_litdata", "data"),
        Entrant(MOSAIC, "streamed_mosaicml", "data"),
    ],
}


def make(directory: Path, rows: int) -> None:
    """Write the Parquet files, and the same tokens in the peers' formats."""
    data_tokens.make_parquet(directory, rows)
    data_common.peers_formats(directory, {"litdata_tokens": "data", "mds_tokens": "data", "hf": "trl"})
    (directory / "complete").touch()


def measure(kind: str, directory: Path, before: Rounds, options: argparse.Namespace) -> Rounds:
    """Take the rounds that the options ask for, after those that the file has."""
    with object_store.serve(directory, LATENCY_MS) if kind == REMOTE else contextlib.nullcontext():
        return data_common.continued(before, ENTRANTS[kind], directory, BATCH, options)


def ratios(results: dict[str, Rounds]) -> dict[str, Ratio | None]:
    """Footplate's rate beside the limit, the best peer and TRL."""

    def over(kind: str, peer: str | None) -> Ratio | None:
        return data_common.paired(results.get(kind, {}), FOOTPLATE, peer, "whole")

    def best(kind: str) -> str | None:
        peers = [entrant for entrant in ENTRANTS[kind] if entrant.name not in (FOOTPLATE, LIMIT)]
        return data_common.best(results.get(kind, {}), peers, "whole")

    return {
        "vs_limit": over(LOCAL, LIMIT),
        "vs_best_peer": over(LOCAL, best(LOCAL)),
        "vs_trl": over(LOCAL, TRL),
        "streamed_vs_best_peer": over(REMOTE, best(REMOTE)),
    }


def main() -> None:
    options = data_common.parse(__doc__ or "", list(ENTRANTS))
    machine = common.machine()
    results = data_common.earlier(options.json, options.add)
    rows = options.rows or (20_000 if options.quick else 200_000)
    with data_common.data_directory(options.data) as root:
        directory = data_common.data_set(root / "packed", make, rows)
        for kind in options.kinds:
            results[kind] = measure(kind, directory, results.get(kind, {}), options)
    columns = {**data_common.COLUMNS, "rows_per_cpu_s": "tokens per CPU s", "padding": "padding share"}
    data_common.report("packing", "tokens to packed batches", results, ratios(results), machine, options.json, columns)


if __name__ == "__main__":
    main()
