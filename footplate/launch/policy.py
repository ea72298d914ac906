"""The policy of restarts: what follows a failed attempt, as a pure function of the failures so far.

    decide(restarts, state, failure)  ->  Again(state, delay_s, …)  or  GiveUp(why)

The rules, in this order:

1. A user's mistake (a `FootplateError`) is never tried again.
2. With `min_world_size`, a slot (a rank of the original world, and so a device) is given up if it can't be started, or if
   it caused `drop_after` failures in a row without progress. The next attempt has one rank fewer. That costs no restart, as
   the number of slots limits it.
3. If two attempts in a row end with the same exception (the same type and message) without progress in between, the code is
   at fault, and there is no other attempt. There are two exceptions from this rule: the error is about something outside of
   the code, such as a connection or a disk (`failure.may_pass`); or it is raised on one slot again and again, which rule 2
   may still give up.
4. Failures of the host have a budget of their own, `max_host_restarts`. All other failures share `max_restarts`.
5. The first restart comes at once, the next ones after 1, 2, 4 … seconds up to `max_delay_s`. After progress, the pauses
   begin again from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from footplate.launch.failure import Failure

SAME_FAILURE = (
    "as in the attempt before it, with no progress in between: the code is at fault, so there is no other attempt"
)


@dataclass(frozen=True)
class Restarts:
    """Settings of restarts: the number of further attempts of a launch, and of their ranks.

    Args:
        max_restarts: the number of failures that another attempt follows; 0 to end with the first failure.
        max_host_restarts: the same for failures of the machine or the launcher.
        max_delay_s: the longest pause before an attempt.
        min_world_size: continue with fewer ranks, but not with fewer than this; None to keep all.
        drop_after: the number of failures in a row, without progress, after which a slot is given up.
        peers_grace_s: the time that the other ranks have to end when a rank has failed.

    Examples:
        >>> from footplate.launch import Restarts
        >>> Restarts(max_restarts=5, min_world_size=4)  # goes on with fewer ranks, but not with fewer than four
        Restarts(max_restarts=5, max_host_restarts=10, max_delay_s=60.0, min_world_size=4, drop_after=2, peers_grace_s=5.0)
    """

    max_restarts: int = 3
    max_host_restarts: int = 10
    max_delay_s: float = 60.0
    min_world_size: int | None = None
    drop_after: int = 2
    peers_grace_s: float = 5.0


@dataclass(frozen=True)
class State:
    """The history of a launch, as far as decisions need it.

    Attributes:
        slots: the ranks of the original world that are still used; the present rank is the index into it.
        restarts: the number of `max_restarts` that are used.
        host_restarts: the number of `max_host_restarts` that are used.
        barren: the number of attempts in a row without progress.
        suspect: the slot that caused the failure of the latest of them.
        suspected: how many of them in a row it caused.
        raised: the exception that ended the latest attempt, in one line; empty if something else ended it.
    """

    slots: tuple[int, ...]
    restarts: int = 0
    host_restarts: int = 0
    barren: int = 0
    suspect: int | None = None
    suspected: int = 0
    raised: str = ""


@dataclass(frozen=True)
class Again:
    """The decision for another attempt.

    Attributes:
        state: the state that it begins with.
        delay_s: how long to wait before it.
        dropped: the slot that is given up; None if all are kept.
        budget: the number of this restart, and the limit, in words.
    """

    state: State
    delay_s: float
    dropped: int | None
    budget: str


@dataclass(frozen=True)
class GiveUp:
    """The decision against another attempt. `why` is in words; it is empty if the failure alone explains it."""

    why: str


def decide(restarts: Restarts, state: State, failure: Failure, progressed: bool) -> Again | GiveUp:
    """Decide what follows the failure of an attempt.

    Args:
        restarts: the limits.
        state: the state that the attempt began with.
        failure: the failure that ended it.
        progressed: whether the work advanced in it.
    """
    if failure.mistake:
        return GiveUp("")
    raised = failure.text if failure.kind == "exception" and not failure.passing else ""
    same_failure = bool(raised) and raised == state.raised and not progressed
    state = replace(_count(state, failure, progressed), raised=raised)
    delay_s = min(restarts.max_delay_s, 2.0 ** min(state.barren - 2, 60)) if state.barren > 1 else 0.0
    if failure.slot is not None and _must_drop(restarts, state, failure):
        slots = tuple(slot for slot in state.slots if slot != failure.slot)
        fewer = replace(state, slots=slots, suspect=None, suspected=0)
        return Again(fewer, delay_s, failure.slot, f"with {len(slots)} of {len(state.slots)} ranks")
    if same_failure and not (_may_drop_one(restarts, state) and state.suspected > 1):
        return GiveUp(SAME_FAILURE)
    if failure.kind == "host":
        used, limit, name = state.host_restarts, restarts.max_host_restarts, "max_host_restarts"
        state = replace(state, host_restarts=used + 1)
    else:
        used, limit, name = state.restarts, restarts.max_restarts, "max_restarts"
        state = replace(state, restarts=used + 1)
    if used >= limit:
        return GiveUp(f"{name}={limit}" + (" is used up" if limit else ""))
    return Again(state, delay_s, None, f"restart {used + 1} of {limit}")


def _count(state: State, failure: Failure, progressed: bool) -> State:
    """Count this failure in the state."""
    if progressed:
        return replace(state, barren=1, suspect=None, suspected=0)
    same = failure.slot is not None and failure.slot == state.suspect
    return replace(state, barren=state.barren + 1, suspect=failure.slot, suspected=state.suspected + 1 if same else 1)


def _must_drop(restarts: Restarts, state: State, failure: Failure) -> bool:
    """Return True if the slot that failed must be given up."""
    if not _may_drop_one(restarts, state):
        return False
    # A failure of the host that names a slot means that this slot could not be started.
    never_started = failure.kind == "host"
    return never_started or (state.suspect == failure.slot and state.suspected >= restarts.drop_after)


def _may_drop_one(restarts: Restarts, state: State) -> bool:
    """Return True if a slot may be given up."""
    return restarts.min_world_size is not None and len(state.slots) > restarts.min_world_size
