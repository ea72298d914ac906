"""The findings of a study, as sentences: pure functions of its results.

They come in this order: the gain of the largest size; the size at which adding processes stops paying; the serial share by
Amdahl's law; the time by phase; the validation loss; the failures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from footplate.scaling.results import PAYS, Size, base_of, serial_share, stops_paying

WORDS = {"step": "steps", "data": "waiting for batches", "validation": "validation", "other": "the rest"}

# Two times that differ by at most this part count as equal.
SAME = 0.05


def read(sizes: Sequence[Size], monitor: str = "val_loss", lr_rule: str = "linear") -> str:
    """Describe the results of a study in some sentences.

    Args:
        sizes: the sizes, from `summarise`.
        monitor: the name of the validation loss.
        lr_rule: the rule by which the learning rate grew.
    """
    base = base_of(sizes)
    if base is None:
        return " ".join(["No training succeeded.", *_failures(sizes)])

    done = [size for size in sizes if size.done]
    largest = done[-1]
    sentences: list[str | None]
    if largest is base:
        sentences = [
            f"{_processes(base)} took {_seconds(base)}; with one size there is nothing to compare.",
            _phases(base, base),
        ]
    else:
        sentences = [
            _gain(largest, base),
            _paying(done),
            _amdahl(done, base),
            _phases(largest, base),
            _loss(largest, base, monitor),
        ]
    sentences += [_divergence(size, monitor, lr_rule) for size in done if size.diverged]
    return " ".join([*filter(None, sentences), *_failures(sizes)])


def core_notes(sizes: Sequence[Size], cores: int | None) -> tuple[str, ...]:
    """Write the notes about cores that a study on a CPU needs.

    Args:
        sizes: the sizes, from `summarise`.
        cores: the cores of the machine that ran all processes; None if several machines ran them.
    """
    done = [size for size in sizes if size.done and size.device in ("", "cpu")]
    if cores is None or not done:
        return ()
    notes = [f"{size.np} processes share {_cores(cores)}." for size in done if size.np > cores]
    base = done[0]
    if base.threads > 1 and len(done) > 1 and base.np * base.threads >= cores:
        notes.append(
            f"{_processes(base)} computed with {base.threads} threads each, which is all of {_cores(cores)}. More "
            "processes share these cores, and add no hardware. Set OMP_NUM_THREADS=1 to make each core a device."
        )
    return tuple(notes)


def _gain(size: Size, base: Size) -> str:
    times = f"{_processes(size)} took {_seconds(size)}, and {base.np} took {_seconds(base)}"
    return f"{times}: efficiency {size.efficiency:.2f}."


def _paying(done: Sequence[Size]) -> str:
    end = stops_paying(done)
    if end is None:
        return f"Adding processes pays up to {done[-1].np}, the largest size of the study."
    assert end.efficiency is not None
    reason = (
        f"the efficiency is below {PAYS:g} ({end.efficiency:.2f})"
        if end.efficiency < PAYS
        else "they are no faster than fewer processes"
    )
    return f"Adding processes stops paying at {end.np}: {reason}."


def _amdahl(done: Sequence[Size], base: Size) -> str | None:
    share = serial_share({size.np / base.np: size.speedup for size in done if size.speedup is not None})
    if share is None:
        return None
    if share < 0.005:
        return "By Amdahl's law, none of the work is serial."
    if share > 0.995:
        return "By Amdahl's law, the whole of the work is serial."
    return (
        f"By Amdahl's law, {share:.0%} of the work is serial, so no number of processes is more than {1 / share:.1f} "
        f"times as fast as {base.np}."
    )


def _phases(size: Size, base: Size) -> str | None:
    shares = size.shares
    if not shares:
        return None
    first, *others = sorted(shares, key=lambda name: -shares[name])
    parts = [
        f"{shares[first]:.0%} went into {WORDS[first]}",
        *(f"{shares[phase]:.0%} into {WORDS[phase]}" for phase in others),
    ]
    sentence = f"Of the time of {_processes(size)}, {', '.join(parts)}"
    if size is base or not size.step_s or not base.step_s:
        return sentence + "."
    ratio = size.step_s / base.step_s
    if abs(ratio - 1) <= SAME:
        return f"{sentence}; a step took as long as with {base.np}."
    reason = ", because of the exchange of gradients and the shared hardware" if ratio > 1 else ""
    return f"{sentence}; a step took {ratio:.2f} times as long as with {base.np}{reason}."


def _loss(size: Size, base: Size, monitor: str) -> str | None:
    if size.loss is None or base.loss is None:
        return None
    ends = f"{monitor} ended at {size.loss.median:.4g} with {size.np} and {base.loss.median:.4g} with {base.np}"
    if min(size.done, base.done) < 2:
        return f"{ends}; each was trained once, so the difference may be chance."
    spread = "more than repeats differ" if size.loss.apart(base.loss) else "within the difference between repeats"
    return f"{ends}, {spread}."


def _divergence(size: Size, monitor: str, lr_rule: str) -> str:
    advice = "" if lr_rule == "none" else f" Its learning rate was {size.lr_factor:.3g} times that of one process."
    how_many = f"{size.diverged} of {size.done} trainings"
    return f"With np={size.np}, {monitor} was not finite at the end of {how_many}.{advice}"


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
    """Format seconds with at least three digits.

    >>> duration(0.01234), duration(12.34), duration(1234.5)
    ('0.0123 s', '12.3 s', '1,234 s')
    """
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
