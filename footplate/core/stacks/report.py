"""The stacks of all ranks as text: the sentence first, then each rank with its state, its collectives and its threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from footplate.core.stacks.analysis import LAUNCHER, explain, explain_alone
from footplate.core.stacks.snapshot import Frame, Process, ranks_of, without_ranks

_BY = {
    "answer": "",
    "signal": "faulthandler wrote these stacks, as the process held the GIL",
    "py-spy": "py-spy read these stacks, as the process did not answer",
    "": "its stacks can't be read",
}


def report_on(processes: Iterable[Process]) -> str:
    """Explain and describe some processes and those below them, such as all processes of a job.

    If there are ranks among them, the sentence is about these. Otherwise it is about each process.
    """
    processes = sorted(processes, key=lambda process: process.pid)
    ranks = ranks_of(processes)
    others = [other for process in processes if (other := without_ranks(process)) is not None]
    sentence = explain(ranks) if ranks else "; ".join(map(explain_alone, processes))
    return report(sentence, ranks, others)


def report(sentence: str, ranks: Mapping[int, Process], others: Iterable[Process] = ()) -> str:
    """Write the text.

    Args:
        sentence: the explanation; may be empty.
        ranks: the ranks.
        others: processes that are no ranks.
    """
    lines = [sentence] if sentence else []
    for rank, process in ranks.items():
        lines += ["", f"rank {rank}: " + _head(process), *_body(process, "  ")]
    for process in others:
        lines += ["", _head(process), *_body(process, "  ")]
    return "\n".join(lines).strip("\n") + "\n"


def _head(process: Process) -> str:
    waits = f" in {process.waits_in}" if process.waits_in and process.state != "running" else ""
    note = _BY[process.source] if process.state != "ended" else ""
    return f"process {process.pid} ({process.name}), {process.state}{waits}" + (f"; {note}" if note else "")


def _body(process: Process, indent: str) -> Iterator[str]:
    for collective in process.collectives:
        done = ", completed" if collective.completed else ""
        yield f"{indent}collective {collective} of {collective.group}, called {collective.age_s:.0f} s ago{done}"
    if process.idle_s is not None:
        yield f"{indent}last progress {process.idle_s:.0f} s ago"
    if process.native:
        yield f"{indent}main thread with native calls"
        yield from _frames(process.native, indent + "  ")
    for thread in sorted(process.threads, key=lambda thread: not thread.is_main):
        yield f"{indent}thread {thread.name}"
        yield from _frames(thread.frames, indent + "  ")
    for child in process.children:
        yield indent + _head(child)
        yield from _body(child, indent + "  ")


def _frames(frames: Sequence[Frame], indent: str) -> Iterator[str]:
    for frame in frames:
        if frame.file.endswith(LAUNCHER):
            return
        yield f"{indent}{frame.function}  {frame.file}" + (f":{frame.line}" if frame.line else "")
