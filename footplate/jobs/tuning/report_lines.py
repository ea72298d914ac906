"""The reports of a trial on a node: the new lines of their files.

A trainer and `cloudml-hypertune` write files (`measurements.py`). On a node of Ray and on a machine of Vertex AI, the
tuning's supervisor can't read them. So their new lines are passed on from there, as output of the sources `reports` and
`hypertune`, and the trial's supervisor writes them into the attempt's folder.

A trainer appends to its file. `cloudml-hypertune` writes the last 100 reports into a new file each time. Each line has the
time of its report, so a line that was there before isn't new.

On Vertex AI this code runs in Google's images, which may have Python 3.7 and nothing of Footplate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

TRAINER, HYPERTUNE = "reports.jsonl", "hypertune.jsonl"
# The file of each source. The regular expressions that find the lines in output have the sources, too.
FILES = {"reports": TRAINER, "hypertune": HYPERTUNE}
# More lines than the file of cloudml-hypertune has.
_REMEMBERED = 1000


class NewLines:
    """Reads the files of a trial's reports.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offset = 0
        self._known: deque[bytes] = deque(maxlen=_REMEMBERED)

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Return each source that has new lines, with these lines. A line without its end waits."""
        for source, new in (("reports", self._of_trainer()), ("hypertune", self._of_hypertune())):
            if new:
                yield source, new

    def _of_trainer(self) -> bytes:
        new, _, _ = _read(self._directory / TRAINER, self._offset).rpartition(b"\n")
        self._offset += len(new) + bool(new)
        return new + b"\n" if new else b""

    def _of_hypertune(self) -> bytes:
        *lines, _ = _read(self._directory / HYPERTUNE, 0).split(b"\n")
        new = [line for line in lines if line and line not in self._known]
        self._known += new
        return b"".join(line + b"\n" for line in new)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""
