"""Batches from tables: `Table` selects rows, and `Loader` makes batches of them.

    table = Table("s3://lake/flowers", version=12, columns=["image", "label"])
    for batch in Loader(table, batch_size=64, shuffle=True, image_size=224):
        batch["image"]          # uint8 (64, 3, 224, 224)
        batch["label"]          # int64 (64,)

The parts, from the file to the batch:

    remote/      paths and URIs, file systems with retries, a disk cache
    sources/     kinds of tables: a list of row groups, and a way to read one
    table.py     selected rows, pinned to one version of a source
    table_html.py, preview.py  a table in a notebook, and short forms of its values
    digest.py    digests of rows, for caches, resuming and checks between ranks
    order/       the order of rows, as pure functions
    mapping/     columns that a function computes, kept on a local disk
    packing/     documents in sequences of a fixed length, and their attention
    pipeline/    windows in memory, decoding, collating, prefetching
    batch_loader.py  the position that a checkpoint keeps
    loader.py    batches of a table for one rank
    mixing/      batches of several tables, by weights
    adapters/    loaders of other libraries, made resumable

Importing this package imports none of the parts. A name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.data.loader import Loader as Loader
    from footplate.data.mapping.table import MappedTable as MappedTable
    from footplate.data.mixing.loader import MixedLoader as MixedLoader
    from footplate.data.packing.attention import block_mask as block_mask
    from footplate.data.packing.attention import cumulative_lengths as cumulative_lengths
    from footplate.data.packing.attention import document_mask as document_mask
    from footplate.data.packing.attention import next_token_targets as next_token_targets
    from footplate.data.packing.table import PackedTable as PackedTable
    from footplate.data.pipeline.decoded_cache import DecodedCache as DecodedCache
    from footplate.data.pipeline.prefetch import Prefetcher as Prefetcher
    from footplate.data.remote.file_cache import FileCache as FileCache
    from footplate.data.table import Table as Table

_HOMES = {
    "DecodedCache": "footplate.data.pipeline.decoded_cache",
    "FileCache": "footplate.data.remote.file_cache",
    "Table": "footplate.data.table",
    "Loader": "footplate.data.loader",
    "MappedTable": "footplate.data.mapping.table",
    "MixedLoader": "footplate.data.mixing.loader",
    "PackedTable": "footplate.data.packing.table",
    "Prefetcher": "footplate.data.pipeline.prefetch",
    "block_mask": "footplate.data.packing.attention",
    "cumulative_lengths": "footplate.data.packing.attention",
    "document_mask": "footplate.data.packing.attention",
    "next_token_targets": "footplate.data.packing.attention",
}

__all__ = [
    "DecodedCache",
    "FileCache",
    "Loader",
    "MappedTable",
    "MixedLoader",
    "PackedTable",
    "Prefetcher",
    "Table",
    "block_mask",
    "cumulative_lengths",
    "document_mask",
    "next_token_targets",
]

__getattr__ = lazy(__name__, _HOMES)
