"""Arrow without pandas.

Where pandas is installed, pyarrow imports it as soon as it is to make an array or a table out of anything: half a second
and 50 MB, which reading a table doesn't need. These functions hand it memory instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def indices(rows: np.ndarray) -> pa.Array:
    """Row numbers, (rows,), for `take`."""
    numbers = np.ascontiguousarray(rows, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def table_from(exported: Any) -> pa.Table:
    """What another library exports through Arrow's C interface."""
    if hasattr(exported, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(exported).read_all()
    return pa.Table.from_batches([pa.RecordBatch._import_from_c_capsule(*exported.__arrow_c_array__())])
