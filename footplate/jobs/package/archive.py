"""Files as one archive which is bit for bit the same wherever and whenever it is made.

A tar whose members are in the order of their names, without times, owners or links, each mode one of two. It isn't
compressed: what a compressor makes of the same bytes differs from version to version. So its SHA-256 says what is in it.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

PLAIN, EXECUTABLE = 0o644, 0o755


@dataclass(frozen=True)
class Member:
    """A file of an archive: its path, with slashes; what gives its bytes; whether it may be executed."""

    name: str
    read: Callable[[], bytes]
    executable: bool = False


def write(members: Iterable[Member], out: BinaryIO) -> str:
    """Write an archive; returns its digest, 64 hexadecimal digits. The order of `members` doesn't matter."""
    hashed = _Hashed(out)
    with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:  # pyright: ignore
        for member in sorted(members, key=lambda one: one.name):
            info = tarfile.TarInfo(member.name)
            content = member.read()
            info.size = len(content)
            info.mode = EXECUTABLE if member.executable else PLAIN
            tar.addfile(info, io.BytesIO(content))
    return hashed.digest.hexdigest()


class _Hashed:
    """Passes bytes on, and takes their digest."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._out.write(content)
