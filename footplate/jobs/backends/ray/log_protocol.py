"""The lines of an entry point's output: the output of all replicas, and events, in one stream that Ray keeps and passes on.

    master-0| step 12, loss 0.31            a line of the master
    worker-1+ 42%                           the beginning of a line; its rest follows
    prepare| Collecting einops              output of the package's installation
    reports| {"step": 40, "value": 0.81}    a line of a trial's reports (`jobs/tuning/report_lines.py`)
    footplate| {"event": "ended", …}        an event; a long one has several lines, as output has

Any bytes can be encoded: a backslash escapes bytes that aren't UTF-8, carriage returns, and backslashes. Lines are short,
since the transport limits their length. Ray's own messages between them have another form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

OURS = "footplate"
# Characters of output in a line, before escapes.
LONGEST = 4000

_LINE = re.compile(
    r"(footplate|prepare|reports|hypertune|(?:master|worker|parameter_server|evaluator)-\d+)([|+]) (.*)", re.DOTALL
)
_SPECIAL = re.compile("[\\\\\r\udc80-\udcff]")
_ESCAPED = re.compile(r"\\(\\|r|x[0-9a-f]{2})")


def encode(source: str, data: bytes) -> bytes:
    r"""Encode the output of a source as lines.

    >>> encode("master-0", b"one\ntwo\r")
    b'master-0| one\nmaster-0+ two\\r\n'
    """
    pieces = _pieces(data.decode("utf-8", "surrogateescape"))
    return "".join(f"{source}{mark} {_SPECIAL.sub(_escape, piece)}\n" for piece, mark in pieces).encode()


def event(name: str, **values: Any) -> bytes:
    """Encode an event as a line."""
    return encode(OURS, json.dumps({"event": name, **values}).encode() + b"\n")


class EventReader:
    """Puts the pieces of events together. A long event is several lines."""

    def __init__(self) -> None:
        self._pieces = b""

    def take(self, data: bytes) -> dict[str, Any] | None:
        """Take a decoded line of `OURS`. Returns the event that ends with it."""
        self._pieces += data
        if not data.endswith(b"\n"):
            return None
        whole, self._pieces = self._pieces, b""
        return json.loads(whole)


def events_in(output: str) -> list[dict[str, Any]]:
    """The events of an output so far. A last line without its end isn't read."""
    reader = EventReader()
    decoded = [decode(line) for line in output.split("\n")[:-1]]
    events = [reader.take(line[1]) for line in decoded if line and line[0] == OURS]
    return [event for event in events if event is not None]


def decode(line: str) -> tuple[str, bytes] | None:
    r"""Decode a line without its end into source and output; None for a line of Ray's own.

    >>> decode("master-0| one"), decode(r"worker-1+ two\r")
    (('master-0', b'one\n'), ('worker-1', b'two\r'))
    """
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    end = "\n" if match[2] == "|" else ""
    return match[1], (_ESCAPED.sub(_unescape, match[3]) + end).encode("utf-8", "surrogateescape")


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Split text into pieces of lines. Each has a mark: does its line end with it?"""
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        body = line.removesuffix("\n")
        starts = range(0, len(body), LONGEST) or (0,)
        for at in starts:
            yield body[at : at + LONGEST], "|" if at == starts[-1] and body != line else "+"


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in "\\\r":
        return "\\\\" if character == "\\" else "\\r"
    return f"\\x{ord(character) - 0xDC00:02x}"


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code.startswith("x"):
        return chr(0xDC00 + int(code[1:], 16))
    return "\r" if code == "r" else "\\"
