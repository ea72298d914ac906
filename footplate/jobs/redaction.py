"""Secrets of an environment, kept out of what a job's processes write, and out of every answer of the server.

A job may print what it should not, and the causes of its ends quote what it has printed. So there are three lines:

    environment.py   most secrets never reach a job
    Veil             those that do are taken out of its output before that is kept: by whoever starts its processes on this
                     machine, and so knows their variables
    Mask             the server's answers are without those of its own environment, its token, and passwords in any URL

In place of a secret there is `[hidden]`. A secret that a program has read from a file, or that a Ray cluster's node has
in its own environment, isn't known to any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from footplate.jobs.environment import SECRET

HIDDEN = "[hidden]"
SHORTEST = 8  # a shorter value hides nothing, and would be found everywhere
_MORE = re.compile(r"CREDENTIAL", re.IGNORECASE)
_NOT = re.compile(r"(_FILE|_PATH|_DIR|_KEYS|_KEY_ID|^GOOGLE_APPLICATION_CREDENTIALS)$", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)(?P<user>[^/@\s:]*:)?(?P<secret>[^/@\s]+)(?=@)")
_TOKEN = 16  # characters of a user without a password, from which on it is taken for a token


def secrets(environ: Mapping[str, str]) -> set[str]:
    """What is secret in an environment: values, by their names, line by line; passwords and tokens of URLs.

    >>> secrets({"HF_TOKEN": "hf_abcdefgh", "PIP_INDEX_URL": "https://me:mine-alone@pypi.example", "PATH": "/usr/bin"})
    {'hf_abcdefgh', 'mine-alone'}
    """
    named = [value for name, value in environ.items() if _is_secret(name)]
    found = {line.strip() for value in named for line in value.splitlines()}
    found |= {one["secret"] for value in environ.values() for one in _IN_URL.finditer(value) if _hides(one)}
    return {one for one in found if len(one) >= SHORTEST}


class Mask:
    """Replaces secrets in texts, and passwords and tokens in URLs.

    Args:
        secrets: the values; those that are shorter than `SHORTEST` stay.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = _pattern(one for one in secrets if len(one) >= SHORTEST)

    @classmethod
    def of(cls, environ: Mapping[str, str], *more: str) -> Mask:
        """For what an environment holds, and further secrets."""
        return cls([*secrets(environ), *more])

    def text(self, text: str) -> str:
        """A text without them."""
        if self._secrets is not None:
            text = self._secrets.sub(HIDDEN, text)
        return _IN_URL.sub(_hidden_in_url, text) if "://" in text else text

    def all(self, value: Any) -> Any:
        """Plain values without them, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.all(one) for key, one in value.items()}
        return [self.all(one) for one in value] if isinstance(value, list | tuple) else value


class Veil:
    """Replaces secrets in a stream, also one that lies in two pieces: what may be its beginning waits for the next.

    Args:
        secrets: the values.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._all = [_text(one.encode("utf-8", "surrogateescape")) for one in secrets]
        self._secrets = _pattern(self._all)
        self._longest = max(map(len, self._all), default=0)
        self._waits = ""

    def feed(self, data: bytes) -> bytes:
        """What of the stream can be shown now."""
        if self._secrets is None:
            return data
        text = self._waits + _text(data)
        end = self._beginning(text)
        for found in self._secrets.finditer(text):
            if found.start() < end < found.end():
                end = found.start()
        self._waits = text[end:]
        return _bytes(self._secrets.sub(HIDDEN, text[:end]))

    def end(self) -> bytes:
        """What waits still: nothing more will come."""
        text, self._waits = self._waits, ""
        return _bytes(self._secrets.sub(HIDDEN, text)) if self._secrets is not None else b""

    def _beginning(self, text: str) -> int:
        """Where the beginning of a secret stands, whose end is to come; the text's end if nowhere."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[start:]
            if any(len(rest) < len(one) and one.startswith(rest) for one in self._all):
                return start
        return len(text)


def _is_secret(name: str) -> bool:
    return bool(SECRET.search(name) or _MORE.search(name)) and not _NOT.search(name)


def _hides(found: re.Match[str]) -> bool:
    return found["user"] is not None or len(found["secret"]) >= _TOKEN


def _hidden_in_url(found: re.Match[str]) -> str:
    return f"{found['user'] or ''}{HIDDEN}" if _hides(found) else found[0]


def _pattern(secrets: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(set(secrets), key=lambda one: (-len(one), one))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _text(data: bytes) -> str:
    """A character for each byte: a piece may end within a letter."""
    return data.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
