"""Checks of the arguments that Petastorm's readers and loaders take.

An argument that changes no row and no batch is accepted without effect. An argument that would change rows or batches in a
way that is not possible here is refused by name, with what to use instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from footplate.core.errors import ConfigError
from footplate.distributed.world import World

# Settings of Petastorm's worker pools, queues and caches. They change the speed of reading, not the rows.
_WITHOUT_EFFECT = frozenset({
    "reader_pool_type", "workers_count", "results_queue_size", "pyarrow_serialize", "hdfs_driver", "cache_type",
    "cache_location", "cache_size_limit", "cache_row_size_estimate", "cache_extra_settings",
    "zmq_copy_buffers", "convert_early_to_numpy",
})  # fmt: skip
_CHOICES = {"reader_pool_type": ("thread", "process", "dummy"), "cache_type": ("null", "local-disk", None)}
# Settings that change rows or batches, and what to use instead.
_REFUSED = {
    "rowgroup_selector": "use filters=",
    "collate_fn": "it is for the rows of make_reader over a table with a Unischema; change the batch in the training loop",
    "transform_fn": "give a transform_spec to the reader",
    "ngram": "n-grams are not supported",
    "inmemory_cache_all": "use InMemBatchedDataLoader to keep rows in memory",
}


def check_order(function: str, shuffle_row_groups: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Take the settings that mix rows out of `settings`, and return the others.

    Raises:
        ConfigError: rows are to be mixed while row groups keep their order. `shuffle_row_groups` mixes all rows here.
    """
    rows, partitions = settings.pop("shuffle_rows", False), settings.pop("shuffle_row_drop_partitions", 1)
    if (rows or partitions not in (None, 1)) and not shuffle_row_groups:
        setting = f"shuffle_rows={rows!r}" if rows else f"shuffle_row_drop_partitions={partitions!r}"
        raise ConfigError(
            f"{function}({setting}, shuffle_row_groups=False) is not supported: rows are mixed over the whole table, or "
            "not at all. Use shuffle_row_groups=True."
        )
    return settings


def check_settings(function: str, settings: dict[str, Any]) -> None:
    """Refuse settings that would change rows or batches; None and False, Petastorm's defaults, pass."""
    for name, value in settings.items():
        if value not in _CHOICES.get(name, (value,)):
            raise ConfigError(f"Unknown {name}: {value!r}. Petastorm has {', '.join(map(str, _CHOICES[name]))}.")
        if name in _WITHOUT_EFFECT or (name in _REFUSED and (value is None or value is False)):
            continue
        hint = _REFUSED.get(name, "remove it: Petastorm's readers and loaders here have no such argument")
        raise ConfigError(f"{function}({name}={value!r}) is not supported: {hint}.")


def check_epochs(num_epochs: Any) -> None:
    """Raise ConfigError unless `num_epochs` is a number from 1, or None."""
    if num_epochs is not None and not (is_integer(num_epochs) and num_epochs > 0):
        raise ConfigError(f"num_epochs={num_epochs!r}: expected a number from 1, or None for no end.")


def world_of(cur_shard: int | None, shard_count: int | None) -> World:
    """The shard as a rank and a world size; this process's own without `cur_shard` and `shard_count`."""
    if (cur_shard is None) != (shard_count is None):
        raise ConfigError(f"cur_shard={cur_shard}, shard_count={shard_count}: give both or neither.")
    if cur_shard is None or shard_count is None:
        return World.present()
    if not (is_integer(cur_shard) and is_integer(shard_count) and 0 <= cur_shard < shard_count):
        raise ConfigError(
            f"cur_shard={cur_shard!r}, shard_count={shard_count!r}: expected integers, with cur_shard from 0 to "
            "shard_count - 1."
        )
    return World(int(cur_shard), int(shard_count))


def is_integer(value: Any) -> bool:
    """Return True for Python's and numpy's integers; a bool is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
