"""Settings of a loader that its order of rows depends on, as plain values for a checkpoint.

    {"kind": "table", "order": {seed, batch size, windows, …}, "same_epoch": false,
     "table": {"source": "/lake/flowers", "selection": {…}, "digest": {…}}}
    {"kind": "mixed", "order": {seed, weights, …}, "same_epoch": false, "tables": {"web": {"source": …}, …}}
    {"kind": "combined", "mode": "max_size_cycle", "parts": [{"kind": "table", …}, …]}
    {"kind": "other", "name": "DataLoader"}                      its order is that of a sampler's code

`footplate.replaying.step_rows` computes the rows of a batch from them.
"""

from __future__ import annotations

import sys
from typing import Any

from footplate.data.adapters.logical_loader import LogicalLoader
from footplate.data.adapters.training_combination import TrainingCombination
from footplate.data.adapters.wrappers import SameEpoch

POSITION = ("epoch", "batch", "table", "tables")


def record_order(loader: Any) -> dict[str, Any]:
    """Return the settings of a training loader that `adapt` has made resumable."""
    if isinstance(loader, TrainingCombination):
        return {"kind": "combined", "mode": loader.mode, "parts": [record_order(part) for part in loader.parts]}
    if isinstance(loader, LogicalLoader):
        return record_order(loader.of_first_rank)
    if isinstance(loader, SameEpoch):
        return {**record_order(loader.loader), "same_epoch": True}
    # The import of the table's loader is slow. If nobody has imported it, this is another loader.
    tables = sys.modules.get("footplate.data.loader")
    if tables is not None and isinstance(loader, tables.Loader):
        order = {name: value for name, value in loader.state_dict().items() if name not in POSITION}
        return {"kind": "table", "order": order, "same_epoch": False, "table": loader.table.record()}
    mixtures = sys.modules.get("footplate.data.mixing.loader")
    if mixtures is not None and isinstance(loader, mixtures.MixedLoader):
        order = {name: value for name, value in loader.state_dict().items() if name not in POSITION}
        records = {name: table.record() for name, table in loader.tables.items()}
        return {"kind": "mixed", "order": order, "same_epoch": False, "tables": records}
    return {"kind": "other", "name": type(getattr(loader, "original", getattr(loader, "loader", loader))).__name__}
