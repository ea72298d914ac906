"""What to do after a failed attempt, as a pure function of what has happened so far.

    decide(restarts, state, failure)  ->  Again(state, delay_s, …)  or  GiveUp(why)

The rules, in this order:

1. A user's mistake (a `FootplateError`) is never tried again.
2. With `min_world_size`, a slot (a place in the original world, hence a device) that can't be started, or that caused
   `drop_after` failures in a row without the work having advanced, is given up: the next attempt has one rank fewer.
   That costs no restart, as it can happen only so often.
3. An exception that the attempt before had ended with, too, of the same type and with the same message, is not tried again
   when the work has not advanced in between: it is the code's fault. Unless it is about what is outside of the code (a
   connection, a disk: `failure.may_pass`), or raised on one slot again and again that rule 2 may still give up.
4. Failures of the host have a budget of their own, `max_host_restarts`; all others share `max_restarts`.
5. The first restart comes at once, the next after 1, 2, 4 … seconds up to `max_delay_s`. When the work advances, the row
   begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from footplate.launch.failure import Failure

AS_BEFORE = (
    "as in the attempt before it, with no progress in between: this is taken for the code's fault, and not tried again"
)


@dataclass(frozen=True)
class Restarts:
    """How often, how soon and with how many ranks a launch tries again.

    Args:
        max_restarts: failures that are followed by another attempt; 0 to end with the first.
        max_host_restarts: likewise, of those that the machine or the launcher is to blame for.
        max_delay_s: the longest pause before an attempt.
        min_world_size: go on with fewer ranks, but no fewer than this; None to keep all.
        drop_after: failures in a row, without progress, by which a slot is given up.
        peers_grace_s: how long the other ranks may take to end by themselves when one has failed.
    """

    max_restarts: int = 3
    max_host_restarts: int = 10
    max_delay_s: float = 60.0
    min_world_size: int | None = None
    drop_after: int = 2
    peers_grace_s: float = 5.0


@dataclass(frozen=True)
class State:
    """What the failures so far have left.

    Attributes:
        slots: the places of the original world that are still used; the rank is the index into it.
        restarts: used of `max_restarts`.
        host_restarts: used of `max_host_restarts`.
        barren: attempts in a row in which the work did not advance.
        suspect: the slot that caused the latest of them.
        suspected: how many of them in a row it caused.
        raised: the exception that ended the latest attempt, in a line; empty if something else did.
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
    """Another attempt.

    Attributes:
        state: what to begin it with.
        delay_s: how long to wait before.
        dropped: the slot that is given up, if one is.
        budget: which restart this is of how many, in words.
    """

    state: State
    delay_s: float
    dropped: int | None
    budget: str


@dataclass(frozen=True)
class GiveUp:
    """No other attempt; `why` in words, empty where the failure speaks for itself."""

    why: str


def decide(restarts: Restarts, state: State, failure: Failure, progressed: bool) -> Again | GiveUp:
    """What follows `failure` of an attempt that began with `state`, in which the work advanced or did not."""
    if failure.mistake:
        return GiveUp("")
    raised = failure.text if failure.kind == "exception" and not failure.passing else ""
    as_before = bool(raised) and raised == state.raised and not progressed
    state = replace(_count(state, failure, progressed), raised=raised)
    delay_s = min(restarts.max_delay_s, 2.0 ** min(state.barren - 2, 60)) if state.barren > 1 else 0.0
    if failure.slot is not None and _is_lost(restarts, state, failure):
        slots = tuple(slot for slot in state.slots if slot != failure.slot)
        fewer = replace(state, slots=slots, suspect=None, suspected=0)
        return Again(fewer, delay_s, failure.slot, f"with {len(slots)} of {len(state.slots)} ranks")
    if as_before and not (_has_one_to_spare(restarts, state) and state.suspected > 1):
        return GiveUp(AS_BEFORE)
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
    """The state with this failure's part in the rows of failures."""
    if progressed:
        return replace(state, barren=1, suspect=None, suspected=0)
    same = failure.slot is not None and failure.slot == state.suspect
    return replace(state, barren=state.barren + 1, suspect=failure.slot, suspected=state.suspected + 1 if same else 1)


def _is_lost(restarts: Restarts, state: State, failure: Failure) -> bool:
    """Whether the slot that failed is to be given up."""
    if not _has_one_to_spare(restarts, state):
        return False
    never_started = failure.kind == "host"  # with a slot of its own: this one could not be started
    return never_started or (state.suspect == failure.slot and state.suspected >= restarts.drop_after)


def _has_one_to_spare(restarts: Restarts, state: State) -> bool:
    """Whether a slot may be given up."""
    return restarts.min_world_size is not None and len(state.slots) > restarts.min_world_size
