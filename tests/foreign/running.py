"""Runs a suite's test files in processes of their own, and collects the outcome of each case."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from foreign.plugins import foreign_processes
from foreign.suites import Suite

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parent.parent


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        outcome: "passed", "failed", "skipped", or "unused" for a case that passes without Footplate. error: the exception
        that ended the case. line: the line that raised it. seconds: the duration of that phase. phase: "setup", "call" or
        "teardown": the phase that decided. A case that fails only in teardown has passed its body, and
            left something behind: a thread, a process, an environment variable.
    """

    outcome: str
    error: str = ""
    line: str = ""
    seconds: float = 0.0
    phase: str = "call"
    at: float = 0.0  # the time of the outcome, in seconds since the epoch


@dataclass(frozen=True)
class _Job:
    """Settings that all files of a run share.

    Attributes:
        suite: the suite.
        work: the folder of the run.
        mark: the mark of all processes of the run.
        chosen: a file with the cases to run; None for all.
        until: the time limit of the run, by `time.monotonic`.
        file_s: the time limit of a file's run.
        stopping: set when no other file may begin.
    """

    suite: Suite
    work: Path
    mark: str
    chosen: Path | None
    until: float
    file_s: float
    stopping: threading.Event


def run(
    suite: Suite,
    archives: Path,
    files: Sequence[str],
    wanted: Iterable[str] | None,
    workers: int,
    file_s: float,
    until: float = float("inf"),
) -> dict[str, Outcome]:
    """Run files of a suite.

    Args:
        suite: the suite.
        archives: the folder of archives.
        files: test files, relative to the suite's tests.
        wanted: the only cases to run; None for all.
        workers: the number of files that run at a time.
        file_s: the time limit of a file's run; unfinished cases are then missing.
        until: the time limit of the whole run, by `time.monotonic`; the remaining files don't run.
    """
    mark = uuid.uuid4().hex
    stopping = threading.Event()
    with tempfile.TemporaryDirectory(prefix="foreign-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        _unpack(suite, archives, work / "unpacked")
        (work / "unpacked" / "foreign.ini").write_text("[pytest]\n")
        chosen = None
        if wanted is not None:
            chosen = work / "wanted"
            chosen.write_text("\n".join(wanted))
        job = _Job(suite, work, mark, chosen, until, file_s, stopping)
        found: dict[str, Outcome] = {}
        try:
            with ThreadPoolExecutor(workers) as pool:
                try:
                    for outcomes in pool.map(lambda file: _run_file(job, file), files):
                        found.update(outcomes)
                except BaseException:  # the pool waits for its threads, and those for their processes
                    stopping.set()
                    foreign_processes.end(mark)
                    raise
        finally:
            foreign_processes.end(mark)
        return found


def test_files(suite: Suite, archives: Path) -> list[str]:
    """The suite's test files, in order."""
    with tempfile.TemporaryDirectory(prefix="foreign-") as folder:
        _unpack(suite, archives, Path(folder))
        tests = Path(folder) / suite.tests
        found: list[str] = []
        for name in suite.files:
            place = tests / name
            paths = [place] if place.is_file() else sorted(place.rglob("test_*.py"))
            found += [str(path.relative_to(tests)) for path in paths]
        return found


def find_archive(suite: Suite, archives: Path) -> Path | None:
    """The suite's archive, or None if the folder has none."""
    return next(iter(sorted(archives.glob(suite.archive))), None)


def _unpack(suite: Suite, archives: Path, to: Path) -> None:
    archive = find_archive(suite, archives)
    if archive is None:
        raise FileNotFoundError(f"{archives / suite.archive}: no such archive")
    with tarfile.open(archive) as opened:
        # Python 3.11.2, which Debian 12 has, has no filters.
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(to)


def _run_file(job: _Job, file: str) -> dict[str, Outcome]:
    """Run one file on all ranks of the suite. A case has passed if it has passed on all of them."""
    suite = job.suite
    limit_s = min(job.file_s, job.until - time.monotonic())
    if job.stopping.is_set():
        return {}
    if limit_s <= 0:
        print(f"{suite.name} {file}: not run, the time for the whole is over", flush=True)
        return {}
    place = _made(job.work / file.replace("/", "_").removesuffix(".py"))
    mark = f"{job.mark}-{place.name}-"
    environment = _environment(suite, job.work, place, job.chosen)
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    ranks = 1 if suite.alone and file.startswith(suite.alone) else suite.ranks
    try:
        for rank in range(ranks):
            results = place / f"results-{rank}"
            results.touch()
            own = {
                "FOREIGN_RESULTS": str(results),
                "TMPDIR": str(_made(place / f"tmp-{rank}")),
                foreign_processes.MARK: f"{mark}{rank}.",
            }
            with (place / f"log-{rank}").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        _command(suite, job.work, file, place / f"base-{rank}"),
                        cwd=_made(place / f"cwd-{rank}"),
                        env={**environment, **own, **_place_of(ranks, rank, port)},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        in_time = _await(processes, limit_s)
    finally:
        foreign_processes.end(mark)
        for process in processes:
            process.wait()
    outcomes = _merged([_read_results(place / f"results-{rank}") for rank in range(ranks)])
    if not in_time:
        print(f"{suite.name} {file}: ended after {limit_s:.0f} s", flush=True)
    elif not outcomes and any(process.returncode not in (0, 5) for process in processes):
        tail = (place / "log-0").read_text(errors="replace").strip().splitlines()[-3:]
        print(f"{suite.name} {file}: no case ran: {' / '.join(tail)}", flush=True)
    return outcomes


def _environment(suite: Suite, work: Path, place: Path, chosen: Path | None) -> dict[str, str]:
    paths = (_HERE / "plugins", work / "unpacked" / suite.root, work / "unpacked" / "test" / "utils", _REPOSITORY)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FOOTPLATE"))},
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HOME": str(_made(place / "home")),
        "FOREIGN_TESTS": suite.tests,
        "FOREIGN_WANTED": str(chosen or ""),
        **suite.environment,
    }


def _command(suite: Suite, work: Path, file: str, base: Path) -> list[str]:
    unpacked = work / "unpacked"
    plugins = ("foreign_recorder", *((suite.plugin,) if suite.plugin else ()), "pytest_timeout", "no:cacheprovider")
    return [
        sys.executable, "-m", "pytest", str(unpacked / suite.tests / file), "-q", "--tb=no", "--color=no",
        "-c", str(unpacked / "foreign.ini"), "--rootdir", str(unpacked), "--basetemp", str(base),
        *(argument for plugin in plugins for argument in ("-p", plugin)),
        f"--timeout={suite.case_s}", "--timeout-method=signal", "--disable-pytest-warnings",
    ]  # fmt: skip


def _place_of(ranks: int, rank: int, port: int) -> dict[str, str]:
    """Environment variables of a rank, with torchrun's names and with Horovod's."""
    if ranks == 1:
        return {}
    size = str(ranks)
    return {
        "RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": size,
    }  # fmt: skip


def _await(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Wait for the processes. Return False if one hasn't ended within the limit."""
    until = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def _read_results(path: Path) -> dict[str, Outcome]:
    """Outcome of each case: the first phase that failed, or else its body."""
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):  # the process was ended while it wrote
            break
        record = json.loads(line)
        case, phase = record.pop("case"), record.pop("when")
        if phase == "begin":
            record["error"] = "the process ended inside the case"
        known = found.get(case)
        if known is None or known.phase == "begin" or (record["outcome"] == "failed" and known.outcome != "failed"):
            found[case] = Outcome(**record, phase=phase)
    return found


def _merged(ranks: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """Combined outcome of each case over all ranks: the worst. Among failures, the earliest, which causes the others."""
    severity = ("passed", "skipped", "unused", "failed")
    merged: dict[str, Outcome] = {}
    for case in {case for rank in ranks for case in rank}:
        by_rank = {number: rank[case] for number, rank in enumerate(ranks) if case in rank}
        worst, outcome = max(by_rank.items(), key=lambda each: (severity.index(each[1].outcome), -each[1].at))
        missing = [number for number in range(len(ranks)) if number not in by_rank]
        if missing and outcome.outcome != "failed":
            outcome = Outcome("failed", f"rank {missing[0]} didn't come to the case")
        elif len(ranks) > 1 and outcome.outcome == "failed":
            outcome = replace(outcome, error=f"rank {worst}: {outcome.error}")
        merged[case] = outcome
    return merged


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
