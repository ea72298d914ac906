"""From a table to batches: `Table` names the rows, `Loader` hands them out, `TableDataModule` splits them.

    table = Table("s3://lake/flowers", version=12, columns=["image", "label"])
    for batch in Loader(table, batch_size=64, shuffle=True, image_size=224):
        batch["image"]          # uint8 (64, 3, 224, 224)
        batch["label"]          # int64 (64,)

The parts, from the file to the batch: `source` (what row groups there are and how one is read), `table` (which rows of
them are meant), `plan` (in which order, a pure function), `reading` and `window` (the rows in memory), `columns` and
`images` (Arrow to tensors), `pipeline` (the threads), `loader` (the position that a checkpoint keeps).

Importing this package imports none of them; a name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.lazy_import import lazy

if TYPE_CHECKING:
    from footplate.data.cache import DecodedCache as DecodedCache
    from footplate.data.filecache import FileCache as FileCache
    from footplate.data.loader import Loader as Loader
    from footplate.data.module import TableDataModule as TableDataModule
    from footplate.data.prefetch import Prefetcher as Prefetcher
    from footplate.data.table import Table as Table

_HOMES = {
    "DecodedCache": "footplate.data.cache",
    "FileCache": "footplate.data.filecache",
    "Table": "footplate.data.table",
    "Loader": "footplate.data.loader",
    "Prefetcher": "footplate.data.prefetch",
    "TableDataModule": "footplate.data.module",
}

__all__ = ["DecodedCache", "FileCache", "Loader", "Prefetcher", "Table", "TableDataModule"]

__getattr__ = lazy(__name__, _HOMES)
