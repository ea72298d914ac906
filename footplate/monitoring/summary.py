"""The lines at the end of a training: where its time went, how fast it was, and advice."""

from __future__ import annotations

from collections.abc import Sequence

from footplate.callbacks.progress import clock
from footplate.monitoring.evidence import Evidence
from footplate.monitoring.rules import Advice

_SMALL = 0.005


def summarise(evidence: Evidence, advice: Sequence[Advice]) -> list[str]:
    """Return the lines to print."""
    parts = sorted(evidence.seconds.items(), key=lambda item: -item[1])
    shares = [f"{_NAMES.get(cause, cause)} {evidence.share(cause):.0%}" for cause, _ in parts]
    shown = [text for text, (cause, _) in zip(shares, parts, strict=True) if evidence.share(cause) >= _SMALL]
    lines = [f"Time of {evidence.batches:,} batches, {_duration(evidence.wall_s)}: {', '.join(shown)}."]
    if rates := _rates(evidence):
        lines.append(f"{', '.join(rates)}.")
    return [*lines, *(f"Advice: {item}" for item in advice)]


_NAMES = {"step": "rest of the step", "callbacks": "hooks", "transfer": "transfer to the device"}


def _rates(evidence: Evidence) -> list[str]:
    wall_s = max(evidence.wall_s, 1e-9)
    rates = []
    if evidence.samples:
        rates.append(f"{evidence.samples / wall_s:,.4g} samples/s")
    if evidence.tokens:
        rates.append(f"{evidence.tokens / wall_s:,.4g} tokens/s")
    if evidence.flops:
        mfu = "" if evidence.mfu is None else f" ({evidence.mfu:.1%} of the device's peak)"
        rates.append(f"{_with_prefix(evidence.flops * evidence.batches / wall_s)}FLOP/s{mfu}")
    if evidence.memory_bytes:
        rates.append(f"{_with_prefix(evidence.memory_bytes)}B of memory")
    if evidence.device_memory_bytes:
        rates.append(f"{_with_prefix(evidence.device_memory_bytes)}B on the device")
    if evidence.gc_s / wall_s >= _SMALL:
        rates.append(f"{evidence.gc_s / wall_s:.0%} in Python's garbage collector")
    return rates


def _with_prefix(number: float) -> str:
    """`12.3 G` for 1.23e10."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def _duration(seconds: float) -> str:
    """`1:02:05`, `3:20` or `8.1 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return clock(seconds)
