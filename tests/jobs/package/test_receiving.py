"""A received package: a valid archive of ours, or refused."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.core.errors import PackageError
from footplate.jobs.package import snapshots
from footplate.jobs.package.receiving import receive
from footplate.jobs.package.snapshots import snapshot, stored
from footplate.jobs.package.unpacking import unpack


def tar(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """A tar of names, contents, and the kind and target of each."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind.encode()[:1] or tarfile.REGTYPE, 0o755
            info.linkname, info.size = kind[1:], len(content) if not kind else 0
            made.addfile(info, io.BytesIO(content))
    return io.BytesIO(out.getvalue())


def file(name: str, content: bytes = b"") -> tuple[str, bytes, str]:
    return (name, content, "")


def test_what_was_sent_is_what_is_taken_here(tmp_path):
    package = tmp_path / "trainer"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "task.py", "inner/data.txt"):
        (package / name).write_text(f"# {name}")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as made:
        made.add(package, "./trainer")
    taken = snapshot(package, [], tmp_path / "one")
    received = receive(io.BytesIO(out.getvalue()), tmp_path / "two")
    assert received.digest == taken.digest
    place, _ = unpack(stored(received.digest, tmp_path / "two").path, received.digest, tmp_path / "two")
    assert (place / "source/trainer/inner/data.txt").read_text() == "# inner/data.txt"


def test_what_is_no_part_of_a_program_is_left_out(tmp_path):
    sent = tar(
        file("trainer/__init__.py"),
        file("trainer/__pycache__/a.pyc"),
        file(".git/config"),
        file("trainer/.env", b"K=1"),
    )
    received = receive(sent, tmp_path)
    assert [name for name, _ in received.files] == ["source/trainer/.env", "source/trainer/__init__.py"]
    assert received.warnings[0].startswith("These files seem to contain secrets: trainer/.env.")


@pytest.mark.parametrize(
    "member",
    [
        file("../evil.py"), file("/etc/evil.py"), file("trainer/../../evil.py"), file("trainer/__init__.py/inside.py"),
        ("trainer/link", b"", "2/etc/passwd"), ("trainer/hard", b"", "1/etc/passwd"), ("trainer/device", b"", "3"),
        ("trainer/fifo", b"", "6"), file("trainer/__init__.py", b"again"), file("requirements.txt", b"-e ../other"),
    ],
    ids=lambda case: case[0],
)  # fmt: skip
def test_what_leads_out_or_is_no_plain_file_is_refused(tmp_path, member):
    with pytest.raises(PackageError):
        receive(tar(file("trainer/__init__.py"), member), tmp_path / "home")
    assert not list(tmp_path.rglob("evil*"))
    assert not list(tmp_path.rglob("*.tar"))


def test_what_is_no_package_is_refused(tmp_path):
    whole = gzip.compress(tar(file("trainer/__init__.py", b"x" * 5000)).getvalue())
    for sent in (b"", b"no archive", whole[:40], tar(file("notes.txt")).getvalue(), gzip.compress(b"")):
        with pytest.raises(PackageError):
            receive(io.BytesIO(sent), tmp_path)


def test_a_package_may_be_as_large_as_one_that_is_taken_here(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_BYTES", 1000)
    receive(tar(file("trainer/__init__.py", b"x" * 1000)), tmp_path)
    with pytest.raises(PackageError, match=r"The biggest: trainer/data\.bin \(0\.0 MiB\)"):
        receive(tar(file("trainer/__init__.py", b"x" * 400), file("trainer/data.bin", b"x" * 700)), tmp_path)


@given(st.binary(max_size=600), st.integers(0, 3000), st.integers(0, 255))
def test_bytes_of_any_kind_are_a_package_or_refused(noise, place, byte):
    damaged = bytearray(tar(file("trainer/__init__.py", b"x"), file("trainer/task.py", b"y")).getvalue())
    damaged[place] = byte
    for sent in (noise, bytes(damaged), gzip.compress(bytes(damaged))[: max(20, place)]):
        with tempfile.TemporaryDirectory() as home:
            try:
                received = receive(io.BytesIO(sent), Path(home))
            except PackageError:
                continue
            assert all(name.startswith("source/") for name, _ in received.files)
