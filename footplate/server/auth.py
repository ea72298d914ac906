"""The token: where it comes from, and whether a request has it.

From `--token-file`, or from `FOOTPLATE_TOKEN`. It is taken out of this process's environment when it is read, so that
neither a supervisor nor a job is started with it, and it is never logged. What is kept is its digest, which comparing
in constant time needs.
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
    """What a request must bring."""

    digest: bytes

    @classmethod
    def of(cls, text: str) -> Token:
        """The token that this text is."""
        return cls(hashlib.sha256(text.encode()).digest())

    def allows(self, authorization: bytes) -> bool:
        """Whether a request with this `Authorization` header may pass; takes as long whatever it says."""
        scheme, _, given = authorization.partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self.digest)
        return same and scheme.lower() == b"bearer"


def take(file: Path | None, environ: MutableMapping[str, str] = os.environ) -> tuple[Token, str] | tuple[None, None]:
    """The token and its text, from a file or else from the environment, from which it is removed; None if there is none.

    Raises:
        ConfigError: the file can't be read, or others can read it too; it holds no token.
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
        raise ConfigError(f"--token-file {file} can be read by others than you: chmod 600 {file}")
    return text
