"""Search for the largest batch that fits, with few tries: each try is a compilation, which may take minutes.

The search tries only sizes that hardware handles well: powers of two, and one and a half times those. The first guess comes
from one program: the memory that doesn't depend on the batch (the state) and the memory that grows with it (nearly
everything else). From there the search goes up or down one size at a time, until a size fits and the next one doesn't.
"""

from __future__ import annotations

from collections.abc import Callable


def ladder(most: int) -> list[int]:
    """List the sizes 1, 2, 3, 4, 6, 8, 12, 16, … up to `most`.

    >>> ladder(16)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    rungs = {2**power for power in range(most.bit_length())}
    rungs |= {3 * rung // 2 for rung in rungs if rung > 1}
    return sorted(rung for rung in rungs if rung <= most)


def guess(size: int, fixed: float, growing: float, limit: float, most: int = 2**20) -> int | None:
    """Guess the largest size that fits; None if not even one sample does.

    Args:
        size: a batch size with known needs.
        fixed: the bytes that don't depend on the batch.
        growing: the bytes that grow with the batch, at this size.
        limit: the bytes of the device.
        most: the largest size to consider.
    """
    fitting = [rung for rung in ladder(most) if fixed + growing * rung / size <= limit]
    return fitting[-1] if fitting else None


def largest(fits: Callable[[int], bool], start: int, tries: int = 6, most: int = 2**20) -> int | None:
    """Search for the largest size that fits; None if none of the tried sizes does.

    Args:
        fits: returns True if a size fits; it is called at most `tries` times.
        start: the search begins at the nearest size that isn't larger.
        tries: after this many, the largest size that fitted is returned.
        most: the largest size to consider.
    """
    rungs = ladder(most)
    index = max((index for index, rung in enumerate(rungs) if rung <= start), default=0)
    best: int | None = None
    up = fits(rungs[index])
    if up:
        best = rungs[index]
    for _ in range(tries - 1):
        index += 1 if up else -1
        if not 0 <= index < len(rungs):
            break
        if fits(rungs[index]):
            best = rungs[index] if best is None else max(best, rungs[index])
            if not up:
                break
        elif up:
            break
    return best
