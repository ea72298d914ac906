"""Which rank lives where: pure functions of the places that a gang has.

Ranks are numbered household by household, so that local ranks, nodes and the order of the world agree, as with torchrun. A
household is in the order of its first place. What a slot is (a place in the original world) is settled once for a gang:
when a slot is given up, those of the others stay where they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest


def by_household(households: Sequence[str]) -> list[int]:
    """The places, whose households these are, with those of one household together.

    >>> by_household(["a", "b", "a"])
    [0, 2, 1]
    """
    return sorted(range(len(households)), key=lambda place: households.index(households[place]))


def settle(slots: Sequence[int], households: Sequence[str]) -> dict[int, int]:
    """The place of each slot, in a gang that has one place for each.

    >>> settle([0, 1, 3], ["a", "b", "a"])
    {0: 0, 1: 2, 3: 1}
    """
    return dict(zip(slots, by_household(households), strict=True))


def shares(places: Sequence[int], households: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each household, in their order; `places` has the place of each rank.

    >>> shares([0, 2, 1], ["a", "b", "a"])
    [(0, 1), (2,)]
    """
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(households[place], []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def devices(given: Sequence[str | None]) -> str | None:
    """What a household's places were given, together: the first device of each first, as the local rank chooses by that.

    >>> devices(["0,1", "2,3"])
    '0,2,1,3'
    """
    lists = [[one for one in text.split(",") if one] for text in given if text is not None]
    if not lists:
        return None
    rounds = zip_longest(*lists)
    return ",".join(dict.fromkeys(one for devices in rounds for one in devices if one is not None))


def environment(given: Sequence[str | None], name: str) -> Mapping[str, str]:
    """The variable `name` for the workers of a household whose places were given these devices; none where nobody was."""
    found = devices(given)
    return {} if found is None else {name: found}
