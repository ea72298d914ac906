"""Computing the results of a function for all rows of a table, once for all processes of a machine.

1. A process that finds all results takes them. It starts no worker, and reads none of the results.
2. Otherwise it takes the lock of the results. Other processes wait for it, and then find the results.
3. It looks through the files that an earlier process has left, if one was killed.
4. For each row group that is missing, a thread reads the rows, a worker process calls the function, and the thread writes
   the results. So of a process that is killed, only the row groups in work are lost. The kernel frees its lock.
"""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cloudpickle
import pyarrow as pa

from footplate.core.errors import ConfigError, DataError
from footplate.data.mapping.progress import RowGroupProgress
from footplate.data.mapping.store import GroupResults, MappedStore, Results, describe, read_schema, to_bytes, unified
from footplate.data.mapping.worker import Failure, Function
from footplate.data.pipeline.worker_process import WorkerPool, revive_error
from footplate.data.table import Table


@dataclass(frozen=True)
class MappedFunction:
    """A function of a batch of rows.

    Attributes:
        function: the function.
        name: its name, for messages.
        identity: a hash of the function; None if the user gave a version instead.
        num_workers: how many processes call it.
    """

    function: Function
    name: str
    identity: str | None
    num_workers: int


def computed(documents: Table, mapped: MappedFunction, store: MappedStore) -> Results:
    """Return the description of a function's results for all rows of a table. What is missing is computed.

    Raises:
        ConfigError: the function can't be sent to another process.
        DataError: the function failed, its results don't fit the rows, or they can't be written.
    """
    results = store.results()
    if results is not None and not store.missing(results):
        return results
    progress = RowGroupProgress(f"map({mapped.name}) of {documents.uri}", len(documents.row_groups))
    with store.lock(lambda: progress.say("another process computes this. Waiting for it.")):
        results = store.results()
        if results is None or store.missing(results):
            with progress:
                results = _complete(documents, mapped, store, results, progress)
            progress.end()
    return results


def _complete(
    documents: Table, mapped: MappedFunction, store: MappedStore, before: Results | None, progress: RowGroupProgress
) -> Results:
    """Compute the results of the row groups that miss them.

    Args:
        documents: the rows.
        mapped: the function.
        store: the results. This process has its lock.
        before: the description of all results, if they were complete before.
        progress: counts the row groups.
    """
    missing = None if before is None else set(store.missing(before))

    def group_results(group: int) -> tuple[GroupResults, pa.Schema]:
        if before is not None and missing is not None and group not in missing:
            return before.groups[group], before.schema
        kept = store.group(group) if before is None else None
        if kept is not None:
            return describe(kept), kept.schema
        content, description = workers.run(documents, group)
        if before is not None and description.content != before.groups[group].content:
            raise DataError(
                f"{documents.where(group, 0)}: map({mapped.name}) returned other values than before, so its results don't "
                f"depend on the rows alone. Make the function repeat its results, and delete {store.directory}."
            )
        store.keep_group(group, content)
        return description, read_schema(content)

    workers = _Workers(mapped)
    # One thread more than workers, so that rows are read while the workers are busy.
    pool = ThreadPoolExecutor(mapped.num_workers + 1, "footplate-map")
    try:
        groups: list[GroupResults] = []
        schema = pa.schema([])
        for group, (description, columns) in enumerate(pool.map(group_results, range(len(documents.row_groups)))):
            schema = _with_columns(schema, columns, description, documents, group)
            groups.append(description)
            progress.add(description.num_rows)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        workers.close()
        pool.shutdown()
    if not schema.names:
        raise DataError(
            f"{documents.uri}: no row is selected, so map({mapped.name}) has no columns. Select other rows."
        )
    return store.keep_results(schema, groups)


def _with_columns(
    schema: pa.Schema, columns: pa.Schema, description: GroupResults, documents: Table, group: int
) -> pa.Schema:
    """Return the columns of the row groups so far and of one more.

    Raises:
        DataError: they differ.
    """
    if not description.num_rows:
        return schema
    try:
        return unified([schema, columns]) if schema.names else columns
    except DataError as error:
        raise DataError(f"{documents.where(group, 0)} and the rows after it: {error}") from error


class _Workers:
    """The worker processes that call a function.

    Raises:
        ConfigError: the function can't be sent to them.
    """

    def __init__(self, mapped: MappedFunction) -> None:
        self._owner = f"map({mapped.name})"
        try:
            content = cloudpickle.dumps(mapped.function)
        except Exception as error:
            raise ConfigError(
                f"{self._owner}: the function can't be sent to a worker process ({error}). Make the object in question "
                "inside of the function."
            ) from error
        count = mapped.num_workers
        # A tokenizer of Hugging Face starts as many threads as there are cores, in each process.
        threads = max(1, len(os.sched_getaffinity(0)) // count) if hasattr(os, "sched_getaffinity") else 1
        rayon_threads = os.environ.get("RAYON_NUM_THREADS", str(threads))
        # With another seed, Python iterates over a set of texts in another order, and results may differ.
        environ = {"RAYON_NUM_THREADS": rayon_threads, "PYTHONHASHSEED": "0"}
        hint = "If it ran out of memory, use a smaller num_workers=. The results so far are kept: start again to go on."
        message = pickle.dumps((content, mapped.identity))
        serve = "footplate.data.mapping.worker:serve"
        self._pool = WorkerPool(serve, count, message, self._owner, hint, environ)
        self.close = self._pool.close

    def run(self, documents: Table, group: int) -> tuple[bytes, GroupResults]:
        """Return the results for a row group, and their description.

        Raises:
            DataError: the function failed, or a worker has died.
        """
        rows = documents.read_group(group)
        reply = self._pool.request(to_bytes(rows, compression=None))
        results: tuple[bytes, GroupResults] | None
        failure: Failure | None
        results, failure = pickle.loads(reply)
        if results is None:
            assert failure is not None
            error = revive_error(failure.error, failure.text, self._owner)
            if failure.first is None:
                raise error
            raise DataError(
                f"{documents.where(group, failure.first)} and the rows of its batch: {self._owner} failed. "
                f"{type(error).__name__}: {error}"
            ) from error
        return results
