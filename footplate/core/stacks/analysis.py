"""From the stacks of all ranks to a sentence that says what hangs.

    explain({0: …, 1: …, 2: …, 3: …})
    "rank 3 is in its data loader's `Flowers.transform` (flowers.py:31) since 41 s; ranks 0, 1 and 2 wait for it in
    all_reduce 1,204"

A rank *waits* if its main thread is in a collective. A rank that doesn't wait is the one that the other ranks wait for. If
all ranks wait, they wait for different collectives, or the network between them is broken.

`where` describes a rank by its frames, from the most recent one:

    a collective of torch           waits in it; number and time are those of the flight recorder
    a loader that waits             the loader's worker process or thread, and where that is
    the user's code                 the first call that isn't in a library
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from footplate.core.stacks.snapshot import Collective, Frame, Process, Thread

# Calls of torch that wait for other ranks. A rank sleeps in them, or in C++ code below them.
_COLLECTIVE = re.compile(
    r"/torch/(distributed/(?!launch|run|elastic|checkpoint)|nn/parallel/distributed\.py|_C/_distributed)"
)
_BACKWARD = re.compile(r"/torch/(autograd/(graph|__init__)\.py|_tensor\.py)$")
_BLOCKS = re.compile(
    r"(/lib/python3\.\d+/(threading|queue|selectors|socket|ssl|subprocess|multiprocessing/\w+|concurrent/futures/\w+)\.py|"
    r"/torch/multiprocessing/\w+\.py)$"
)
_FOOTPLATE = re.compile(
    r"/footplate/(core|hardware|distributed|data|launch|step|checkpoint|callbacks|tracking|training|jobs|compat|demo|"
    r"planning|scaling|server|cli)/"
)
_LIBRARY = re.compile(r"(/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen )")
_LOADER = re.compile(r"(/torch/utils/data/|/footplate/data/)")
_LOADER_WORKER = re.compile(r"/torch/utils/data/_utils/worker\.py$")
_CHECKPOINT = re.compile(r"(/footplate/checkpoint/|/footplate/training/saving\.py$|/torch/distributed/checkpoint/)")
_DEFAULT_GROUP = "default_pg"  # torch's name
LAUNCHER = "/footplate/launch/bootstrap.py"  # below the function of a launch there is only the launcher
_SETUP = {"init_process_group", "new_group", "_store_based_barrier", "rendezvous", "_create_c10d_store"}
_STATES = {
    "stopped": "is stopped (SIGSTOP): it can't answer before it gets SIGCONT",
    "traced": "is stopped by a debugger",
    "uninterruptible": "is in the kernel and can't be interrupted, as with a disk or a network file system that hangs",
    "ended": "has ended",
}


@dataclass(frozen=True)
class Where:
    """Where a rank is.

    Attributes:
        text: to be read after "rank 3 ".
        waits_for: the collective in which it waits for the other ranks; None if it doesn't wait.
        since_s: for how long; None if it isn't known.
        in_setup: it waits until the other ranks join.
    """

    text: str
    waits_for: Collective | None = None
    since_s: float | None = None
    in_setup: bool = False

    @property
    def waits(self) -> bool:
        """True if it waits for other ranks."""
        return self.waits_for is not None or self.in_setup


def explain(ranks: Mapping[int, Process], late: Collection[int] = ()) -> str:
    """Say in one sentence which rank is where, and which ranks wait for it. Empty without ranks.

    Args:
        ranks: the ranks that have answered, or whose state is known.
        late: ranks that hang for another reason than their stack: they give no sign of life.
    """
    if not ranks:
        return ""
    places = {rank: where(process) for rank, process in ranks.items()}
    places = _reconsidered(ranks, places)
    waiting = {rank: place for rank, place in places.items() if place.waits and rank not in late}
    others = {rank: place for rank, place in places.items() if rank not in waiting}
    places |= {rank: Where("did not answer") for rank in late if rank not in ranks}
    others |= {rank: place for rank, place in places.items() if rank not in ranks}
    # A message may be cut, so ranks that are late come first.
    groups = _grouped({rank: place.text for rank, place in others.items()})
    groups.sort(key=lambda group: not set(group[1]) & set(late))
    clauses = [
        _subject(group) + " " + _with_since(_plural(text, group), [places[rank] for rank in group])
        for text, group in groups
    ]
    culprits = len(others)
    waits = [
        f"{_subject(group)} {'wait' if len(group) > 1 else 'waits'}{_for_whom(culprits)} in {_name(key)}"
        + ("" if culprits else _called_by(ranks[group[0]]) + _longest(group, places))
        for key, group in _grouped({rank: _waits_in(place) for rank, place in waiting.items()})
    ]
    sentence = "; ".join([*clauses, *waits])
    if not culprits and len(waiting) > 1:
        sentence += _all_wait(waiting, ranks)
    return sentence


def explain_alone(process: Process) -> str:
    """Say in one sentence where a process is that has no ranks beside it."""
    place = where(process)
    return f"process {process.pid} " + _with_since(place.text, [place])


def where(process: Process) -> Where:
    """Say where a rank is."""
    if process.state in ("stopped", "traced", "ended", "uninterruptible"):
        place = _in_user_code(process.main)
        return Where(_STATES[process.state] + (f"; it {place}" if place else ""), since_s=process.idle_s)
    if not process.main:
        return Where("did not answer, and its stack can't be read: install py-spy to see it", since_s=process.idle_s)

    if _has_done_its_work(process.main):
        return Where("has done its work, and waits for the other ranks to end")
    frames = process.main
    if any(frame.function.rpartition(".")[2] in _SETUP for frame in frames) and _COLLECTIVE.search(frames[0].file):
        return Where("waits until the other ranks join", in_setup=True)
    latest = process.latest
    if latest is not None and not latest.completed and _waits_by_stack(process):
        return Where(f"waits in {latest}", latest, latest.age_s)
    if _COLLECTIVE.search(frames[0].file) and process.state == "asleep":
        unknown = Collective("", _operation(frames), 0, 0.0)
        return Where(f"waits in {unknown.operation}", unknown)
    return Where(_at_work(process), since_s=_busy_since(process))


def _waits_by_stack(process: Process) -> bool:
    """Return True if the main thread is in a collective, or in a backward pass that sleeps, as DDP's does."""
    top = process.main[0]
    return bool(_COLLECTIVE.search(top.file)) or (process.state == "asleep" and bool(_BACKWARD.search(top.file)))


def _reconsidered(ranks: Mapping[int, Process], places: Mapping[int, Where]) -> dict[int, Where]:
    """Correct ranks whose stack looks like waiting, but whose collective has an effect only in comparison.

    In a backward pass, a rank that sleeps waits only if another rank hasn't called a later collective of the group.
    """
    newest: dict[str, int] = {}
    for process in ranks.values():
        for collective in process.collectives:
            newest[collective.group] = max(newest.get(collective.group, 0), collective.number)
    changed = dict(places)
    for rank, place in places.items():
        process = ranks[rank]
        if place.waits_for is None or not process.main or _COLLECTIVE.search(process.main[0].file):
            continue
        if place.waits_for.number < newest.get(place.waits_for.group, 0):
            changed[rank] = Where(_at_work(process), since_s=_busy_since(process))
    return changed


def _has_done_its_work(frames: Sequence[Frame]) -> bool:
    """Return True if a worker's function has returned, so that only the launcher's calls are left, and calls that block."""
    launcher = next((index for index, frame in enumerate(frames) if frame.file.endswith(LAUNCHER)), None)
    if launcher is None:
        return False
    return frames[launcher].function in ("main", "_exit") and all(
        _BLOCKS.search(frame.file) for frame in frames[:launcher]
    )


def _at_work(process: Process) -> str:
    """Say where a rank is that doesn't wait for other ranks."""
    frames = process.main
    blocks = bool(_BLOCKS.search(frames[0].file))
    if blocks and any(_LOADER.search(frame.file) for frame in frames):
        return _in_loader(process)
    if blocks and any(_CHECKPOINT.search(frame.file) for frame in frames):
        busy = next(filter(None, (_helper(thread, _CHECKPOINT) for thread in process.threads)), None)
        if busy is not None:
            return f"waits for its checkpoint: the thread {busy[0]} {busy[1]}"
    return _in_user_code(frames) or f"is in {frames[0]}"


def _in_loader(process: Process) -> str:
    """Say where the loader is that the main thread waits for: in a worker process, or in a thread."""
    workers = [child for child in process.tree() if child is not process]
    stuck = [worker for worker in workers if worker.state in ("stopped", "traced", "uninterruptible", "ended")]
    if stuck:
        return f"waits for its data loader's worker (process {stuck[0].pid}), which {_STATES[stuck[0].state]}"
    for worker in workers:
        frames = worker.main
        if frames and any(_LOADER.search(frame.file) for frame in frames) and not _idle_worker(frames):
            return f"waits for its data loader's worker (process {worker.pid}), which {_in_user_code(frames)}"
    for thread in process.threads:
        helper = None if thread.is_main else _helper(thread, _LOADER)
        if helper is not None:
            return f"waits for its data loader, whose thread {helper[0]} {helper[1]}"
    silent = [worker for worker in workers if not worker.main and "python" in worker.name]
    if silent:
        pids = _listed([str(worker.pid) for worker in silent])
        return (
            f"waits for its data loader's worker{'s' if len(silent) > 1 else ''} (process {pids}), whose stack can't be "
            "read: install py-spy to see it"
        )
    return _in_user_code(process.main) or f"waits for its data loader in {process.main[0]}"


def _idle_worker(frames: Sequence[Frame]) -> bool:
    """Return True if a loader's worker waits for work: nothing but the loader's loop is below the blocking calls."""
    return bool(_BLOCKS.search(frames[0].file)) and bool(_LOADER_WORKER.search(_first_not_blocking(frames).file))


def _first_not_blocking(frames: Sequence[Frame]) -> Frame:
    return next((frame for frame in frames if not _BLOCKS.search(frame.file)), frames[-1])


def _helper(thread: Thread, part: re.Pattern[str]) -> tuple[str, str] | None:
    """Name and place of a thread that works for a part of Footplate; None if it waits for work, or does other work."""
    frames = thread.frames
    if thread.is_main or not frames:
        return None
    works = any(part.search(frame.file) for frame in frames) or thread.name.startswith(("footplate-", "ThreadPool"))
    user = next((frame for frame in frames if not _is_library(frame)), None)
    if not works or (_BLOCKS.search(frames[0].file) and user is None):
        return None
    return thread.name, _in_user_code(frames) or f"is in {frames[0]}"


def _in_user_code(frames: Sequence[Frame]) -> str:
    """`is in its data loader's ...`: the innermost call that isn't a library's; empty without frames.

    If there is none, the innermost call of Footplate, or of any library.
    """
    if not frames:
        return ""
    user = next((frame for frame in frames if not _is_library(frame)), None)
    ours = next((frame for frame in frames if _FOOTPLATE.search(frame.file)), None)
    frame = user or ours or frames[0]
    outer = frames[frames.index(frame) :]
    owner = ""
    if any(_CHECKPOINT.search(outside.file) for outside in outer):
        return f"writes a checkpoint, in {frame}" + _inside(frames, frame)
    if user is not None and _nearest_is_loader(outer):
        owner = "its data loader's "
    return f"is in {owner}{frame}" + _inside(frames, frame)


def _nearest_is_loader(outer: Sequence[Frame]) -> bool:
    """Return True if the library that has called the user's code is a loader."""
    caller = next((frame for frame in outer if _is_library(frame)), None)
    return caller is not None and bool(_LOADER.search(caller.file))


def _inside(frames: Sequence[Frame], frame: Frame) -> str:
    """The library's call below the user's, if there is one."""
    return "" if frames[0] is frame else f", which is in {frames[0].function}"


def _is_library(frame: Frame) -> bool:
    return bool(_LIBRARY.search(frame.file) or _FOOTPLATE.search(frame.file))


def _operation(frames: Sequence[Frame]) -> str:
    """The collective's name: the call nearest to the user's code that torch.distributed defines."""
    name = frames[0].function
    for frame in frames:
        if not _COLLECTIVE.search(frame.file):
            break
        if frame.file.endswith("distributed_c10d.py"):
            name = frame.function
    return name.rpartition(".")[2]


def _busy_since(process: Process) -> float | None:
    """The time since a rank last did something that is known: a step, or the call of a collective."""
    times = [time for time in (process.idle_s, process.latest and process.latest.age_s) if time is not None]
    return min(times, default=None)


def _waits_in(place: Where) -> str:
    if place.waits_for is None:
        return "setup"
    return f"{place.waits_for.group}/{place.waits_for.operation}/{place.waits_for.number}"


def _name(key: str) -> str:
    """The collective in words, with its group unless that is the default one."""
    if key == "setup":
        return "the setup of torch.distributed, until all ranks join"
    process_group, operation, number = key.rsplit("/", 2)
    text = f"{operation} {int(number):,}" if int(number) else operation
    return text + (f" of the process group {process_group!r}" if process_group not in ("", _DEFAULT_GROUP) else "")


def _called_by(process: Process) -> str:
    """The user's call of a collective; empty if a library calls it."""
    frame = next((frame for frame in process.main if not _is_library(frame)), None)
    caller = process.main[process.main.index(frame) - 1] if frame else None
    direct = caller is not None and _COLLECTIVE.search(caller.file)
    return f", called by {frame}," if direct else ""


def _longest(group: Sequence[int], places: Mapping[int, Where]) -> str:
    """For how long the ranks wait."""
    times = [time for time in (places[rank].since_s for rank in group) if time is not None]
    return f" since {_seconds(max(times))}" if times else ""


def _plural(text: str, group: Sequence[int]) -> str:
    """The text for one or several ranks."""
    verb, _, rest = text.partition(" ")
    if len(group) == 1:
        return text
    return {"is": "are", "waits": "wait", "writes": "write", "has": "have", "did": "did"}[verb] + f" {rest}".replace(
        " its ", " their ", 1
    )


def _for_whom(culprits: int) -> str:
    return {0: "", 1: " for it"}.get(culprits, " for them")


def _all_wait(waiting: Mapping[int, Where], ranks: Mapping[int, Process]) -> str:
    """Say why no rank goes on, if all ranks wait."""
    if any(place.in_setup for place in waiting.values()):
        return ": a rank is missing, or can't be reached"
    if len({_waits_in(place) for place in waiting.values()}) == 1:
        return ": all ranks have called it, so the network between them is broken or slow"
    return f": the ranks call different collectives, so they wait for each other{_missed(waiting, ranks)}"


def _missed(waiting: Mapping[int, Where], ranks: Mapping[int, Process]) -> str:
    """Name the ranks that haven't called a collective in which another rank waits."""
    missed = []
    for collective in {_waits_in(place): place.waits_for for place in waiting.values()}.values():
        assert collective is not None
        behind = [
            rank
            for rank, process in ranks.items()
            if any(own.group == collective.group and own.number < collective.number for own in process.collectives)
        ]
        if behind:
            has = "hasn't" if len(behind) == 1 else "haven't"
            missed.append(f". R{_subject(behind)[1:]} {has} called {collective}")
    return "".join(missed)


def _with_since(text: str, places: Sequence[Where]) -> str:
    times = [place.since_s for place in places if place.since_s is not None]
    return text + (f" since {_seconds(min(times))}" if times else "")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1 else "less than 1 s"


def _grouped(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Ranks by text, in the order of their first rank."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def _subject(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(_runs(ranks))}"


def _runs(ranks: Iterable[int]) -> list[str]:
    """Ranks as words: three or more in a row become `0-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 3 else [str(rank) for rank in run]
    return words


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def unchanged(before: Mapping[int, Process], after: Mapping[int, Process], between_s: float) -> bool:
    """Return True if no rank has moved between two looks: the same calls, the same collectives, and no progress.

    Args:
        before: the ranks at the first look.
        after: the ranks at the second look.
        between_s: the time between the looks.
    """
    if any(process.idle_s is not None and process.idle_s < between_s for process in after.values()):
        return False
    return before.keys() == after.keys() and all(_position(before[rank]) == _position(after[rank]) for rank in before)


def _position(process: Process) -> tuple[object, ...]:
    """The main thread's calls and the latest collectives, without times."""
    collectives = tuple(replace(collective, age_s=0.0) for collective in process.collectives)
    return process.main, collectives
