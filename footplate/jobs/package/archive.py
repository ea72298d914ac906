"""Write files as one archive whose bytes are the same wherever and whenever it is made.

The archive is a tar. Its members are sorted by name, have no times, owners or links, and one of two modes. It isn't
compressed, since different versions of a compressor produce different bytes. So its SHA-256 identifies its contents.
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
    """A file of an archive: its path, with slashes; a function that returns its bytes; may it be executed."""

    name: str
    read: Callable[[], bytes]
    executable: bool = False


def write(members: Iterable[Member], out: BinaryIO) -> str:
    """Write an archive, and return its digest, 64 hexadecimal digits. The order of `members` doesn't matter."""
    hashed = _Hashed(out)
    with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:  # pyright: ignore
        for member in sorted(members, key=lambda member: member.name):
            info = tarfile.TarInfo(member.name)
            content = member.read()
            info.size = len(content)
            info.mode = EXECUTABLE if member.executable else PLAIN
            tar.addfile(info, io.BytesIO(content))
    return hashed.digest.hexdigest()


class _Hashed:
    """Passes bytes on, and hashes them."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._out.write(content)
