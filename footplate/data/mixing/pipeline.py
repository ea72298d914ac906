"""The batches of a mixture: the rows of each table's pipeline, one table after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from footplate.data.mixing.matching import TABLE_IDS
from footplate.data.pipeline.batch_pipeline import BatchPipeline
from footplate.data.pipeline.buffers import Buffers


class MixedPipeline:
    """The batches of one rank: those of each table's pipeline, one after another.

    Args:
        pipelines: one for each table.
        ragged: the columns of padded lists.
        buffers: memory for batches.
    """

    def __init__(self, pipelines: Sequence[BatchPipeline], ragged: Sequence[str], buffers: Buffers) -> None:
        self._pipelines, self._ragged, self._buffers = pipelines, ragged, buffers

    def batches(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each batch, and 0: no bad row is left out."""
        for made in zip(*(pipeline.batches() for pipeline in self._pipelines), strict=True):
            parts = {number: values for number, (values, _) in enumerate(made) if values}
            sizes = [len(next(iter(values.values()))) for values in parts.values()]
            first = next(iter(parts.values()))
            batch = {name: self._join(name, [values[name] for values in parts.values()]) for name in first}
            table_ids = self._buffers.tensor((sum(sizes),), np.int64)
            table_ids.numpy()[:] = np.repeat(list(parts), sizes)
            yield {**batch, TABLE_IDS: table_ids}, 0

    def close(self) -> None:
        """Stop all threads."""
        for pipeline in self._pipelines:
            pipeline.close()

    def _join(self, name: str, values: list[Any]) -> Any:
        if len(values) == 1:
            return values[0]
        if not isinstance(values[0], torch.Tensor):
            return [value for part in values for value in part]
        if name in self._ragged:
            longest = max(part.shape[1] for part in values)
            values = [torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in values]
        shape = sum(len(part) for part in values), *values[0].shape[1:]
        return torch.cat(values, out=self._buffers.tensor(shape, values[0].numpy().dtype))
