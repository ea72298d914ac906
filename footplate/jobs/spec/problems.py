"""Problems of a spec, each with its place, and one error for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from footplate.core.errors import ConfigError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """A problem of a spec.

    Attributes:
        path: the keys that lead to it, such as `("trainingInput", "workerCount")`.
        text: what is wrong, and what to do.
        place: its place, such as `config.yaml line 4` or `--worker-count`; empty if it has none.
    """

    path: Path
    text: str
    place: str = ""

    def __str__(self) -> str:
        text = f"{dotted(self.path)}: {self.text}" if self.path else self.text
        return f"{self.place}: {text}" if self.place else text


class SpecError(ConfigError):
    """A spec with problems.

    Attributes:
        problems: all of them.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "the job can't be submitted as it is:" if count == 1 else f"the job has {count} problems:"
        super().__init__("\n  ".join([head, *map(str, self.problems)]))


def dotted(path: Path) -> str:
    """Write a path with dots and brackets.

    >>> dotted(("trainingInput", "args", 2))
    'trainingInput.args[2]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
