"""The token: reading it, and checking requests for it.

It comes from `--token-file` or from `FOOTPLATE_TOKEN`. Reading removes it from this process's environment, so supervisors
and jobs don't inherit it. It is never logged. The server keeps only its digest, and compares digests in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from footplate.core.errors import ConfigError

VARIABLE = "FOOTPLATE_TOKEN"
SHORTEST = 16
_MAKE = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
_TOKEN = re.compile(rf"[\x21-\x7e]{{{SHORTEST},4096}}")


@dataclass(frozen=True, repr=False)
class Token:
    """The token that a request must carry."""

    digest: bytes

    @classmethod
    def of(cls, text: str) -> Token:
        """Make a token from its text."""
        return cls(hashlib.sha256(text.encode()).digest())

    def allows(self, authorization: bytes) -> bool:
        """Return True if the `Authorization` header has this token. The time doesn't depend on the header's content."""
        scheme, _, text = authorization.partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(text.strip()).digest(), self.digest)
        return same and scheme.lower() == b"bearer"


def take(file: Path | None, environ: MutableMapping[str, str] = os.environ) -> tuple[Token, str] | tuple[None, None]:
    """Read the token from a file, or else take it out of the environment; returns it with its text, or None twice.

    Raises:
        ConfigError: the file can't be read, other users can read it, or it has no token.
    """
    text, origin = environ.pop(VARIABLE, None), VARIABLE
    if file is not None:
        text, origin = _read(file), f"--token-file {file}"
    if text is None:
        return None, None
    text = text.strip()
    if not _TOKEN.fullmatch(text):
        raise ConfigError(
            f"{origin}: expected a token of at least {SHORTEST} letters, digits or signs, in one line. Make one: {_MAKE}"
        )
    return Token.of(text), text


def _read(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} can't be read: {error}. Make one: {_MAKE} > {file}") from None
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"--token-file {file} can be read by other users. Restrict it: chmod 600 {file}")
    return text
