"""What is sent to the cluster: one zip with the program, as it was taken at submission, and the Footplate that submits it.

    attempt.txt         the attempt's key
    package.tar         the job's package: each node installs it by itself (`jobs/package`)
    footplate/…         so that drivers and replicas have the version of the supervisor, whatever the nodes have installed

It is the working directory of the Ray Job, which Ray brings to every node. Ray knows it by its digest, and unpacks those
of the same digest into the same place, for several jobs at once: a driver was seen to begin before all of it was there.
The key keeps them apart.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.core.version import LIBRARY
from footplate.jobs.backends.ray.entrypoint import PACKAGE
from footplate.jobs.package import stored

MAX_BYTES = 500 * 2**20  # that Ray takes for a working directory
_NEVER = (1980, 1, 1, 0, 0, 0)  # the oldest time of a file in a zip


def pack(digest: str, home: Path, path: Path, key: str) -> None:
    """Make the zip for an attempt.

    Args:
        digest: of the package.
        home: which has it.
        path: of the zip.
        key: of the attempt.

    Raises:
        PackageError: the package is not there any more.
        ConfigError: it is too large for Ray.
    """
    archive = stored(digest, home).path
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".zip")
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
            made.writestr(_entry("attempt.txt"), key)
            for name, source in ((PACKAGE, archive), *_ours()):
                made.writestr(_entry(name), source.read_bytes(), zipfile.ZIP_DEFLATED)
        if (size := Path(draft).stat().st_size) > MAX_BYTES:
            raise ConfigError(
                f"The package has {size / 2**20:.0f} MiB, and Ray takes at most {MAX_BYTES // 2**20}. Keep data elsewhere, "
                "such as in a table or a bucket, or name it in .gitignore."
            )
        Path(draft).replace(path)
    finally:
        Path(draft).unlink(missing_ok=True)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _NEVER)
    entry.external_attr = 0o644 << 16
    return entry


def _ours() -> Iterator[tuple[str, Path]]:
    """Footplate's own files, by their names in the zip."""
    top = Path(LIBRARY, "footplate")
    for path in sorted(top.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"footplate/{path.relative_to(top).as_posix()}", path
