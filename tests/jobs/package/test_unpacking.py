"""Unpacking of any archive: no file is written outside of the target directory, and no link is made."""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.core.errors import PackageError
from footplate.jobs.package import install, unpacking
from footplate.jobs.package.unpacking import extract, unpack
from footplate.jobs.supervision.identity import boot

PLAIN = (tarfile.REGTYPE, tarfile.CONTTYPE)
KINDS = (
    *PLAIN, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
    tarfile.GNUTYPE_SPARSE,
)  # fmt: skip
PARTS = st.sampled_from(["source", "packages", "..", ".", "", "a", "b.py", "/", "~", "C:", "\\..", "é"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map("/".join)
MEMBERS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(KINDS),
        st.sampled_from(["", "/etc/passwd", "../../x", "source/a"]),
        st.binary(max_size=9),
    ),
    max_size=5,
)


def tar_of(path: Path, members) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, target, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, target, 0o6777
            info.size = len(content) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(content))
    return path


@settings(deadline=None)
@given(MEMBERS)
def test_an_archive_is_unpacked_below_its_directory_or_refused(members):
    root = Path(tempfile.mkdtemp())
    try:
        archive = tar_of(root / "hostile.tar", members)
        into = root / "a/b/c"
        into.mkdir(parents=True)
        try:
            extract(archive, into)
        except PackageError:
            pass
        else:
            assert all(kind in PLAIN for _, kind, _, _ in members)
        written = [path for path in root.rglob("*") if not path.is_dir()]
        assert all(path == archive or path.is_relative_to(into) for path in written)
        assert not any(path.is_symlink() for path in written)
        assert all(
            path.stat().st_mode & 0o6022 == 0 for path in written if path != archive
        )  # neither setuid nor writable
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "source/../../x", "../x", "source", "elsewhere/x", "source/a/../b", "//etc/x", "."]
)
def test_a_name_that_leads_out_is_refused(tmp_path, name):
    archive = tar_of(tmp_path / "x.tar", [(name, tarfile.REGTYPE, "", b"x")])
    with pytest.raises(PackageError, match="can't be unpacked: expected a name below"):
        extract(archive, tmp_path / "into")
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("kind", KINDS[2:-1])
def test_a_link_or_a_device_is_refused_before_anything_is_written(tmp_path, kind):
    archive = tar_of(tmp_path / "x.tar", [("source/a", tarfile.REGTYPE, "", b"x"), ("source/b", kind, "/etc", b"")])
    with pytest.raises(PackageError, match=r"'source/b' can't be unpacked: it isn't a plain file"):
        extract(archive, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_name_that_is_there_twice_or_lies_in_a_file_is_refused(tmp_path):
    for other in ("source/a", "source/a/b"):
        members = [("source/a", tarfile.REGTYPE, "", b"1"), (other, tarfile.REGTYPE, "", b"2")]
        with pytest.raises(PackageError, match=r"it occurs twice|its path leads through a file"):
            extract(tar_of(tmp_path / "x.tar", members), tmp_path / "into")


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=2000))
def test_bytes_that_are_no_archive_are_refused(content):
    root = Path(tempfile.mkdtemp())
    try:
        (root / "x.tar").write_bytes(content)
        with contextlib.suppress(PackageError):
            extract(root / "x.tar", root / "into")
        assert not list(root.glob("into/*"))
    finally:
        shutil.rmtree(root)


def test_an_archive_that_was_changed_is_refused(project):
    taken = project.take()
    content = bytearray(taken.path.read_bytes())
    content[600] ^= 1
    taken.path.write_bytes(bytes(content))
    with pytest.raises(PackageError, match="has changed since the job was submitted"):
        install(taken, project.home, io.StringIO())


def test_an_unpacking_that_was_cut_off_is_no_package(project):
    taken = project.take()
    half = project.home / "unpacked" / boot() / ".cut-off"
    (half / "source").mkdir(parents=True)
    place, _ = unpack(taken.path, taken.digest, project.home)
    assert (place / "source/trainer/task.py").read_text() == "print('one')\n"


def test_after_a_reboot_it_is_unpacked_again_since_files_may_not_have_reached_the_disk(project, monkeypatch):
    taken = project.take()
    place, _ = unpack(taken.path, taken.digest, project.home)
    (place / "source/trainer/task.py").write_text("")
    monkeypatch.setattr(unpacking, "boot", lambda: "the-next")
    place, _ = unpack(taken.path, taken.digest, project.home)
    assert (place / "source/trainer/task.py").read_text() == "print('one')\n"
