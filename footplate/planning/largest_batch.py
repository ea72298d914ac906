"""The largest batch that fits, found with few tries, for each is a compilation of minutes.

Only sizes that hardware likes are tried: powers of two, and one and a half times them. What doesn't depend on the batch
(the state) and what grows with it (nearly everything else) give a first guess, from one program; from there it goes one
rung of the ladder up or down at a time, until a size fits and the next doesn't.
"""

from __future__ import annotations

from collections.abc import Callable


def ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, … up to `most`.

    >>> ladder(16)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    rungs = {2**power for power in range(most.bit_length())}
    rungs |= {3 * rung // 2 for rung in rungs if rung > 1}
    return sorted(rung for rung in rungs if rung <= most)


def guess(size: int, fixed: float, growing: float, limit: float, most: int = 2**20) -> int | None:
    """The largest rung that should fit; None if not even one sample does.

    Args:
        size: a batch for which the needs are known.
        fixed: bytes that don't depend on the batch.
        growing: bytes that grow with it, at this size.
        limit: bytes that there are.
        most: no size beyond is looked at.
    """
    fitting = [rung for rung in ladder(most) if fixed + growing * rung / size <= limit]
    return fitting[-1] if fitting else None


def largest(fits: Callable[[int], bool], start: int, tries: int = 6, most: int = 2**20) -> int | None:
    """The largest rung that fits; None if none of those tried does.

    Args:
        fits: says whether a size does; asked at most `tries` times.
        start: where to begin: the nearest rung from below.
        tries: when they are used up, the largest that was seen to fit is returned.
        most: no size beyond is looked at.
    """
    rungs = ladder(most)
    place = max((index for index, rung in enumerate(rungs) if rung <= start), default=0)
    best: int | None = None
    up = fits(rungs[place])
    if up:
        best = rungs[place]
    for _ in range(tries - 1):
        place += 1 if up else -1
        if not 0 <= place < len(rungs):
            break
        if fits(rungs[place]):
            best = rungs[place] if best is None else max(best, rungs[place])
            if not up:
                break
        elif up:
            break
    return best
