"""The heart of a rank: takes operations, starts each when all ranks have it, and keeps their results until asked.

    submit(…)  ──►  link.ready  ──►  rank 0's table  ──►  receive(Run)  ──►  launch  ──►  finish(handle)
    any thread                                            one thread at a time, the     whoever wants
                                                          same order on all ranks       the result

While a backward pass runs, its hooks submit; answers come in on the link's thread, which starts the transfers; so both go
on at once. A handle that waits for more than a second says so to rank 0, which can tell when nobody can go on.
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

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """An operation that was submitted, for `poll` and `synchronize`."""

    __slots__ = ("begun", "error", "key", "launched", "pack", "position")

    def __init__(self, key: Key, pack: Callable[[list[Tensor]], Result]) -> None:
        self.key = key
        self.pack = pack
        self.begun = threading.Event()
        self.launched: Launched | None = None
        self.position = 0  # among the operations that were fused
        self.error: BaseException | None = None


class Engine:
    """See the module's docstring.

    Args:
        rank: this one.
        size: how many ranks there are.
        places: of each process set, this rank's place in it, if it has one.
        store: torch.distributed's, for the link to be made.
    """

    def __init__(self, rank: int, size: int, places: Mapping[int, Place | None], store: Any) -> None:
        self.rank = rank
        self.size = size
        self.places = dict(places)
        self._lock = threading.Lock()
        self._pending: dict[Key, tuple[Request, Handle[Any]]] = {}
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
        """Announce an operation; doesn't wait.

        Args:
            request: what is to be done.
            name: by which it is known on all ranks; None to be matched by the order of calls.
            numbers: rows or splits, which may differ between ranks.
            pack: what `finish` makes of the output tensors.

        Raises:
            HorovodInternalError: the ranks are apart.
            ConfigError: an operation of this name is under way.
        """
        signature = request.signature
        data = packed(request) if signature.small else b""
        with self._lock:
            self._look()
            if name is None:
                kind = (signature.process_set, signature.kind)
                name = f"{signature.kind}.noname.{self._unnamed[kind]}"
                self._unnamed[kind] += 1
            key = (signature.process_set, name)
            if key in self._pending:
                raise ConfigError(
                    f'{signature.kind} "{name}": an operation of this name is under way. Give each its own name, or '
                    "synchronize the first one before."
                )
            handle = Handle(key, pack)
            if signature.device == "cuda":
                request.ready = _event(request.tensors)
            self._pending[key] = (request, handle)
        self.link.ready(name, signature, numbers, data)
        return handle

    def finish(self, handle: Handle[Result]) -> Result:
        """Wait for an operation; its result.

        Raises:
            MismatchError: the ranks don't agree on it.
            HorovodInternalError: it can't be completed.
        """
        while not handle.begun.wait(TICK_S):
            self._look()
            self.link.wait(handle.key)
        if handle.error is not None:
            raise handle.error
        assert handle.launched is not None
        try:
            outputs = handle.launched.finish(TICK_S, self._look)[handle.position]
        except HorovodInternalError:
            raise
        except RuntimeError as error:
            self._look_again()
            raise HorovodInternalError(f'"{handle.key[1]}" failed: {error}') from error
        return handle.pack(outputs)

    def done(self, handle: Handle[Any]) -> bool:
        """Whether `finish` would return, or raise, at once."""
        if not handle.begun.is_set():
            return False
        return handle.launched is None or handle.launched.done

    def join(self) -> int:
        """Take part with zeros until all ranks have joined; the last one that has."""
        self._joined.clear()
        self.link.join()
        while not self._joined.wait(TICK_S):
            self._look()
        return self._last

    def close(self, leaving: bool) -> None:
        """End it; what is pending fails."""
        self.link.close(leaving)
        self.fail(HorovodInternalError("Horovod has been shut down."))

    def receive(self, answer: Answer) -> None:
        match answer:
            case Run():
                self._start(answer)
            case Joined(last=last):
                with self._lock:
                    self._unnamed.clear()  # those who joined early have not counted what the others did
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

    def _start(self, run: Run) -> None:
        place = self.places[run.process_set]
        assert place is not None
        with self._lock:
            found = [self._pending.pop((run.process_set, name), None) for name in run.names]
        handles = [one[1] for one in found if one is not None]
        requests = [zeros(run.signatures[index]) if one is None else one[0] for index, one in enumerate(found)]
        try:
            launched = launch(requests, run.numbers, place, run.data)
        except Exception as error:
            wrapped = HorovodInternalError(f'"{run.names[0]}" could not be started: {error}')
            wrapped.__cause__ = error
            for handle in handles:
                handle.error = wrapped
                handle.begun.set()
            return
        for position, one in enumerate(found):
            if one is not None:
                one[1].launched, one[1].position = launched, position
                one[1].begun.set()

    def _end(self, key: Key, error: BaseException) -> None:
        with self._lock:
            _, handle = self._pending.pop(key, (None, None))
        if handle is not None:
            handle.error = error
            handle.begun.set()

    def _look(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _look_again(self) -> None:
        """A transfer has failed: if that is because a process has ended, its connection is about to tell."""
        for _ in range(20):
            self._look()
            time.sleep(0.05)


def _event(tensors: Sequence[Tensor]) -> Any:
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))
    return event
