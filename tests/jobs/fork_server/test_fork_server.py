"""Trials that begin from forks: the same programs as in new interpreters, and as safe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from footplate.core.version import LIBRARY
from footplate.jobs.fork_server.environment import placeholder
from footplate.jobs.fork_server.programs import Origin
from footplate.jobs.fork_server.request import SOCKET, request_supervisor
from footplate.jobs.fork_server.server import JOB_ID, STALE, Config
from footplate.jobs.states import State
from footplate.jobs.supervision.identity import Identity
from jobs.conftest import Bench, until
from jobs.tuning.conftest import grid, line_of

SERVER = "footplate.jobs.fork_server.server"
HEAD = """
import hypertune
trial = os.environ["CLOUD_ML_TRIAL_ID"]
def report():
    hypertune.HyperTune().report_hyperparameter_tuning_metric("accuracy", 0.5, global_step=1)
def is_forked():
    return "footplate.jobs.fork_server" in Path("/proc/self/cmdline").read_text()
"""


def tune(bench: Bench, source: str, name: str = "tuned", **keys: object) -> None:
    bench.program(HEAD + textwrap.dedent(source))
    bench.submit(name, (), grid(**{"maxTrials": 2, **keys}))


def pids_of(directory: Path, word: str = SERVER) -> list[int]:
    """The processes of a home, forks of the fork server included, that were started with this word."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            ours = os.fsencode(directory) in (process / "environ").read_bytes()
            # Only the exit code is left of a zombie.
            if ours and word.encode() in words and Identity.of(int(process.name)):
                pids.append(int(process.name))
    return pids


def server_of(bench: Bench) -> int:
    """The process id of the fork server: a child of the tuning's supervisor."""
    supervisor = bench.supervisor("tuned")

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def look() -> int | None:
        for pid in pids_of(bench.directory.parent):
            with suppress(OSError):
                if parent(pid) == supervisor:
                    return pid
        return None

    return until(look)


def dump_of(bench: Bench, name: str) -> dict[str, Any]:
    """What the program of a trial has found, with the trial's own names replaced."""
    text = bench.output(name)
    tuning = name.removesuffix("_trial_1")
    for own in (bench.jobs.store.find(name).id, bench.jobs.store.find(tuning).id, name, tuning):
        text = text.replace(own, "NAME")
    return json.loads(text)


DUMP = """
import gc, logging, runpy
if trial == "1":
    main = sys.modules["__main__"]
    environ = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "CLUSTER_SPEC")}
    print(json.dumps({
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "directory": os.getcwd(), "environ": environ,
        "main": [main.__name__, main.__file__, main.__spec__.name, main.__dict__ is globals()],
        "files": sorted(os.listdir("/proc/self/fd")), "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "logging": len(logging.root.handlers),
        "stdin": sys.stdin.read(), "streams": [sys.stdout.line_buffering, sys.stdout.encoding, sys.stderr.errors],
        "threads": len(os.listdir("/proc/self/task")), "umask": os.umask(0o22),
        "tf": sorted(json.loads(os.environ["TF_CONFIG"])),
    }))
    (place / f"forked-{is_forked()}").touch()
report()
"""


def test_a_forked_program_finds_what_a_new_interpreter_gives(bench: Bench):
    # A tuning of one trial has no fork server.
    tune(bench, DUMP, "alone", maxTrials=1)
    assert bench.jobs.wait("alone").state == State.SUCCEEDED
    assert (bench.directory / "forked-False").exists()
    tune(bench, DUMP, "forks")
    assert bench.jobs.wait("forks").state == State.SUCCEEDED
    assert (bench.directory / "forked-True").exists()
    forks, alone = dump_of(bench, "forks_trial_1"), dump_of(bench, "alone_trial_1")
    assert set(forks["environ"].items()) ^ set(alone["environ"].items()) == set()
    assert forks == alone


def test_a_program_that_imports_pyarrow_begins_from_a_fork_although_jemalloc_has_a_thread(bench: Bench):
    source = """
    import pyarrow as pa
    from pyarrow import parquet
    table = pa.table({"row": pa.array(range(100_000)).cast(pa.int64(), memory_pool=pa.jemalloc_memory_pool())})
    parquet.write_table(table, place / f"{trial}.parquet")
    print(is_forked(), sum(parquet.read_table(place / f"{trial}.parquet")["row"].to_pylist()))
    del table
    report()
    """
    tune(bench, source)
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    assert bench.output("tuned_trial_1") == "True 4999950000\n"


ENDS = ("sys.exit(0)", "sys.exit(3)", "sys.exit('a text')", "sys.exit(None)", "raise RuntimeError('broken')")


def test_a_program_ends_as_an_interpreter_does(bench: Bench):
    """Each trial of a tuning ends in its own way, as the trial of another tuning does that has no fork server."""
    source = f"""
    import atexit, sys, threading, time
    atexit.register(lambda: print("at exit"))
    threading.Thread(target=lambda: (time.sleep(0.3), print("a thread that isn't a daemon"))).start()
    print("no line break", end=" ")
    report()
    if attempt == 1:
        (place / f"{{sys.argv[1]}}-{{trial}}-{{is_forked()}}").touch()
    exec({ENDS}[int(trial if sys.argv[1] == "each" else sys.argv[1]) - 1])
    """
    count = len(ENDS)
    bench.program(HEAD + textwrap.dedent(source))
    names = [f"alone_{number}" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        bench.submit(name, (str(number),), grid(maxTrials=1))
    bench.submit("forks", ("each",), line_of(count, maxTrials=count, maxParallelTrials=count, maxFailedTrials=count))
    for name in (*names, "forks"):
        bench.jobs.wait(name)
    for number, name in enumerate(names, 1):
        assert (bench.directory / f"{number}-1-False").exists()
        assert (bench.directory / f"each-{number}-True").exists()
        alone, forks = bench.jobs.store.find(f"{name}_trial_1"), bench.jobs.store.find(f"forks_trial_{number}")
        assert (forks.state, forks.cause, forks.attempt) == (alone.state, alone.cause, alone.attempt)
        output = bench.output(f"forks_trial_{number}")
        assert output == bench.output(f"{name}_trial_1")
        assert "no line break" in output
        assert output.index("a thread") < output.index("at exit")
    assert bench.jobs.store.state(f"forks_trial_{count}") == State.FAILED
    assert "RuntimeError: broken" in bench.output(f"forks_trial_{count}")


def test_trials_go_on_without_their_fork_server_and_the_next_ones_get_another(bench: Bench):
    source = """
    (place / f"began-{trial}-{is_forked()}").touch()
    until_there(f"go-{trial}")
    report()
    """
    tune(bench, source, maxTrials=4)
    bench.there("began-1-True")
    first = server_of(bench)
    os.kill(first, signal.SIGKILL)
    (bench.directory / "go-1").touch()
    bench.there("began-2-True")
    assert server_of(bench) != first
    for number in (2, 3, 4):
        (bench.directory / f"go-{number}").touch()
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    assert [bench.jobs.store.find(f"tuned_trial_{number}").attempt for number in (1, 2, 3, 4)] == [1, 1, 1, 1]
    # Neither the fork server nor a fork is left.
    until(lambda: not pids_of(bench.directory.parent))
    assert not (bench.jobs.home.job("tuned") / SOCKET).exists()


def test_a_fork_server_that_is_stopped_keeps_nobody_waiting(bench: Bench):
    source = """
    (place / f"began-{trial}-{is_forked()}").touch()
    until_there(f"go-{trial}")
    report()
    """
    tune(bench, source)
    bench.there("began-1-True")
    server = server_of(bench)
    os.kill(server, signal.SIGSTOP)
    (bench.directory / "go-1").touch()
    bench.there("began-2-False")
    os.kill(server, signal.SIGCONT)
    (bench.directory / "go-2").touch()
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    until(lambda: not pids_of(bench.directory.parent))


@pytest.mark.parametrize("who", ["supervisor", "program"])
def test_a_killed_process_of_a_trial_is_replaced_and_leaves_nothing(bench: Bench, who: str):
    source = """
    if trial == "1" and attempt == 1:
        # It has left its group and session, and was started by no program.
        if os.fork() == 0:
            os.setsid()
            (place / "child").write_text(str(os.getpid()))
            time.sleep(600)
        until_there("child")
        (place / "program.new").write_text(str(os.getpid()))
        (place / "program.new").rename(place / "program")
        time.sleep(600)
    report()
    """
    tune(bench, source)
    program = int(bench.there("program").read_text())
    child = int((bench.directory / "child").read_text())
    assert len(pids_of(bench.directory.parent)) > 1
    os.kill(program if who == "program" else bench.supervisor("tuned_trial_1"), signal.SIGKILL)
    if who == "supervisor":
        until(lambda: Identity.of(program) is None)
        bench.jobs.reconcile()
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    assert bench.jobs.store.find("tuned_trial_1").attempt == 2
    assert Identity.of(child) is None
    until(lambda: not pids_of(bench.directory.parent))


def test_a_forked_trial_that_is_cancelled_may_save(bench: Bench):
    source = """
    signal.signal(signal.SIGTERM, lambda *_: (print("saving", flush=True), sys.exit(143)))
    (place / f"began-{trial}-{is_forked()}").touch()
    time.sleep(600)
    """
    tune(bench, source)
    bench.there("began-1-True")
    bench.jobs.cancel("tuned")
    assert bench.jobs.wait("tuned").state == State.CANCELLED
    assert bench.output("tuned_trial_1") == "saving\n"
    until(lambda: not pids_of(bench.directory.parent))


def test_all_processes_of_a_trial_begin_from_forks(bench: Bench):
    source = """
    (place / f"{role}-{is_forked()}").touch()
    if role == "chief":
        until_there("worker-True")
        report()
    """
    bench.program(HEAD + textwrap.dedent(source))
    cluster = "  scaleTier: CUSTOM\n  masterType: n1-standard-4\n  workerCount: 1\n  workerType: n1-standard-4\n"
    bench.submit("tuned", (), grid(maxTrials=2) + "\n" + cluster)
    assert bench.jobs.wait("tuned").state == State.SUCCEEDED
    assert (bench.directory / "chief-True").exists()


ORIGIN = Origin("/bin/python", {"PATH": "/bin", "LEVEL": "1"}, frozenset({"PATH", "RANK"}))
COMMAND = ["/bin/python", "-P", "-m", "trainer.task"]


@pytest.mark.parametrize(
    ("command", "base", "own", "reason"),
    [
        (COMMAND, ORIGIN.base, {"TF_CONFIG": "{}"}, ""),
        (["/venv/python", *COMMAND[1:]], ORIGIN.base, {}, "its command is /venv/python -P -m"),
        (["/bin/python", "-P", "task.py"], ORIGIN.base, {}, "its command is /bin/python -P task.py"),
        (COMMAND, {"PATH": "/bin", "LEVEL": "2", "MORE": ""}, {}, "these variables have changed: LEVEL, MORE"),
        (COMMAND, {"PATH": "/bin"}, {}, "these variables have changed: LEVEL"),
        (COMMAND, ORIGIN.base, {"RANK": "0"}, "an import has read RANK"),
        (COMMAND, ORIGIN.base, {"PATH": "/mine"}, "an import has read PATH"),
    ],
)
def test_a_program_begins_from_a_fork_only_if_an_interpreter_would_be_the_same(command, base, own, reason):
    assert ORIGIN.why_not(command, base, {**base, **own}) == reason


class Server:
    """A fork server that the test starts, with an installed module `helper`."""

    def __init__(self, folder: Path, source: str = "") -> None:
        self.folder, self.library, self.package = folder / "job", folder / "site", folder / "source"
        for directory in (self.folder, self.library, self.package):
            directory.mkdir()
        (self.library / "helper.py").write_text(source)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        config = Config(
            folder=str(self.folder), package="", variables={}, source=str(self.package), locks=[], names=["helper"],
            installed=[str(self.library)], library=LIBRARY, programs=1,
        )  # fmt: skip
        path = os.pathsep.join(map(str, (self.package, self.library, LIBRARY)))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", SERVER, json.dumps(asdict(config))],
            env={**os.environ, "PYTHONPATH": path, JOB_ID: placeholder()}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self.process

    def errors(self) -> tuple[int, str]:
        """Wait for its end. Returns the exit code and its last line."""
        assert self.process is not None
        _, errors = self.process.communicate()
        return self.process.returncode, errors.splitlines()[-1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    if made.process is not None and made.process.returncode is None:
        made.process.kill()
        made.process.communicate()


def test_a_fork_server_whose_modules_have_changed_refuses_and_ends(server: Server):
    server.start()
    until((server.folder / SOCKET).exists)
    asked = request_supervisor(server.folder)
    assert asked is not None
    asked._connection.close()
    # A process without a job ends.
    until(lambda: Identity.of(asked.pid) is None)
    (server.library / "helper.py").write_text("CHANGED = True")
    assert request_supervisor(server.folder) is None
    code, last = server.errors()
    assert (code, last) == (STALE, f"{server.library / 'helper.py'} has changed")
    # Nobody listens any more.
    assert request_supervisor(server.folder) is None


def test_an_import_that_starts_a_thread_is_the_end_of_the_fork_server(tmp_path: Path):
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    server = Server(tmp_path, source)
    server.start()
    assert server.errors() == (1, "an import has started 1 threads")


def test_a_package_with_a_module_of_a_supervisors_name_has_no_fork_server(server: Server):
    (server.package / "helper.py").touch()
    server.start()
    assert server.errors() == (1, "the package has a module helper, and so has its supervisor")


def test_the_users_own_modules_are_not_imported_before_the_fork(server: Server):
    (server.package / "mine.py").write_text("raise SystemExit('imported')")
    (server.library / "helper.py").write_text("try:\n    import mine\nexcept ImportError:\n    pass\n")
    server.start()
    until((server.folder / SOCKET).exists)
    assert server.process is not None
    assert server.process.poll() is None
