"""What rows are known by: the one digest that caches, resuming and the checks between ranks compare.

A digest has parts, since not every comparison asks the same question:

    kind       of the source: delta, parquet, memory, …
    content    what the source holds; a copy of the files has the same content
    written    when files were written (their times, or a store's tags), for sources whose content is known in part only
    rows       which rows are meant, and how they are cut into row groups

    caches           all parts must be equal: a wrong answer would be silent
    resuming         `written` may differ, with a warning: a job that starts again may have copied its files anew
    between ranks    `written` may differ: each machine may have copies

docs/digests.md says for each kind of source what `content` covers, what it costs, and which changes it can't notice.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from footplate.core.errors import CheckpointError
from footplate.core.hashing import hashed


@dataclass(frozen=True)
class Digest:
    """What some rows are known by. Two digests are equal if all parts are; where the rows lie isn't compared.

    Attributes:
        kind: of the source.
        content: a hash of what the source holds, as far as it is known.
        rows: a hash of the rows that are meant.
        written: a hash of when the files were written; empty where `content` covers all that matters.
        uri: where the rows lie, for messages.
        version: the number of a Delta version, for messages.
    """

    kind: str
    content: str
    rows: str = ""
    written: str = ""
    uri: str = field(default="", compare=False)
    version: int | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """All parts in one word: the name of these rows in a cache."""
        return f"{self.kind}-{hashed(self.kind, self.content, self.rows, self.written)}"

    @property
    def shared(self) -> str:
        """The parts that are the same for every copy of the files, in a few words: what ranks compare."""
        version = "" if self.version is None else f" version {self.version}"
        return f"{self.kind}{version} ({hashed(self.kind, self.content, self.rows)[:12]})"

    def __str__(self) -> str:
        return f"{self.uri}: {self.shared}"

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Digest:
        """The digest that a checkpoint holds."""
        return cls(**{each.name: state[each.name] for each in fields(cls)})

    def check_resumed(self, saved: Any) -> None:
        """Make sure that a place in other rows can be taken up in these.

        Args:
            saved: what the checkpoint has: the `state_dict` of a digest, or the fingerprint of an earlier version.

        Raises:
            CheckpointError: the rows are others.
        """
        if isinstance(saved, str):
            self._check_fingerprint(saved)
            return
        before = Digest.from_state(saved)
        if (before.kind, before.content, before.rows) != (self.kind, self.content, self.rows):
            raise CheckpointError(
                f"The checkpoint was made on other rows: on {before}; this run has {self}. {self._difference(before)}"
            )
        if before.written != self.written:
            warnings.warn(
                f"The files of {self.uri} were written at other times than those that the checkpoint was made on "
                f"({before.uri}). Their names, sizes and numbers of rows agree, so the run continues. If they are copies, "
                "nothing has changed. If they were rewritten, the run continues on the new values.",
                stacklevel=2,
            )

    def _difference(self, before: Digest) -> str:
        """What to do where the rows are others."""
        if before.kind != self.kind:
            return f"Give the {before.kind} source that the run began with, or begin a new run."
        if before.content == self.content:
            return "The table is the same, the rows of it are others: use the same filter and split to resume."
        if before.version is not None:
            return (
                f"Open that table at that version (Table(…, version={before.version})) to resume, or begin a new run."
            )
        return "Give the same files or values as then to resume (a copy will do), or begin a new run."

    def _check_fingerprint(self, fingerprint: str) -> None:
        """An earlier version kept one word, such as "delta-12-0123456789ab". Its kind and Delta version can be compared."""
        kind, _, rest = fingerprint.partition("-")
        version = rest.rpartition("-")[0]
        if kind != self.kind or (self.version is not None and version != str(self.version)):
            raise CheckpointError(
                f"The checkpoint was made on other rows: its table is {fingerprint}; this run has {self}. Open that table "
                "at that version to resume, or begin a new run."
            )
        warnings.warn(
            f"The checkpoint was made by an earlier version of Footplate, which kept less of a table ({fingerprint}). "
            f"Whether {self} has the same rows can't be checked: make sure that it is the table, the filter and the split "
            "that the run began with.",
            stacklevel=2,
        )
