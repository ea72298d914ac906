"""The engine of a rank: submits operations, starts each when all ranks have it ready, and keeps the results.

    submit(…)  ──►  link.ready  ──►  rank 0's table  ──►  receive(Run)  ──►  launch  ──►  finish(handle)
    any thread                                            one thread at a time, the     the thread that
                                                          same order on all ranks       needs the result

The hooks of a backward pass submit while the pass runs. Answers arrive on the link's thread, which starts the transfers. So
the backward pass and the transfers overlap. A handle that waits for more than a second tells rank 0, which notices when no
rank can continue.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from footplate.compat.horovod.errors import HorovodInternalError, MismatchError
from footplate.compat.horovod.link import Link, connect
from footplate.compat.horovod.negotiation import Answer, Joined, Key, Refuse, Run
from footplate.compat.horovod.operations import Launched, Place, Request, launch, packed, zeros
from footplate.core.errors import ConfigError

TICK_S = 1.0
# Horovod starts nothing before its next cycle, so a name stays taken for a moment, however fast the other ranks are.
CYCLE_S = 0.02
MOST_NOTED = 1000

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """An operation that was submitted, for `poll` and `synchronize`.

    Attributes:
        key: the process set and name of the operation.
        pack: makes the result of the output tensors.
        begun: set when the operation was started, or has failed.
        launched: the running operation; None before it starts.
        position: the index of this operation among the operations that were fused.
        error: the reason why the operation was not started.
    """

    __slots__ = ("begun", "error", "key", "launched", "pack", "position")

    def __init__(self, key: Key, pack: Callable[[list[Tensor]], Result]) -> None:
        self.key = key
        self.pack = pack
        self.begun = threading.Event()
        self.launched: Launched | None = None
        self.position = 0
        self.error: BaseException | None = None


class Engine:
    """Runs the operations of this rank; see the module's docstring.

    Args:
        rank: the rank of this process.
        size: the number of ranks.
        places: for each process set, this rank's place in it; None if it doesn't belong to it.
        store: torch.distributed's store, which the link is set up with.
    """

    def __init__(self, rank: int, size: int, places: Mapping[int, Place | None], store: Any) -> None:
        self.rank = rank
        self.size = size
        self.places = dict(places)
        self._lock = threading.Lock()
        self._pending: dict[Key, tuple[Request, Handle[Any]]] = {}
        # When the latest operation of each name was submitted, until its result is fetched.
        self._submitted: dict[Key, float] = {}
        self._failure: HorovodInternalError | None = None
        self._unnamed: Counter[tuple[int, str]] = Counter()
        self._joined = threading.Event()
        self._last = -1
        self.link: Link = connect(rank, size, store, self)

    def submit(
        self,
        request: Request,
        name: str | None,
        numbers: Sequence[int],
        pack: Callable[[list[Tensor]], Result],
    ) -> Handle[Result]:
        """Announce an operation to rank 0, without waiting.

        Args:
            request: the operation.
            name: the operation's name on all ranks; None matches it by the order of calls.
            numbers: rows or splits, which may differ between ranks.
            pack: makes the result of the output tensors.

        Raises:
            HorovodInternalError: the ranks are disconnected.
            ConfigError: an operation of this name is running.
        """
        signature = request.signature
        data = packed(request) if signature.small else b""
        with self._lock:
            self._raise_failure()
            chosen = name is not None
            if name is None:
                kind = (signature.process_set, signature.kind)
                name = f"{signature.kind}.noname.{self._unnamed[kind]}"
                self._unnamed[kind] += 1
            key = (signature.process_set, name)
            if key in self._pending or self._is_fresh(key):
                raise ConfigError(
                    f'{signature.kind} "{name}": an operation of this name is running. Give each its own name, or '
                    "synchronize the first one before."
                )
            handle = Handle(key, pack)
            if signature.device == "cuda":
                request.ready = _event(request.tensors)
            self._pending[key] = (request, handle)
            if chosen:
                self._note(key)
        self.link.ready(name, signature, numbers, data)
        return handle

    def finish(self, handle: Handle[Result]) -> Result:
        """Wait for an operation, and return its result.

        Raises:
            MismatchError: the ranks disagree about the operation.
            HorovodInternalError: the operation can't be completed.
        """
        self._submitted.pop(handle.key, None)
        while not handle.begun.wait(TICK_S):
            self._raise_failure()
            self.link.wait(handle.key)
        if handle.error is not None:
            raise handle.error
        assert handle.launched is not None
        try:
            outputs = handle.launched.finish(TICK_S, self._raise_failure)[handle.position]
        except HorovodInternalError:
            raise
        except RuntimeError as error:
            self._await_failure()
            raise HorovodInternalError(f'"{handle.key[1]}" failed: {error}') from error
        return handle.pack(outputs)

    def done(self, handle: Handle[Any]) -> bool:
        """Return True if `finish` would return or raise at once."""
        if not handle.begun.is_set():
            return False
        done = handle.launched is None or handle.launched.done
        if done:
            self._submitted.pop(handle.key, None)
        return done

    def join(self) -> int:
        """Take part in sums with zeros until all ranks have joined. Return the rank that joined last."""
        self._joined.clear()
        self.link.join()
        while not self._joined.wait(TICK_S):
            self._raise_failure()
        return self._last

    def close(self, leaving: bool) -> None:
        """Close the link. Pending operations fail."""
        self.link.close(leaving)
        self.fail(HorovodInternalError("Horovod has been shut down."))

    def receive(self, answer: Answer) -> None:
        match answer:
            case Run():
                self._start(answer)
            case Joined(last=last):
                with self._lock:
                    # A rank that joined early has not counted the later unnamed operations of the other ranks.
                    self._unnamed.clear()
                self._last = last
                self._joined.set()
            case Refuse():
                error = MismatchError if answer.mistake else HorovodInternalError
                self._end((answer.process_set, answer.name), error(answer.text))

    def fail(self, error: HorovodInternalError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            keys = list(self._pending)
        for key in keys:
            self._end(key, self._failure)

    def _is_fresh(self, key: Key) -> bool:
        """Return True if an operation of this name was submitted a moment ago, and its result wasn't fetched."""
        submitted = self._submitted.get(key)
        return submitted is not None and time.monotonic() - submitted < CYCLE_S

    def _note(self, key: Key) -> None:
        """Note the time of an operation, and forget old ones whose results nobody fetches."""
        self._submitted[key] = time.monotonic()
        if len(self._submitted) > MOST_NOTED:
            self._submitted = {other: at for other, at in self._submitted.items() if self._is_fresh(other)}

    def _start(self, run: Run) -> None:
        place = self.places[run.process_set]
        assert place is not None
        with self._lock:
            pending = [self._pending.pop((run.process_set, name), None) for name in run.names]
        handles = [entry[1] for entry in pending if entry is not None]

        # A rank that has joined has submitted nothing, and takes part with zeros. Only its answers have signatures.
        requests = [zeros(run.signatures[index]) if entry is None else entry[0] for index, entry in enumerate(pending)]
        try:
            launched = launch(requests, run.numbers, place, run.data)
        except Exception as error:
            wrapped = HorovodInternalError(f'"{run.names[0]}" could not be started: {error}')
            wrapped.__cause__ = error
            for handle in handles:
                handle.error = wrapped
                handle.begun.set()
            return
        for position, entry in enumerate(pending):
            if entry is not None:
                _, handle = entry
                handle.launched, handle.position = launched, position
                handle.begun.set()

    def _end(self, key: Key, error: BaseException) -> None:
        with self._lock:
            _, handle = self._pending.pop(key, (None, None))
        if handle is not None:
            handle.error = error
            handle.begun.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _await_failure(self) -> None:
        """Wait a second for the reason of a failed transfer: if a process has ended, its connection closes soon."""
        for _ in range(20):
            self._raise_failure()
            time.sleep(0.05)


def _event(tensors: Sequence[Tensor]) -> Any:
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))
    return event
