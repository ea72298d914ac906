"""A dry run and a submission accept the same jobs, and refuse the others with the same words."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.cli import jobs_submit
from footplate.core.errors import FootplateError
from footplate.jobs import operations
from footplate.jobs.execution import Execution
from footplate.jobs.operations import Jobs
from footplate.jobs.package import stored

MODULES = ("trainer.task", "trainer.missing", "trainer", "trainer.left_out", "code.task")
PACKAGES = ("trainer", "./trainer/", "sub/../trainer", "link/trainer", "trainer_link", "missing", "file", "loop")
PARTS = ("link inside", "link out", "link nowhere", "fifo", "-e .", "-e ../lib", "setup.py", "ignored")
JOB_DIRS = (
    None, "out", "a/b/c", "file", "file/below", "nowhere", "nowhere/below", "loop", "x" * 300, "a/" + "y" * 256 + "/b",
    "~nobody_has_this_name/out", "file://relative", "gs://bucket/out",
)  # fmt: skip
FLAGS = ((), ("--async",), ("--format", "json"), ("--async", "--stream-logs"), ("--format", "json", "--stream-logs"))


def make(root: Path, parts: frozenset[str]) -> None:
    """A project with `trainer`, links to packages elsewhere, and possible defects of a package."""
    for package in (root / "project" / "trainer", root / "elsewhere" / "code"):
        package.mkdir(parents=True)
        for name in ("__init__.py", "task.py", "left_out.py"):
            (package / name).touch()
        if "link inside" in parts:
            (package / "data.py").symlink_to(package / "task.py")
        if "link out" in parts:
            (package / "data.py").unlink(missing_ok=True)
            (package / "data.py").symlink_to("/etc/hostname")
        if "link nowhere" in parts:
            (package / "nowhere").symlink_to(package / "not_there")
        if "fifo" in parts:
            os.mkfifo(package / "pipe")
        if "ignored" in parts:
            (package / ".gitignore").write_text("left_out.py\n")
    project = root / "project"
    (project / "sub").mkdir()
    (project / "link").mkdir()
    (project / "link" / "trainer").symlink_to(root / "elsewhere" / "code")
    (project / "trainer_link").symlink_to("trainer")
    (project / "file").touch()
    (project / "loop").symlink_to("loop")
    (project / "nowhere").symlink_to("not_there")
    lines = [line for line in ("-e .", "-e ../lib") if line in parts]
    if lines:
        (project / "requirements.txt").write_text("\n".join(lines))
    if "setup.py" in parts:
        (project / "setup.py").touch()


def submit(*argv: str) -> str:
    """The reason why a command line is refused; empty if it is accepted."""
    try:
        assert jobs_submit.run(jobs_submit.parser().parse_args(list(argv)), []) == 0
    except FootplateError as error:
        return str(error)
    return ""


@pytest.fixture
def no_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "reconcile", lambda *_: None)
    monkeypatch.delenv("FOOTPLATE_STORE", raising=False)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PACKAGES),
    st.sampled_from(MODULES),
    st.frozensets(st.sampled_from(PARTS), max_size=2),
    st.sampled_from(JOB_DIRS),
    st.sampled_from(FLAGS),
)
@pytest.mark.usefixtures("no_supervisors")
def test_a_dry_run_and_a_submission_agree(
    package: str, module: str, parts: frozenset[str], job_dir: str | None, flags: tuple[str, ...]
):
    argv = ["my_job", "--package-path", package, "--module-name", module, *flags]
    if job_dir is not None:
        argv += ["--job-dir", job_dir]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        root = Path(scratch).resolve()
        make(root, parts)
        patch.setenv("FOOTPLATE_HOME", str(root / "home"))
        patch.chdir(root / "project")
        rehearsed = submit(*argv, "--dry-run")
        assert not (root / "home" / "packages").exists()
        submitted = submit(*argv)
        assert rehearsed == submitted
        if not submitted:
            jobs = Jobs.from_env()
            plan = Execution.from_dict(jobs.store.find("my_job").plan)
            jobs.store.close()
            names = {name for name, _ in stored(plan.package, root / "home").files}
            if module.partition(".")[0] in ("trainer", Path(package).name):
                assert f"source/{module.replace('.', '/')}.py" in names
            if plan.job_dir is not None and not plan.job_dir.startswith("gs://"):
                Path(plan.job_dir).mkdir(parents=True, exist_ok=True)
    assert Path.cwd() == before
