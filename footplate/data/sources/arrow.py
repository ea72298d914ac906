"""Arrow arrays and tables without pandas.

If pandas is installed, pyarrow imports it when it makes an array or a table of Python objects. That takes half a second and
50 MB, and reading a table doesn't need it. These functions pass memory to pyarrow instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def indices(rows: np.ndarray) -> pa.Array:
    """Convert row numbers, (rows,), to an Arrow array for `take`: int32 if they are, else int64."""
    is_narrow = rows.dtype == np.int32
    numbers = np.ascontiguousarray(rows, dtype=np.int32 if is_narrow else np.int64)
    return pa.Array.from_buffers(pa.int32() if is_narrow else pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def table_from(exported: Any) -> pa.Table:
    """Import a table that another library exports through Arrow's C interface."""
    if hasattr(exported, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(exported).read_all()
    return pa.Table.from_batches([pa.RecordBatch._import_from_c_capsule(*exported.__arrow_c_array__())])
