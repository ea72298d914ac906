"""The allowed forms of a job's names, URIs, labels and durations.

Names become directories, container labels and process arguments, so each has a narrow form: no name can leave its folder,
look like an option, or mean anything to a shell. Each function returns its value in one form, or raises `ValueError` with
half a sentence about the expected form.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# Of Azure: a container, alone or at its account's host.
_CONTAINER = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9](@[a-z0-9]{3,24}(\.[a-z0-9-]{1,63}){2,6})?")
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(s|m|h|d)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}(\.\d{1,4})?", re.ASCII)
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
BUCKETS = ("gs", "s3", "abfss")


def job_name(name: str) -> str:
    """Check a job's name: letters, digits and underscores, a letter first, at most 128."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,127}", name):
        raise ValueError("expected letters, digits and underscores, beginning with a letter, at most 128 of them")
    return name


def module(name: str) -> str:
    """Check the name of a Python module, such as `trainer.task`."""
    if len(name) > 512 or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("expected the name of a Python module, such as trainer.task")
    return name


def location(uri: str) -> str:
    """Check a directory: a path on this machine, or in a bucket of `gs://` or `s3://`, or a container of `abfss://`."""
    if not uri or _CONTROL.search(uri):
        raise ValueError("expected gs://, s3://, abfss:// or a path, without control characters")
    if uri.startswith("-"):
        raise ValueError(f"starts like an option; write ./{uri} if it is a path")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        try:
            Path(uri).expanduser()
        except RuntimeError:
            raise ValueError(
                f"this machine has no user {uri.partition('/')[0][1:]}; write ./{uri} if it is a name"
            ) from None
        return uri
    if scheme == "file":
        if not rest.startswith("/"):
            raise ValueError("expected file:///path, with three slashes")
        return uri
    if scheme not in BUCKETS:
        raise ValueError(f"expected gs://, s3://, abfss:// or a path; {scheme[:20]}:// is none of them")
    bucket, _, path = rest.partition("/")
    if scheme == "abfss":
        if not _CONTAINER.fullmatch(bucket):
            raise ValueError("expected abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH, or abfss://CONTAINER/PATH")
    elif not _BUCKET.fullmatch(bucket):
        raise ValueError(f"expected a bucket after {scheme}://, 3 or more lower-case letters, digits, dots and dashes")
    if ".." in path.split("/"):
        raise ValueError('".." has no meaning in a bucket')
    return uri


def package(uri: str) -> str:
    """Check a package to install: a `.tar.gz`, `.zip` or `.whl` file, on this machine or in a bucket."""
    location(uri)
    if not uri.endswith((".tar.gz", ".zip", ".whl")):
        raise ValueError("expected a package: a .whl, .tar.gz or .zip file")
    return uri


def image(uri: str) -> str:
    """Check a container image, such as `gcr.io/project/trainer:latest`."""
    if not _IMAGE.fullmatch(uri):
        raise ValueError("expected a container image, such as gcr.io/project/trainer:latest")
    return uri


def version(text: str) -> str:
    """Check a version, such as `2.11` or `3.7`."""
    if not _VERSION.fullmatch(text):
        raise ValueError("expected a version, such as 2.11")
    return text


def plain(text: str) -> str:
    """Check text for another system: it must have no control characters."""
    if not text or _CONTROL.search(text):
        raise ValueError("expected text without control characters")
    return text


def argument(text: str) -> str:
    """Check an argument of a program: any text without a NUL, which no process accepts."""
    if "\0" in text:
        raise ValueError("has a NUL character, which no program accepts")
    return text


def label_key(text: str) -> str:
    """Check a label's name."""
    if not _LABEL_KEY.fullmatch(text):
        raise ValueError("expected lower-case letters, digits, dashes and underscores, a letter first, at most 63")
    return text


def label_value(text: str) -> str:
    """Check a label's value."""
    if not _LABEL_VALUE.fullmatch(text):
        raise ValueError("expected lower-case letters, digits, dashes and underscores, at most 63")
    return text


def duration(text: str) -> str:
    """Convert `7200s`, `90m`, `2h` or `1d` to seconds in the API's form, such as `7200s`.

    >>> duration("2h")
    '7200s'
    """
    match = _DURATION.fullmatch(text)
    seconds = Decimal(match[1]) * _SECONDS[match[2]] if match else Decimal(0)
    if seconds <= 0:
        raise ValueError("expected a time such as 7200s, 90m, 2h or 1d")
    whole = f"{seconds:f}"
    return f"{whole.rstrip('0').rstrip('.') if '.' in whole else whole}s"


def seconds(text: str) -> float:
    """The seconds of a `duration`."""
    return float(text.removesuffix("s"))
