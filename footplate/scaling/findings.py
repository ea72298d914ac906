"""What a study's figures say, in sentences: pure functions of the figures.

In this order: what the largest size brings; where adding processes stops paying; what share of the work Amdahl's law takes
for serial; where the time goes; what becomes of the validation loss; what failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from footplate.scaling.results import PAYS, Size, base_of, serial_share, stops_paying

WORDS = {"step": "steps", "data": "waiting for batches", "validation": "validation", "other": "the rest"}
ALIKE = 0.05  # part by which two times may differ and count as the same


def read(sizes: Sequence[Size], monitor: str = "val_loss", lr_rule: str = "linear") -> str:
    """The figures of a study in some sentences.

    Args:
        sizes: from `summarise`.
        monitor: what the validation loss is called.
        lr_rule: by which the learning rate grew.
    """
    base = base_of(sizes)
    if base is None:
        return " ".join(["No training succeeded.", *_failures(sizes)])
    done = [size for size in sizes if size.done]
    largest = done[-1]
    said: list[str | None]
    if largest is base:
        said = [
            f"{_processes(base)} took {_seconds(base)}; with one size there is nothing to compare.",
            _times(base, base),
        ]
    else:
        said = [
            _gain(largest, base),
            _end(done),
            _amdahl(done, base),
            _times(largest, base),
            _loss(largest, base, monitor),
        ]
    said += [_divergence(size, monitor, lr_rule) for size in done if size.diverged]
    return " ".join([*filter(None, said), *_failures(sizes)])


def core_notes(sizes: Sequence[Size], cores: int | None) -> tuple[str, ...]:
    """What must be known of a machine's cores to read a study on its CPU.

    Args:
        sizes: from `summarise`.
        cores: of the machine that had all processes; None when they were elsewhere.
    """
    done = [size for size in sizes if size.done and size.device in ("", "cpu")]
    if cores is None or not done:
        return ()
    notes = [f"{size.np} processes share {_cores(cores)}." for size in done if size.np > cores]
    base = done[0]
    if base.threads > 1 and len(done) > 1 and base.np * base.threads >= cores:
        notes.append(
            f"{_processes(base)} computed with {base.threads} threads each, which is all of {_cores(cores)}: more "
            "processes share these, and add no hardware. With OMP_NUM_THREADS=1 in the environment, a core is a device."
        )
    return tuple(notes)


def _gain(size: Size, base: Size) -> str:
    times = f"{_processes(size)} took {_seconds(size)} where {base.np} took {_seconds(base)}"
    return f"{times}: efficiency {size.efficiency:.2f}."


def _end(done: Sequence[Size]) -> str:
    end = stops_paying(done)
    if end is None:
        return f"Adding processes pays up to {done[-1].np}, the most that were tried."
    assert end.efficiency is not None
    why = (
        f"the efficiency is below {PAYS:g} ({end.efficiency:.2f})"
        if end.efficiency < PAYS
        else "they are no faster than fewer"
    )
    return f"Adding processes stops paying at {end.np}: {why}."


def _amdahl(done: Sequence[Size], base: Size) -> str | None:
    share = serial_share({size.np / base.np: size.speedup for size in done if size.speedup is not None})
    if share is None:
        return None
    if share < 0.005:
        return "By Amdahl's law no serial share shows."
    if share > 0.995:
        return "By Amdahl's law the whole of the work is serial."
    return (
        f"By Amdahl's law {share:.0%} of the work is serial, so that no number of processes is more than {1 / share:.1f} "
        f"times as fast as {base.np}."
    )


def _times(size: Size, base: Size) -> str | None:
    shares = size.shares
    if not shares:
        return None
    first, *others = sorted(shares, key=lambda name: -shares[name])
    parts = [
        f"{shares[first]:.0%} went into {WORDS[first]}",
        *(f"{shares[one]:.0%} into {WORDS[one]}" for one in others),
    ]
    sentence = f"Of the time of {size.np}, {', '.join(parts)}"
    if size is base or not size.step_s or not base.step_s:
        return sentence + "."
    ratio = size.step_s / base.step_s
    if abs(ratio - 1) <= ALIKE:
        return f"{sentence}; a step took as long as with {base.np}."
    why = ", for the exchange of gradients and for what the processes share" if ratio > 1 else ""
    return f"{sentence}; a step took {ratio:.2f} times as long as with {base.np}{why}."


def _loss(size: Size, base: Size, monitor: str) -> str | None:
    if size.loss is None or base.loss is None:
        return None
    ends = f"{monitor} ended at {size.loss.median:.4g} with {size.np} and {base.loss.median:.4g} with {base.np}"
    if min(size.done, base.done) < 2:
        return f"{ends}, each trained once, so that chance can't be told from size."
    return f"{ends}, {'further apart than repeats are' if size.loss.apart(base.loss) else 'within what repeats differ by'}."


def _divergence(size: Size, monitor: str, lr_rule: str) -> str:
    advice = "" if lr_rule == "none" else f" Its learning rate was {size.lr_factor:.3g} times that of one process."
    how_many = f"{size.diverged} of {size.done} trainings"
    return f"With np={size.np}, {monitor} was no finite number at the end of {how_many}.{advice}"


def _failures(sizes: Iterable[Size]) -> list[str]:
    return [
        f"np={size.np} failed{' in part' if size.done else ''}: {'; '.join(size.failures).rstrip('.')}."
        for size in sizes
        if size.failures
    ]


def _processes(size: Size) -> str:
    return "1 process" if size.np == 1 else f"{size.np} processes"


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _seconds(size: Size) -> str:
    assert size.seconds is not None
    return duration(size.seconds.median)


def duration(seconds: float) -> str:
    """Seconds for people, in three figures or more.

    >>> duration(0.01234), duration(12.34), duration(1234.5)
    ('0.0123 s', '12.3 s', '1,234 s')
    """
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
