"""A loader of several tables, mixed by weights.

    loader = MixedLoader({"web": web, "code": code}, batch_size=64, weights={"web": 3, "code": 1}, shuffle=True)
    loader = MixedLoader(tables, 64, weights={0: {"web": 3, "code": 1}, 5000: {"web": 1, "code": 1}})       by batch

    for batch in loader:
        batch["tokens"]         # the rows of the first table, then those of the second, …
        batch["table_ids"]      # int64 (64,): the number of each row's table

Every batch has its weight of each table, within a few rows. `order/mixing.py` says which rows. The position
is that of a `Loader`: a few integers, at which any number of ranks continues exactly. Each table has a pipeline of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from footplate.core.errors import CheckpointError, ConfigError
from footplate.data.argument_checks import check_count
from footplate.data.batch_loader import BatchLoader, available_cores
from footplate.data.loader import choose_prefetch
from footplate.data.mixing.matching import check_shapes, check_tables
from footplate.data.mixing.pipeline import MixedPipeline
from footplate.data.order.mixed_epoch import MixedEpoch, MixedOrder
from footplate.data.order.mixed_table import most_streams
from footplate.data.order.mixing import Mode, parse_weights
from footplate.data.order.stream_sizes import choose_streams
from footplate.data.pipeline.batch_pipeline import BatchPipeline
from footplate.data.pipeline.batch_spec import make_batch_spec
from footplate.data.pipeline.buffers import Buffers
from footplate.data.table import Table
from footplate.distributed.consistency import digest
from footplate.distributed.world import World


class MixedLoader(BatchLoader):
    """Batches of several tables, mixed by weights. All tables have the same columns. See `Loader` for the batches.

    Args:
        tables: the tables, by name.
        batch_size: rows of this rank's batch. A global batch has `batch_size * world.size` rows.
        weights: a number for each table, such as `{"web": 3, "code": 1}`. Or a schedule of such weights by the first batch
            of the epoch that has them: `{0: {"web": 3, "code": 1}, 5000: {"web": 1, "code": 1}}`.
        mode: when an epoch ends. "max_size_cycle" ends when every table has been read once; tables that end earlier begin
            again, in another order. "min_size" ends before a table would begin again. All batches are full.
        shuffle: True for a new order each epoch; False for the order of each table.
        seed: seed of the orders; not negative.
        world: see `Loader`.
        num_threads: see `Loader`.
        prefetch: see `Loader`.
        pin_memory: see `Loader`.

    Raises:
        ConfigError: an invalid argument; or, when iterating, weights with which an epoch would never end.
        DataError: an empty table, tables of different columns, or columns that a batch can't hold; or, when iterating, a
            table of too few rows for a batch.

    Examples:
        >>> tables = {"roses": fp.Table("flowers.parquet"), "tulips": fp.Table("flowers.parquet")}
        >>> loader = fp.MixedLoader(tables, batch_size=4, weights={"roses": 3, "tulips": 1}, mode="min_size")
        >>> next(iter(loader))["label"].shape
        torch.Size([4])
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        batch_size: int,
        *,
        weights: Mapping[str, float] | Mapping[int, Mapping[str, float]],
        mode: Mode = "max_size_cycle",
        shuffle: bool = False,
        seed: int = 0,
        world: World | None = None,
        num_threads: int | Literal["auto"] = "auto",
        prefetch: int | Literal["auto"] = "auto",
        pin_memory: bool | None = None,
    ) -> None:
        super().__init__(batch_size, world, pin_memory, num_threads, prefetch)
        if mode not in ("min_size", "max_size_cycle"):
            raise ConfigError(f'mode={mode!r}: expected "max_size_cycle" or "min_size".')
        check_count("seed", seed, least=0)
        check_tables(tables)
        self.tables = dict(tables)
        self.mode: Mode = mode
        self.shuffle = shuffle
        self.seed = seed
        self._phases = parse_weights(weights, list(tables))
        self._specs = [make_batch_spec(table, None, "auto", None, False, seed) for table in tables.values()]
        self._rows = [table.group_rows for table in tables.values()]
        self._streams: Sequence[tuple[int, int]] = ()
        check_shapes(dict(zip(tables, (spec.shapes for spec in self._specs), strict=True)))

    @property
    def threads(self) -> int:
        """How many threads decode images."""
        return self._num_threads or available_cores(self.world)

    @property
    def decodes(self) -> list[str]:
        """The image columns that it decodes."""
        return list(self._specs[0].formats)

    @property
    def transforms(self) -> bool:
        """False: rows go through no function."""
        return False

    @property
    def content(self) -> str:
        """Text that must be the same on every rank. Each node may have copies of the files."""
        tables = "; ".join(f"{table.num_rows} rows of {table.digest.shared}" for table in self.tables.values())
        order = "shuffled" if self.shuffle else "in order"
        plan = ([rows.tolist() for rows in self._rows], self._order.state_dict())
        return f"{tables}, mixed, {order} by seed {self.seed}, {self.global_batch_size} over all ranks [{digest(plan)}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out. Batches that were made ahead don't count."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "batch_size": self.batch_size,
            **self._order.state_dict(),
            "tables": {name: table.digest.state_dict() for name, table in self.tables.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a loader of the same tables, seed and batch size.

        Weights may differ from the position on. With another number of ranks, the global batch stays the same.

        Raises:
            CheckpointError: the state is of other tables, or another seed, mode, batch size or weights.
        """
        own = self.state_dict()
        missing = own.keys() - state_dict.keys()
        if missing:
            raise CheckpointError(
                f"This is no state of a MixedLoader: it has no {', '.join(sorted(missing))}. Resume with the kind of "
                "loader that the run began with."
            )
        if [*state_dict["tables"]] != [*self.tables]:
            raise CheckpointError(
                f"The checkpoint was made with the tables {', '.join(state_dict['tables'])}, not {', '.join(self.tables)}. "
                "Give the same tables, in the same order, to resume. A table may get the weight 0 later."
            )
        for name, table in self.tables.items():
            table.digest.check_resumed(state_dict["tables"][name])
        self._check_settings(state_dict, ("seed", "shuffle", "mode"))
        before = [_until(schedule, state_dict["batch"]) for schedule in (state_dict["weights"], own["weights"])]
        if before[0] != before[1]:
            raise CheckpointError(
                f"The checkpoint was made after {state_dict['batch']} batches with the weights {before[0]} (by first "
                f"batch), not {before[1]}, so its position means other rows. Use the same weights up to there to resume. "
                f"You may change them from batch {state_dict['batch']} on."
            )

        self._streams = MixedOrder.from_state(state_dict).streams
        self._continue_at(state_dict)

    @property
    def _order(self) -> MixedOrder:
        streams = self._streams or [self._choose_streams(number) for number in range(len(self.tables))]
        return MixedOrder(self._phases, self.global_batch_size, self.mode, self.seed, self.shuffle, streams)

    def _choose_streams(self, number: int) -> tuple[int, int]:
        """Choose the number of streams of a table, and how many row groups a window gathers."""
        if not self.shuffle:
            return 1, 1
        table = list(self.tables.values())[number]
        group_bytes = [group.nbytes for group in table.row_groups if group.num_rows]
        most = most_streams(self._phases, number, self.global_batch_size)
        return choose_streams(group_bytes, table.in_memory, most, len(self.tables))

    def _plan(self, epoch: int) -> MixedEpoch:
        return MixedEpoch(self._rows, list(self.tables), self._order, epoch)

    def _open(self, plan: MixedEpoch, start: int) -> MixedPipeline:
        threads = max(1, self.threads // len(self.tables))
        rows_of_rank = max(1, self.global_batch_size // self.world.size)
        pipelines = []
        for table, spec, order in zip(self.tables.values(), self._specs, plan.tables, strict=True):
            prefetch = self._prefetch or choose_prefetch(table, spec, rows_of_rank, threads)
            pin = bool(self.pin_memory)
            pipelines.append(
                BatchPipeline(table, spec, order, start, self.world, threads, prefetch, {}, None, pin, self.busy)
            )
        return MixedPipeline(pipelines, self._specs[0].read.ragged, Buffers(bool(self.pin_memory)))


def _until(schedule: Sequence[Sequence[Any]], batch: int) -> list[list[Any]]:
    """The phases of a schedule that begin before a batch, and the first one."""
    return [list(phase) for phase in schedule if phase[0] < max(1, batch)]
