"""A package's archive: its contents, the excluded files, and the same archive for the same files."""

from __future__ import annotations

import os
import tarfile
import time

import object_storage
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port

from footplate.core.errors import PackageError
from footplate.data.remote.services import Address, connect
from footplate.jobs.package import archive, snapshot, snapshots, stored
from footplate.jobs.package.archive import Member


def test_all_files_of_a_package_go_in_data_and_subpackages_too(project):
    project.write("trainer/models/__init__.py", "")
    project.write("trainer/data/words.txt", "a b")
    project.write("trainer/data/empty", "")
    assert project.names() == [
        "trainer/__init__.py", "trainer/data/empty", "trainer/data/words.txt", "trainer/models/__init__.py",
        "trainer/task.py",
    ]  # fmt: skip


def test_what_is_never_part_of_a_program_stays_out(project):
    never = [
        ".git/config", "__pycache__/task.cpython-311.pyc", "epoch=1.ckpt/meta.json", "env/pyvenv.cfg", "env/lib/x.py",
        "node_modules/x.js", ".venv/x", "trainer.egg-info/PKG-INFO", ".pytest_cache/x",
    ]  # fmt: skip
    for name in never:
        project.write(f"trainer/{name}", "x")
    assert project.names() == ["trainer/__init__.py", "trainer/task.py"]


def test_beside_the_package_goes_what_says_how_it_is_installed_and_nothing_else(project):
    project.write("requirements.txt", "numpy\n")
    project.write("notes.txt", "x")
    project.write("train.py", "x")
    project.write("other/__init__.py", "")
    assert project.names() == ["requirements.txt", "trainer/__init__.py", "trainer/task.py"]


def test_with_a_setup_py_its_other_packages_go_in_too_as_find_packages_finds_them(project):
    project.write("setup.py", "")
    project.write("common/__init__.py", "")
    project.write("common/io.py", "")
    project.write("data/big.csv", "")
    assert project.names() == [
        "common/__init__.py", "common/io.py", "setup.py", "trainer/__init__.py", "trainer/task.py"
    ]  # fmt: skip


def test_what_git_leaves_out_stays_out_and_is_said(project):
    project.write(".git/HEAD", "")
    project.write(".gitignore", "*.csv\n")
    project.write("trainer/.gitignore", "!small.csv\noutputs/\n")
    for name in ("big.csv", "small.csv", "outputs/model.pt"):
        project.write(f"trainer/{name}", "x")
    taken = project.take()
    assert [name for name, _ in taken.files] == [
        "source/trainer/.gitignore", "source/trainer/__init__.py", "source/trainer/small.csv", "source/trainer/task.py"
    ]  # fmt: skip
    assert taken.warnings == (".gitignore excludes from the package: trainer/big.csv, trainer/outputs.",)


def test_what_looks_like_a_secret_is_warned_of_by_name(project):
    project.write("trainer/.env", "TOKEN=1")
    project.write("trainer/certs/server.pem", "x")
    project.write("trainer/account.json", '{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----"}')
    project.write("trainer/settings.json", '{"type": "adam"}')
    (warning,) = project.take().warnings
    assert "trainer/.env, trainer/account.json, trainer/certs/server.pem." in warning
    assert "settings" not in warning


def test_a_link_within_goes_in_as_what_it_leads_to(project):
    project.write("shared/words.txt", "a b")
    (project.package / "words.txt").symlink_to("../shared/words.txt")
    (project.package / "again.py").symlink_to("task.py")
    taken = project.take()
    assert dict(taken.files)["source/trainer/words.txt"] == 3
    with tarfile.open(taken.path) as tar:
        assert all(member.isreg() for member in tar)


@pytest.mark.parametrize("target", ["/etc/hostname", "../../outside.txt", "/etc"])
def test_a_link_that_leads_out_is_refused(project, target):
    (project.root.parent / "outside.txt").write_text("x")
    (project.package / "link").symlink_to(target)
    with pytest.raises(PackageError, match=r"trainer/link is a link to .*, outside of the package"):
        project.take()


def test_a_link_that_leads_nowhere_and_one_in_a_circle_are_refused(project):
    (project.package / "gone").symlink_to("nothing")
    with pytest.raises(PackageError, match="trainer/gone is a link to 'nothing', which doesn't exist"):
        project.take()
    (project.package / "gone").unlink()
    (project.package / "sub").symlink_to(".")
    with pytest.raises(PackageError, match="trainer/sub is a link to a directory that contains it"):
        project.take()


def test_what_is_no_plain_file_is_refused(project):
    os.mkfifo(project.package / "pipe")
    with pytest.raises(PackageError, match="trainer/pipe isn't a plain file"):
        project.take()


def test_a_directory_that_is_no_package_is_refused(project):
    with pytest.raises(PackageError, match=r"isn't a package: expected a directory with an __init__\.py"):
        snapshot(project.root, [], project.home)


def test_a_name_that_is_no_utf8_is_refused(project):
    (project.package / os.fsdecode(b"caf\xe9.py")).write_text("")
    with pytest.raises(PackageError, match=r"rename it"):
        project.take()


def test_a_package_that_is_too_large_is_refused_and_the_biggest_files_are_named(project, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_BYTES", 3 * 2**20)
    project.write("trainer/small.bin", bytes(2**20))
    project.write("trainer/large.bin", bytes(5 * 2**20))
    with pytest.raises(
        PackageError, match=r"has 6 MiB in 4 files; at most 3 MiB .*large\.bin \(5\.0 MiB\), trainer/small\.bin"
    ):
        project.take()
    assert not list(project.home.glob("**/*.tar"))


def test_source_that_is_edited_changes_nothing_that_was_taken(project):
    first = project.take()
    content = first.path.read_bytes()
    project.write("trainer/task.py", "print('two')\n")
    second = project.take()
    assert second.digest != first.digest
    assert first.path.read_bytes() == content
    assert stored(first.digest, project.home).files == first.files


def test_a_package_that_was_never_taken_is_not_there(project):
    with pytest.raises(PackageError, match="the job's package was deleted"):
        stored("0" * 64, project.home)
    with pytest.raises(PackageError, match="the job's package was deleted"):
        stored("../../etc/passwd", project.home)


def test_times_owners_and_umask_make_no_difference(project, tmp_path):
    first = project.take()
    os.utime(project.package / "task.py", (time.time() - 1e6,) * 2)
    (project.package / "task.py").chmod(0o600)
    again = snapshot(project.package, [], tmp_path / "another home")
    assert again.digest == first.digest
    assert again.path.read_bytes() == first.path.read_bytes()
    project.write("trainer/task.py", "print('one')\n", mode=0o700)
    assert project.take().digest != first.digest  # it may be executed now, which is another thing


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=120
).filter(lambda name: name not in (".", ".."))
FILES = st.dictionaries(NAMES, st.tuples(st.binary(max_size=600), st.booleans()), max_size=6)


@settings(deadline=None)
@given(FILES, st.randoms(use_true_random=False))
def test_an_archive_is_what_is_in_it_in_whatever_order_it_comes(files, random):
    import io

    members = [
        Member(f"source/{name}", lambda content=content: content, mode) for name, (content, mode) in files.items()
    ]
    one, other = io.BytesIO(), io.BytesIO()
    digest = archive.write(members, one)
    random.shuffle(members)
    assert archive.write(members, other) == digest
    assert one.getvalue() == other.getvalue()
    one.seek(0)
    with tarfile.open(fileobj=one) as tar:
        read = {member.name: (tar.extractfile(member).read(), bool(member.mode & 0o100)) for member in tar}
    assert read == {f"source/{name}": pair for name, pair in files.items()}


def test_the_digest_of_an_archive_is_this_one_on_every_machine(tmp_path):
    with (tmp_path / "a.tar").open("wb") as out:
        digest = archive.write(
            [Member("source/trainer/task.py", lambda: b"print(1)\n"), Member("source/é", bytes, True)], out
        )
    assert digest == "a3a2f1722a66fbd049fe972eb57a435a924281dc3f1f1ea80460a253f70f648f"


def test_wheels_go_in_under_their_names(project):
    wheel = project.write("dist/helpers-1.0-py3-none-any.whl", b"PK")
    assert ("packages/helpers-1.0-py3-none-any.whl", 2) in project.take(str(wheel)).files


@pytest.mark.engine
def test_wheels_are_fetched_from_a_bucket(project, monkeypatch):
    port = free_port()
    with object_storage.serve_s3(port):
        for name, value in object_storage.s3_settings(port).items():
            monkeypatch.setenv(name, value)
        object_storage.make_bucket(port)
        with connect(Address("s3", ""), os.environ).open_output_stream("lake/helpers-1.0-py3-none-any.whl") as out:
            out.write(b"PK")
        taken = project.take("s3://lake/helpers-1.0-py3-none-any.whl")
        assert ("packages/helpers-1.0-py3-none-any.whl", 2) in taken.files
        with pytest.raises(PackageError, match=r"--packages s3://lake/none-1\.whl can't be read"):
            project.take("s3://lake/none-1.whl")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("helpers.exe", "expected a wheel or a source distribution"),
        ("dist/-r.whl", "expected a wheel or a source distribution"),
        ("missing-1.0-py3-none-any.whl", "can't be read: No such file"),
    ],
)
def test_a_package_that_is_none_is_refused(project, uri, message):
    with pytest.raises(PackageError, match=message):
        project.take(uri)


def test_two_packages_of_one_name_are_refused_unless_they_are_the_same(project):
    one, other = project.write("a/h-1.tar.gz", b"1"), project.write("b/h-1.tar.gz", b"2")
    assert project.take(str(one), str(one)).files[0] == ("packages/h-1.tar.gz", 1)
    with pytest.raises(PackageError, match="two different packages have the name h-1"):
        project.take(str(one), str(other))


@pytest.mark.parametrize(
    "line", ["-e ../lib", ".[gpu]", "./wheels/a.whl", "../lib", "/opt/lib", "file:///opt/a.whl", "a @ file:///opt/a"]
)
def test_a_requirement_that_lies_on_this_machine_is_refused_with_its_line(project, line):
    project.write("requirements.txt", f"# what it needs\nnumpy>=1\n{line}\n")
    with pytest.raises(PackageError, match=r"requirements\.txt line 3: .* is on this machine"):
        project.take()


@pytest.mark.parametrize("line", ["-e .", "--editable=.", "-e ./", ".", "-e .  # this package"])
def test_the_package_itself_is_left_out_of_its_requirements_with_a_notice(project, line):
    project.write("requirements.txt", f"numpy>=1\n{line}\ntorch\n")
    taken = project.take()
    with tarfile.open(taken.path) as tar:
        assert tar.extractfile("source/requirements.txt").read() == b"numpy>=1\ntorch\n"
    assert taken.warnings == ("requirements.txt: the package itself (-e .) is left out, since it is included anyway.",)


def test_a_list_that_includes_another_takes_those_beside_it_alone(project):
    project.write("requirements-base.txt", "numpy\n")
    project.write("requirements.txt", "-r requirements-base.txt\n-c constraints.txt\n")
    assert "requirements-base.txt" in project.names()
    project.write("requirements.txt", "-r ../other/base.txt\n")
    with pytest.raises(PackageError, match=r"expected a file next to requirements\.txt"):
        project.take()
