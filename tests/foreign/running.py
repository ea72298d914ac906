"""Runs a suite's test files in processes of their own, and collects what became of each case."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from foreign.suites import Suite

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parent.parent
CASE_S = 90.0


@dataclass(frozen=True)
class Outcome:
    """What became of a case: "passed", "failed" or "skipped"; `error` and `line` say why it failed."""

    outcome: str
    error: str = ""
    line: str = ""
    seconds: float = 0.0


def run(
    suite: Suite, archives: Path, files: Sequence[str], wanted: Iterable[str] | None, workers: int, file_s: float
) -> dict[str, Outcome]:
    """Run files of a suite.

    Args:
        suite: whose.
        archives: the folder of archives.
        files: test files, relative to the suite's tests.
        wanted: the only cases to run; None for all.
        workers: how many files run at a time.
        file_s: after how long a file's run is ended; cases that haven't ended are then missing.
    """
    with tempfile.TemporaryDirectory(prefix="foreign-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        _unpack(suite, archives, work / "unpacked")
        chosen = None
        if wanted is not None:
            chosen = work / "wanted"
            chosen.write_text("\n".join(wanted))
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(_run_file, suite, work, file, chosen, file_s) for file in files]
            found: dict[str, Outcome] = {}
            for job in jobs:
                found.update(job.result())
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
        opened.extractall(to, filter="data")


def _run_file(suite: Suite, work: Path, file: str, chosen: Path | None, file_s: float) -> dict[str, Outcome]:
    """One file, on as many ranks as the suite has; a case has passed if it has on all of them."""
    place = work / file.replace("/", "_").removesuffix(".py")
    place.mkdir()
    environment = _environment(suite, work, place, chosen)
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    ranks = 1 if suite.alone and file.startswith(suite.alone) else suite.ranks
    for rank in range(ranks):
        results = place / f"results-{rank}"
        results.touch()
        own = {"FOREIGN_RESULTS": str(results), "TMPDIR": str(_made(place / f"tmp-{rank}"))}
        with (place / f"log-{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    _command(suite, work, file, place / f"base-{rank}"),
                    cwd=_made(place / f"cwd-{rank}"),
                    env={**environment, **own, **_place_of(ranks, rank, port)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    _await(processes, file_s)
    outcomes = _merged([_read_results(place / f"results-{rank}") for rank in range(ranks)])
    if not outcomes and any(process.returncode not in (0, 5) for process in processes):
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
    configuration = unpacked / "foreign.ini"
    configuration.write_text("[pytest]\n")
    return [
        sys.executable, "-m", "pytest", str(unpacked / suite.tests / file), "-q", "--tb=no", "--color=no",
        "-c", str(configuration), "--rootdir", str(unpacked), "--basetemp", str(base),
        "-p", "foreign_recorder", "-p", f"foreign_{suite.name}", "-p", "pytest_timeout", "-p", "no:cacheprovider",
        f"--timeout={CASE_S}", "--timeout-method=signal", "--disable-pytest-warnings",
    ]  # fmt: skip


def _place_of(ranks: int, rank: int, port: int) -> dict[str, str]:
    """The environment of a rank, by torchrun's names and by Horovod's."""
    if ranks == 1:
        return {}
    size = str(ranks)
    return {
        "RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": size,
    }  # fmt: skip


def _await(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Wait for the processes; end them, and all that they have started, after the limit."""
    until = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            until = 0.0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read_results(path: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["when"] == "teardown" and record["outcome"] == "passed":
            continue
        outcome = Outcome(record["outcome"], record["error"], record["line"], record["seconds"])
        if record["case"] not in found or outcome.outcome == "failed":
            found[record["case"]] = outcome
    return found


def _merged(ranks: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """The worst of what the ranks say; a case that a rank lacks has failed."""
    severity = ("passed", "skipped", "failed")
    missing = Outcome("failed", "one rank didn't finish the case")
    return {
        case: max((rank.get(case, missing) for rank in ranks), key=lambda each: severity.index(each.outcome))
        for case in {case for rank in ranks for case in rank}
    }


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
