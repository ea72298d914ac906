"""Digests of rows. Caches, resuming and the checks between ranks all compare the same type, `Digest`.

A digest has parts, since not every comparison asks the same question:

    kind       the kind of source: delta, parquet, memory, …
    content    a hash of the source's content. A copy of the files has the same content
    written    a hash of when files were written (their times, or a store's tags), if the content is known in part only
    rows       a hash of the selected rows, and of their row groups

    caches           all parts must be equal: a wrong answer would be silent
    resuming         `written` may differ, with a warning: a job that restarts may have copied its files again
    between ranks    `written` may differ: each node may have copies

docs/explanation/digests.md says for each kind of source what `content` covers, what it costs, and which changes it misses.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from footplate.core.errors import CheckpointError
from footplate.core.hashing import hashed


@dataclass(frozen=True)
class Digest:
    """Digest of some rows. Two digests are equal if all parts but `uri` and `version` are equal.

    Attributes:
        kind: the kind of source.
        content: a hash of the source's content, as far as it is known.
        rows: a hash of the selected rows.
        written: a hash of when the files were written; empty if `content` covers everything.
        uri: the address of the rows, for messages.
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
        """All parts in one word, which names these rows in a cache."""
        return f"{self.kind}-{hashed(self.kind, self.content, self.rows, self.written)}"

    @property
    def shared(self) -> str:
        """The parts that are equal for every copy of the files, as a short text that ranks compare."""
        version = "" if self.version is None else f" version {self.version}"
        return f"{self.kind}{version} ({hashed(self.kind, self.content, self.rows)[:12]})"

    def __str__(self) -> str:
        return f"{self.uri}: {self.shared}"

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Digest:
        """Make the digest of a `state_dict`."""
        return cls(**{part.name: state[part.name] for part in fields(cls)})

    def check_resumed(self, saved: Any) -> None:
        """Raise if a position of a checkpoint means other rows than these. Warn if that can't be ruled out.

        Args:
            saved: the `state_dict` of the checkpoint's digest, or the fingerprint that earlier versions kept.

        Raises:
            CheckpointError: the rows differ.
        """
        if isinstance(saved, str):
            self._check_fingerprint(saved)
            return

        before = Digest.from_state(saved)
        if (before.kind, before.content, before.rows) != (self.kind, self.content, self.rows):
            raise CheckpointError(
                f"The checkpoint was made on other rows: on {before}; this run has {self}. {self._hint(before)}"
            )

        if before.written != self.written:
            warnings.warn(
                f"The files of {self.uri} were written at other times than the files of the checkpoint ({before.uri}). "
                "Their names, sizes and numbers of rows agree, so the run continues. If they are copies, nothing has "
                "changed. If they were rewritten, the run continues on the new values.",
                stacklevel=2,
            )

    def _hint(self, before: Digest) -> str:
        """Say what to do if the rows differ."""
        if before.kind != self.kind:
            return f"Give the {before.kind} source that the run began with, or begin a new run."
        if before.content == self.content:
            return (
                "The table is the same, but other rows of it are selected: use the same filter, split and packing to "
                "resume."
            )
        if before.version is not None and before.version != self.version:
            return (
                f"Open that table at that version (Table(…, version={before.version})) to resume, or begin a new run."
            )
        if before.version is not None:
            return (
                "The table or its computed columns were written again. If Table.map computes them, use the function and "
                "the tokenizer of that run to resume, or begin a new run."
            )
        return (
            "Give the same files or values as in that run to resume (a copy will do), and the same function to Table.map, "
            "or begin a new run."
        )

    def _check_fingerprint(self, fingerprint: str) -> None:
        """Compare kind and version with a word such as "delta-12-0123456789ab", which earlier versions kept."""
        kind, _, rest = fingerprint.partition("-")
        version = rest.rpartition("-")[0]
        if kind != self.kind or (self.version is not None and version != str(self.version)):
            raise CheckpointError(
                f"The checkpoint was made on other rows: its table is {fingerprint}; this run has {self}. Open that table "
                "at that version to resume, or begin a new run."
            )
        warnings.warn(
            f"The checkpoint was made by an earlier version of Footplate, which kept only {fingerprint} of a table. So "
            f"Footplate can't check that {self} has the same rows. Make sure that table, filter and split are those that "
            "the run began with.",
            stacklevel=2,
        )
