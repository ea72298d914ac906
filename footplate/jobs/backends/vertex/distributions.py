"""A job's program for Vertex AI: distributions in a bucket, each in a folder named by its contents.

    gs://STAGING/footplate/DIGEST/trainer-0.tar.gz               the package, as it was when the job was submitted
    gs://STAGING/footplate/DIGEST/footplate_launch-0.tar.gz      the first program (`bootstrap.py`), which requires what
                                                                 requirements.txt does
    gs://STAGING/footplate/DIGEST/launch.py                      the same program, for users' own images
    gs://STAGING/footplate/DIGEST/helpers-1.0-py3-none-any.whl   the files of --packages

The digest is that of the file. So a file is uploaded once, and a complete file is never overwritten.

A package with a `setup.py` or `pyproject.toml` next to it is uploaded as it is. For another package, a generated `setup.py`
includes all of its files. Google's images install distributions and ignore requirements.txt, so its lines become the
requirements of the second distribution.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from footplate.core.errors import ConfigError, FootplateError
from footplate.jobs.backends.vertex.client import LOG_IN, Refused, Unanswered
from footplate.jobs.package import Snapshot, archive
from footplate.jobs.package.archive import Member
from footplate.jobs.package.requirements import MAIN
from footplate.jobs.package.snapshots import PACKAGES, SOURCE
from footplate.jobs.tuning import report_lines

LAUNCHER = "footplate_launch"
SCRIPT = "launch.py"
# The lines that aren't sent: the second is replaced by the module that it imports.
_FIRST = "from __future__ import annotations\n"
_IMPORT = "from footplate.jobs.tuning.report_lines import HYPERTUNE, TRAINER, NewLines\n"
# The version of the generated distributions. Nobody searches for a newer one.
VERSION = "0"

_SETUP = """\
from setuptools import setup

setup(
    name={name!r},
    version={version!r},
    packages={packages!r},
    package_data={data!r},
    py_modules={modules!r},
    install_requires={requirements!r},
)
"""

_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*([<>=!~;(@].*)?")


@dataclass(frozen=True)
class Distribution:
    """A file for the bucket."""

    name: str
    content: bytes

    def uri(self, staging: str) -> str:
        """Return the file's URI in a staging bucket."""
        return f"{staging}/footplate/{hashlib.sha256(self.content).hexdigest()[:32]}/{self.name}"


def distributions(snapshot: Snapshot) -> list[Distribution]:
    """Make the distributions of a snapshot. The last is the bootstrap script, alone if the snapshot is empty.

    Raises:
        ConfigError: its requirements.txt has lines that a distribution's requirements can't have.
    """
    source, packages = _read(snapshot)
    files = [_program(source)] if source else []
    files += [Distribution(member.name, member.read()) for member in packages]
    needed = [
        line
        for member in source
        if member.name == MAIN
        for line in requirements(member.read().decode("utf-8-sig", "replace"))
    ]
    script = _script().encode()
    if files:
        files.append(_launcher(script, needed))
    return [*files, Distribution(SCRIPT, script)]


def requirements(text: str) -> list[str]:
    """The requirements in a requirements.txt.

    Raises:
        ConfigError: it has an option, or a URL without a name, which a distribution's requirements can't have.
    """
    whole = re.sub(r"\\\n", " ", text.replace("\r\n", "\n"))
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in whole.split("\n")]
    needed = [line for line in lines if line]
    wrong = [line for line in needed if not _REQUIREMENT.fullmatch(line) or " --" in line]
    if wrong:
        raise ConfigError(
            f"requirements.txt: {wrong[0]!r}: Vertex AI supports neither options of pip nor URLs without a name. "
            "Write NAME or NAME @ URL, or give an image that contains the package, with "
            "--master-image-uri."
        )
    return needed


def _read(snapshot: Snapshot) -> tuple[list[Member], list[Member]]:
    """The source files, and the distributions of --packages."""
    parts: dict[str, list[Member]] = {SOURCE: [], PACKAGES: []}
    with tarfile.open(snapshot.path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            part, _, name = member.name.partition("/")
            if file is not None:
                parts[part].append(Member(name, partial(bytes, file.read()), bool(member.mode & 0o100)))
    return parts[SOURCE], parts[PACKAGES]


def _program(source: list[Member]) -> Distribution:
    """The package. All of its files are included, unless its own setup.py decides."""
    names = [member.name for member in source]
    tops = sorted({name.partition("/")[0] for name in names if "/" in name})
    if "setup.py" not in names and "pyproject.toml" not in names:
        data = {
            top: [glob.escape(name.removeprefix(f"{top}/")) for name in names if name.startswith(f"{top}/")]
            for top in tops
        }
        source = [*source, _setup(tops[0], packages=tops, data=data)]
    return _sdist(tops[0], source)


def _script() -> str:
    """The source of the bootstrap module, with that of the module that it imports."""
    reports = Path(report_lines.__file__).read_text(encoding="utf-8").replace(_FIRST, "")
    source = Path(__file__).with_name("bootstrap.py").read_text(encoding="utf-8")
    assert _IMPORT in source
    return source.replace(_IMPORT, reports)


def _launcher(script: bytes, needed: list[str]) -> Distribution:
    """The bootstrap module, with the program's requirements."""
    setup = _setup(LAUNCHER, modules=[LAUNCHER], requirements=needed)
    return _sdist(LAUNCHER, [setup, Member(f"{LAUNCHER}.py", partial(bytes, script))])


def _setup(name: str, **parts: object) -> Member:
    nothing = {"packages": [], "data": {}, "modules": [], "requirements": []}
    text = _SETUP.format(name=name, version=VERSION, **{**nothing, **parts})
    return Member("setup.py", partial(bytes, text.encode()))


def _sdist(name: str, files: Iterable[Member]) -> Distribution:
    """A source distribution: the same files make the same bytes."""
    root, tar, packed = f"{name}-{VERSION}", io.BytesIO(), io.BytesIO()
    archive.write([replace(member, name=f"{root}/{member.name}") for member in files], tar)
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as out:
        out.write(tar.getvalue())
    return Distribution(f"{root}.tar.gz", packed.getvalue())


def upload(files: Iterable[Distribution], staging: str) -> None:
    """Upload the files that the bucket lacks.

    Raises:
        Unanswered: Cloud Storage can't be reached.
        Refused: the bucket doesn't exist, or can't be written to.
    """
    from pyarrow import ArrowException

    from footplate.data.remote.location import locate

    for file in files:
        location = locate(file.uri(staging))
        try:
            there = location.filesystem.get_file_info(location.path)
            # Write the file if it is missing or incomplete. Without `compression=None`, pyarrow would compress it as its
            # name says.
            if there.size != len(file.content):
                with location.filesystem.open_output_stream(location.path, compression=None) as out:
                    out.write(file.content)
        except (OSError, ArrowException) as error:
            raise _trouble(staging, str(error)) from None


def _trouble(staging: str, error_text: str) -> FootplateError:
    """Return the failure behind an error of pyarrow, recognised by its text."""
    bucket, text = staging.removeprefix("gs://").partition("/")[0], " ".join(error_text.split())[:300]
    if re.search(r"UNAUTHENTICATED|\b401\b|credentials", text, re.IGNORECASE):
        return Refused(f"Cloud Storage doesn't accept the credentials. {LOG_IN}", 401)
    if re.search(r"PERMISSION_DENIED|\b403\b|does not have .* access", text, re.IGNORECASE):
        return Refused(
            f"This account can't write to the staging bucket gs://{bucket}. The role that allows it is "
            f"roles/storage.objectAdmin. An owner of the bucket grants it: "
            f"gcloud storage buckets add-iam-policy-binding gs://{bucket} --member=user:YOU "
            "--role=roles/storage.objectAdmin",
            403,
        )
    if re.search(r"NOT_FOUND|\b404\b|No such|not found|does not exist", text, re.IGNORECASE):
        return Refused(
            f"There is no bucket gs://{bucket}. Create it, in the job's region: "
            f"gcloud storage buckets create gs://{bucket} --location REGION",
            404,
        )
    return Unanswered(f"The staging bucket gs://{bucket} can't be reached: {text}.")
