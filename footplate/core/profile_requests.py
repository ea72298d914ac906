"""Ranges of steps to profile, and requests for a profile of a training that runs, from another process of the same machine.

    request = request_profile([pid], steps=10)   rank 0 is asked; with several ranks, all of them record the same steps
    request.status()                             "waiting", "recording", "writing", "done" with the files, or "failed"

A training answers in `training/profiler/step_profiles.py`. It is asked over the pipe on which it answers for its stacks.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from footplate.core.errors import ConfigError, Unavailable
from footplate.core.stacks.requests import Answering, NoAnswer, answering_processes, send

ASK, STATUS = "profile", "profile-status"
MAX_STEPS = 1000
# Until a process answers, whose C code may keep the GIL for seconds.
LIMIT_S = 30.0
# The same for its status: while it collects a profile, torch's C++ code keeps the GIL, for long on a busy machine.
STATUS_LIMIT_S = 120.0
_POLL_S = 0.2
# The environment variable of `footplate run --profile`.
VARIABLE = "FOOTPLATE_PROFILE"
_RANGE = re.compile(r"(\d+):(\d+)")
_EXPECTED = 'expected the first step and the step after the last, such as "10:20" for ten steps.'


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last - 1`, as in a Python slice. Step n is the step that follows n optimizer steps."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @classmethod
    def parse(cls, value: Any, name: str = "steps") -> StepRange:
        """Read a range from "10:20" or (10, 20).

        Args:
            value: the range.
            name: the argument's name in the error.

        Raises:
            ConfigError: not a range, or an empty one.
        """
        match = _RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
        numbers = match.groups() if match else value
        if isinstance(numbers, (tuple, list)) and len(numbers) == 2:
            with contextlib.suppress(ValueError, TypeError):
                first, last = (int(number) for number in numbers)
                whole = all(isinstance(number, str) or number == int(number) for number in numbers)
                if whole and 0 <= first < last:
                    return cls(first, last)
        raise ConfigError(f"{name}={value!r}: {_EXPECTED}")


def range_from_env(environ: Mapping[str, str]) -> StepRange | None:
    """Return the range that `footplate run --profile` has set; None without one.

    Raises:
        ConfigError: the variable isn't a range.
    """
    value = environ.get(VARIABLE)
    return StepRange.parse(value, VARIABLE) if value else None


@dataclass(frozen=True)
class ProfileStatus:
    """What has become of a request.

    Attributes:
        state: "waiting", "recording", "writing", "done" or "failed"; "idle" if nobody has asked.
        directory: where the files are, once it is done.
        summary: the most important results, once it is done.
        error: why it failed.
    """

    state: str
    directory: str | None = None
    summary: str | None = None
    error: str | None = None

    @property
    def is_final(self) -> bool:
        return self.state in ("idle", "done", "failed")


class RunningProfile(Protocol):
    """A profile that a training has accepted, on this machine or another one."""

    @property
    def step(self) -> int:
        """The training's step when it accepted the request."""
        ...

    def status(self) -> ProfileStatus:
        """What has become of the profile."""
        ...


@dataclass(frozen=True)
class ProfileRequest:
    """A request that a training on this machine has accepted.

    Attributes:
        ranks: the processes of the training on this machine. The first was asked.
        identity: of the request.
        step: the training's step at that moment.
        run_dir: the run's directory.
        asked_at: the time of the request, in seconds since 1970.
    """

    ranks: Sequence[Answering]
    identity: str
    step: int
    run_dir: str
    asked_at: float

    def status(self) -> ProfileStatus:
        """What has become of the request, on all ranks of this machine."""
        return status_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProfileRequest:
        """Read what `to_dict` has made."""
        return cls(**{**values, "ranks": [Answering(**rank) for rank in values["ranks"]]})


def check_steps(steps: int, name: str = "--steps") -> None:
    """Raise ConfigError if a number of steps can't be profiled."""
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"{name} {steps}: expected a number of steps from 1 to {MAX_STEPS}.")


def request_profile(pids: Iterable[int], steps: int) -> ProfileRequest:
    """Ask the training in some processes, or below them, for a profile of its next steps.

    Args:
        pids: the processes.
        steps: how many steps.

    Raises:
        ConfigError: none of them trains now.
        Unavailable: the training makes a profile already, or doesn't answer.
    """
    identity, silent, asked_at = uuid.uuid4().hex[:12], list[str](), time.time()
    processes = answering_processes(pids)
    for process in processes:
        try:
            reply = send(process, ASK, {"steps": steps, "id": identity}, LIMIT_S)
        except NoAnswer as error:
            silent.append(str(error))
            continue
        if reply is None:
            continue
        if "error" in reply:
            raise Unavailable(f"process {process.pid}: {reply['error']}.")
        others = [other for other in processes if other.rank is not None and other is not process]
        ranks = [process] if process.rank is None else [process, *others]
        return ProfileRequest(ranks, identity, reply["step"], reply["run_dir"], asked_at)
    if silent:
        raise Unavailable(f"{silent[0]}.")
    raise ConfigError(
        "no Trainer.fit runs in these processes now. Only a training by Footplate's trainer can be profiled on demand; it "
        "answers from its first step to its last."
    )


def status_of(request: ProfileRequest) -> ProfileStatus:
    """Return what has become of a request, on all ranks of this machine."""
    asked, *others = request.ranks
    status = _status(asked, request.identity)
    if status.state == "failed":
        # The training may have ended right after it had written the files.
        return written(request) or status
    if status.state != "done":
        return status
    return unfinished(others) or status


def unfinished(ranks: Iterable[Answering]) -> ProfileStatus | None:
    """The status of the first rank that still records or writes; None if all have finished."""
    for rank in ranks:
        # A rank that has gone on to the end of the training has written its files.
        if (state := _status(rank, None).state) in ("recording", "writing"):
            return ProfileStatus(state)
    return None


def _status(process: Answering, identity: str | None) -> ProfileStatus:
    try:
        reply = send(process, STATUS, {}, STATUS_LIMIT_S)
    except NoAnswer as error:
        return ProfileStatus("failed", error=str(error))
    if reply is None:
        return ProfileStatus("failed", error="the training has ended")
    if identity is not None and reply.get("id") != identity:
        return ProfileStatus("failed", error="another request came after this one")
    return ProfileStatus(reply["state"], reply.get("directory"), reply.get("summary"), reply.get("error"))


def written(request: ProfileRequest) -> ProfileStatus | None:
    """The profile that a training wrote before it ended; None if this machine has none."""
    rank = request.ranks[0].rank or 0
    with contextlib.suppress(OSError):
        for summary in Path(request.run_dir).glob(f"profile-*/summary-rank{rank}.txt"):
            if summary.stat().st_mtime >= request.asked_at:
                return ProfileStatus("done", str(summary.parent), summary.read_text())
    return None


def wait_for_profile(profile: RunningProfile, tell: Callable[[ProfileStatus], Any]) -> ProfileStatus:
    """Wait until a profile is written, or has failed.

    Args:
        profile: the profile.
        tell: called with each new state, and with "waiting" first: the training has accepted the request.
    """
    told = "waiting"
    tell(ProfileStatus(told))
    while True:
        status = profile.status()
        if status.state != told:
            told = status.state
            tell(status)
        if status.is_final:
            return status
        time.sleep(_POLL_S)
