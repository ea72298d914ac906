"""The ledger of a run's directory: a training that no job supervises, such as one of `footplate run` or of a notebook.

Only the run's `monitor.jsonl` is known. So the time before the first call of `fit`, and the time after the end of the last
one, are not part of it. If a process was killed, its end is between two reports. The ledger assumes the middle.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.core.goodput.causes import Cause
from footplate.core.goodput.ledger import RECENT, ledger
from footplate.core.goodput.monitor_file import NAME, MonitorFile, Session
from footplate.core.goodput.result import Ledger
from footplate.core.goodput.stretches import Stretch


def goodput(run_dir: str | Path, usd_per_hour: float | None = None, machine: str = "") -> Ledger:
    """Compute the ledger of a run from its directory.

    Args:
        run_dir: the run's directory.
        usd_per_hour: the price of all its machines together; None if it is unknown.
        machine: the machines that the price is for.

    Raises:
        ConfigError: there is no record in the directory.

    Examples:
        >>> ledger = fp.goodput("runs/flowers", usd_per_hour=2.5)
        >>> ledger.wall_s > 0
        True
    """
    file = MonitorFile(Path(run_dir) / NAME)
    sessions = file.sessions()
    if not sessions:
        where = "has no readable row" if file.path.exists() else "doesn't exist"
        raise ConfigError(
            f"{file.path} {where}. A Trainer writes it into its default_root_dir while it trains: give that directory. "
            "For a job, use: footplate jobs describe NAME"
        )
    notes = [damaged_note(file)] if file.damaged else []
    return ledger(stretches_of(sessions), [sessions], usd_per_hour=usd_per_hour, machine=machine, notes=notes)


def damaged_note(file: MonitorFile) -> str:
    """A sentence about rows that could not be read."""
    rows = "1 row" if file.damaged == 1 else f"{file.damaged} rows"
    return f"{rows} of {file.path} could not be read. That time is in other causes, or unknown."


def stretches_of(sessions: Sequence[Session]) -> list[Stretch]:
    """Make the stretches of a run without a job: its calls of `fit`, and the pauses between them."""
    stretches: list[Stretch] = []
    fit = 0
    for number, session in enumerate(sessions, start=1):
        began = session.time - max(session.setup_s, session.process_s or 0.0)
        if stretches:
            # Processes may overlap if clocks differ. `aligned` corrects that.
            ended = stretches[-1].ended
            finished = sessions[number - 2].status == "finished"
            fit += finished
            cause = Cause.IDLE if finished else Cause.DOWN
            stretches.append(Stretch(ended, max(ended, began), cause, number - 1, paid=not finished))
            began = max(ended, began)
        following = sessions[number] if number < len(sessions) else None
        stretches.append(Stretch(began, max(began, _end(session, following)), None, number, fit=fit))
    return stretches


def _end(session: Session, following: Session | None) -> float:
    """Return the end of a session's process. If it was killed, that is estimated."""
    if session.ended is not None or following is None or not session.windows:
        return session.last
    half_s = statistics.median(window.wall_s for window in session.windows[-RECENT:]) / 2
    return session.last + max(0.0, min(half_s, following.began - session.last))
