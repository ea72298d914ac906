"""Unused packages and environments are removed. Those in use, or just being taken into use, stay."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from footplate.core.errors import ConfigError
from footplate.jobs import home as homes
from footplate.jobs.backends.local import machine
from footplate.jobs.home import Home
from footplate.jobs.package import install
from footplate.jobs.package.environment_locks import Hold
from footplate.jobs.package.virtualenv import READY
from footplate.jobs.record import Job
from footplate.jobs.states import State
from footplate.jobs.store import open_store
from footplate.jobs.supervision import cleaning
from footplate.jobs.supervision.cleaning import clean, clean_daily, clean_node
from footplate.jobs.supervision.locks import held
from jobs.conftest import Bench, until
from jobs.package.conftest import Project, project  # noqa: F401  a fixture

MONTH_S = 30 * 86400.0


def age(path: Path, unused_s: float = 2 * MONTH_S) -> None:
    """Make a file old enough to be removed as unused."""
    then = time.time() - unused_s
    os.utime(path, (then, then))


def kinds(home: Home, store, unused_s: float = MONTH_S) -> list[str]:
    return sorted(leftover.kind for leftover in clean(home, store, unused_s))


@pytest.fixture
def home(project: Project) -> Home:  # noqa: F811
    return Home(project.home)


def has(home: Home, name: str, state: State, digest: str) -> Job:
    """Add a job with this package, as a submission does."""
    home.job(name).mkdir(parents=True)
    (home.job(name) / cleaning.PACKAGE).write_text(digest)
    return Job(name, state, 1.0, 1.0, machine.host())


@pytest.mark.parametrize("state", State)
def test_the_package_of_a_job_stays_until_that_has_ended_and_for_a_month_after(project, home, state):  # noqa: F811
    taken = project.take()
    store = open_store(home)
    store.add(has(home, "one", state, taken.digest))
    assert kinds(home, store) == []
    age(taken.path)
    ended = state in (State.SUCCEEDED, State.FAILED, State.CANCELLED)
    assert kinds(home, store) == (["package"] if ended else [])
    assert taken.path.exists() != ended


def test_the_package_of_a_job_in_another_store_stays(project, home):  # noqa: F811
    taken = project.take()
    has(home, "of_the_teams_server", State.QUEUED, taken.digest)
    age(taken.path)
    assert kinds(home, open_store(home)) == []


def test_what_an_attempt_uses_stays_however_old_it_is(project, home):  # noqa: F811
    taken, store = project.take(), open_store(home)
    ready = install(taken, home.root, io.StringIO())
    unpacked = Path(ready.env["PYTHONPATH"].split(os.pathsep)[0]).parent
    age(unpacked)
    assert kinds(home, store) == []
    ready.release()
    assert kinds(home, store) == ["unpacked"]
    assert not unpacked.exists()


def test_an_environment_stays_while_it_is_held_and_one_that_was_cut_off_goes(home):
    home.root.mkdir(exist_ok=True)
    for name in ("whole", "half"):
        place = home.root / "environments" / name
        (place / "bin").mkdir(parents=True)
        (place / "bin/python").write_text("x" * 1000)
    (home.root / "environments/whole" / READY).touch()
    age(home.root / "environments/whole" / READY)
    age(home.root / "environments/half")
    hold = Hold(home.root / "environments/whole.lock")
    store = open_store(home)
    (gone,) = clean(home, store, MONTH_S)
    assert (gone.kind, gone.path.name, gone.nbytes) == ("environment", "half", 1000)
    hold.release()
    (gone,) = clean(home, store, MONTH_S)
    assert (gone.path.name, gone.unused_s > MONTH_S) == ("whole", True)
    assert not list((home.root / "environments").glob("*/"))


def test_on_a_node_what_attempts_have_left_goes_but_no_package_and_nothing_that_is_held_or_young(project, home):  # noqa: F811
    taken = project.take()
    made = [home.root / "environments/old", home.root / "unpacked/boot/old", home.node_directory("ended-1")]
    kept = [home.root / "environments/held", home.node_directory("runs-1"), home.node_directory("young-1"), taken.path]
    for path in (*made, *kept[:3]):
        path.mkdir(parents=True)
        path.with_suffix(".lock").touch()
    for path in (*made, *kept[:2], taken.path):
        age(path)
    holds = [Hold(path.with_suffix(".lock")) for path in kept[:2]]
    clean_node(home)
    assert not any(path.exists() for path in made)
    assert not home.node_directory("ended-1").with_suffix(".lock").exists()
    assert all(path.exists() for path in kept)
    for hold in holds:
        hold.release()
    clean_node(home)
    assert [path.exists() for path in kept] == [False, False, True, True]
    assert not list((home.root / "trash").iterdir())


def test_a_dry_run_says_the_same_and_deletes_nothing(project, home):  # noqa: F811
    taken, store = project.take(), open_store(home)
    age(taken.path)
    said = clean(home, store, MONTH_S, dry_run=True)
    assert taken.path.exists()
    done = clean(home, store, MONTH_S)
    assert [(leftover.path, leftover.nbytes) for leftover in said] == [
        (leftover.path, leftover.nbytes) for leftover in done
    ]
    assert not taken.path.exists()


def test_what_a_kill_has_left_goes_after_a_day(home):
    home.root.mkdir(exist_ok=True)
    store = open_store(home)
    left = [home.root / "packages/.half.part", home.root / "trash/job-1"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert kinds(home, store) == []
    for path in left:
        age(path, 86400.0 + 60)
    assert kinds(home, store) == ["left over", "left over"]
    assert not any(path.exists() for path in left)


def test_a_job_that_is_being_submitted_keeps_its_package_though_everything_unused_is_cleaned(bench: Bench):
    bench.program("print('ran')")
    script = "from footplate.jobs.operations import Jobs; jobs = Jobs.from_env(); print(flush=True)"
    script += "\nwhile True: jobs.clean(0)"
    cleaner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert cleaner.stdout is not None
        cleaner.stdout.readline()
        for number in range(5):
            bench.submit(f"job_{number}")
        for number in range(5):
            assert bench.jobs.wait(f"job_{number}").state == State.SUCCEEDED
    finally:
        cleaner.send_signal(signal.SIGKILL)
        cleaner.communicate()


def test_cleaning_happens_once_a_day_by_itself_when_a_job_has_ended(bench: Bench, project):  # noqa: F811
    bench.program("")
    packages = bench.jobs.home.root / "packages"
    packages.mkdir(exist_ok=True)
    for number in range(2):
        (packages / f"old{number}.tar").touch()
        age(packages / f"old{number}.tar")
        bench.submit(f"job_{number}")
        assert bench.jobs.wait(f"job_{number}").state == State.SUCCEEDED
        until(lambda: not (packages / "old0.tar").exists())
    clean_daily(bench.jobs.home, bench.jobs.store)
    assert (packages / "old1.tar").exists()  # it has been done today
    age(bench.jobs.home.root / "cleaned")
    clean_daily(bench.jobs.home, bench.jobs.store)
    assert not (packages / "old1.tar").exists()


def test_a_lock_that_is_held_for_too_long_is_named(home, monkeypatch):
    home.root.mkdir(exist_ok=True)
    monkeypatch.setattr(homes, "LOCK_S", 0.05)
    with (
        held(home.root / "jobs.lock"),
        pytest.raises(ConfigError, match=r"another process has held .*jobs\.lock"),
    ):
        clean(home, open_store(home), 0.0)
