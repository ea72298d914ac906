"""Hide secrets in the output of a job's processes, and in all answers of the server.

A program may print a secret, and the cause of a failure quotes what the program printed. Three measures prevent a leak:

    process_env.py   keeps most secrets out of a job's environment
    StreamMask       hides the other secrets of that environment in the output, before the output is kept. The supervisor
                     on this machine does this, since it knows the variables
    Mask             hides in the server's answers the secrets of the server's environment, its token, and passwords in URLs

`[hidden]` replaces a secret. A secret that a program reads from a file is not hidden, nor one that only the environment of
a Ray cluster's node has: no measure knows its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from footplate.jobs.process_env import SECRET

HIDDEN = "[hidden]"
# A shorter value would match everywhere.
SHORTEST = 8
_MORE = re.compile(r"CREDENTIAL", re.IGNORECASE)
_NOT = re.compile(r"(_FILE|_PATH|_DIR|_KEYS|_KEY_ID|^GOOGLE_APPLICATION_CREDENTIALS)$", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)(?P<user>[^/@\s:]*:)?(?P<secret>[^/@\s]+)(?=@)")
# A user without a password counts as a token from this length on.
_TOKEN = 16


def secrets(environ: Mapping[str, str]) -> set[str]:
    """The secrets in an environment: values of variables with such names, line by line, and passwords and tokens in URLs.

    >>> secrets({"HF_TOKEN": "hf_abcdefgh", "PIP_INDEX_URL": "https://me:mine-alone@pypi.example", "PATH": "/usr/bin"})
    {'hf_abcdefgh', 'mine-alone'}
    """
    values = [value for name, value in environ.items() if _is_secret(name)]
    candidates = {line.strip() for value in values for line in value.splitlines()}
    candidates |= {match["secret"] for value in environ.values() for match in _IN_URL.finditer(value) if _hides(match)}
    return {secret for secret in candidates if len(secret) >= SHORTEST}


class Mask:
    """Hides secrets in texts, and passwords and tokens in URLs.

    Args:
        secrets: the values. A value shorter than `SHORTEST` is not hidden.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = _pattern(secret for secret in secrets if len(secret) >= SHORTEST)

    @classmethod
    def of(cls, environ: Mapping[str, str], *more: str) -> Mask:
        """A mask for the secrets of an environment, and further secrets."""
        return cls([*secrets(environ), *more])

    def text(self, text: str) -> str:
        """Hide secrets in a text."""
        if self._secrets is not None:
            text = self._secrets.sub(HIDDEN, text)
        return _IN_URL.sub(_hidden_in_url, text) if "://" in text else text

    def all(self, value: Any) -> Any:
        """Hide secrets in plain values, including their keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.all(item) for key, item in value.items()}
        return [self.all(item) for item in value] if isinstance(value, list | tuple) else value


class StreamMask:
    """Hides secrets in a stream. A possible beginning of a secret waits for the next piece of the stream.

    Args:
        secrets: the values.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._all = [_text(secret.encode("utf-8", "surrogateescape")) for secret in secrets]
        self._secrets = _pattern(self._all)
        self._longest = max(map(len, self._all), default=0)
        self._pending = ""

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the stream, and return the part that can be shown now."""
        if self._secrets is None:
            return data
        text = self._pending + _text(data)
        end = self._beginning(text)
        for match in self._secrets.finditer(text):
            if match.start() < end < match.end():
                end = match.start()
        self._pending = text[end:]
        return _bytes(self._secrets.sub(HIDDEN, text[:end]))

    def end(self) -> bytes:
        """Return the part that still waits, at the end of the stream."""
        text, self._pending = self._pending, ""
        return _bytes(self._secrets.sub(HIDDEN, text)) if self._secrets is not None else b""

    def _beginning(self, text: str) -> int:
        """The index at which an incomplete secret begins; the text's length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[start:]
            if any(len(rest) < len(secret) and secret.startswith(rest) for secret in self._all):
                return start
        return len(text)


def _is_secret(name: str) -> bool:
    return bool(SECRET.search(name) or _MORE.search(name)) and not _NOT.search(name)


def _hides(match: re.Match[str]) -> bool:
    return match["user"] is not None or len(match["secret"]) >= _TOKEN


def _hidden_in_url(match: re.Match[str]) -> str:
    return f"{match['user'] or ''}{HIDDEN}" if _hides(match) else match[0]


def _pattern(secrets: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(set(secrets), key=lambda secret: (-len(secret), secret))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _text(data: bytes) -> str:
    """Decode to one character for each byte, since a piece of a stream may end inside a character."""
    return data.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
