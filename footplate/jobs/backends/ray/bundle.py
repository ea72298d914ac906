"""The zip that is sent to the cluster: the program's snapshot, and the Footplate that submits it.

    attempt.txt         the attempt's key
    package.tar         the job's package; each node installs it (`jobs/package`)
    footplate/…         so that entry points and replicas have the supervisor's version, whatever the nodes have installed

The zip is the working directory of the Ray Job, which Ray copies to every node. Ray identifies it by its digest, and
unpacks equal ones into the same directory, for several jobs at once. Then an entry point may begin before all files are
there. The key makes each zip unique.
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

# The largest working directory that Ray accepts.
MAX_BYTES = 500 * 2**20
# The earliest time that a zip can store.
_NEVER = (1980, 1, 1, 0, 0, 0)


def pack(digest: str, home: Path, path: Path, key: str) -> None:
    """Write the zip of an attempt.

    Args:
        digest: the package's digest.
        home: the folder with the package.
        path: the path of the zip.
        key: the attempt's key.

    Raises:
        PackageError: the package was deleted.
        ConfigError: the package is too large for Ray.
    """
    archive = stored(digest, home).path
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".zip")
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bundle:
            bundle.writestr(_entry("attempt.txt"), key)
            for name, source in ((PACKAGE, archive), *_own_files()):
                bundle.writestr(_entry(name), source.read_bytes(), zipfile.ZIP_DEFLATED)
        if (size := Path(draft).stat().st_size) > MAX_BYTES:
            raise ConfigError(
                f"The package has {size / 2**20:.0f} MiB, and Ray accepts at most {MAX_BYTES // 2**20} MiB. Keep data "
                "elsewhere, such as in a table or a bucket, or name it in .gitignore."
            )
        Path(draft).replace(path)
    finally:
        Path(draft).unlink(missing_ok=True)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _NEVER)
    entry.external_attr = 0o644 << 16
    return entry


def _own_files() -> Iterator[tuple[str, Path]]:
    """Footplate's own files, with their names in the zip."""
    top = Path(LIBRARY, "footplate")
    for path in sorted(top.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"footplate/{path.relative_to(top).as_posix()}", path
