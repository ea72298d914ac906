"""Cost of local jobs: time from submission to the user's first line, cost of a list, and effect of killed supervisors.

    python benchmarks/jobs.py                      start, list and queue
    python benchmarks/jobs.py --only ray
    python benchmarks/jobs.py --only queue --jobs 1000

**start**: time from the start of a command to the first line of `trainer.task`. The commands are `python -m trainer.task`,
`footplate jobs submit training`, and a submission from a running Python process. Also the processor time of the command,
and of the supervisor until the program begins.

**ray**: the same for `ray job submit`, to a head that has run a job before.

**list**: fetch all of 10,000 finished jobs in the store; and the command `footplate jobs list`.

**queue**: many tiny jobs, while supervisors are killed at random (kill -9). The program of each job records every begin and
end.

- `lost`: jobs that did not succeed, or whose program never came to its end.
- `duplicated`: jobs that two processes ran at the same time.
- `repeated`: jobs that ran again after their program's end, because their supervisor was killed before it had recorded
  that end. A program that finds its work done exits at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
from common import LESS, arguments_parser, interleave, machine, median, ratio, report, row

from footplate.jobs.home import Home
from footplate.jobs.operations import Jobs
from footplate.jobs.record import Job
from footplate.jobs.states import SUPERVISED, State
from footplate.jobs.store import open_store

UNTIL_FIRST_LINE = f"wall time from a command until the user's first line, {LESS}"
TASK = """import time; first_line = time.time()
import os, sys
name, path = os.environ.get("FOOTPLATE_JOB_NAME", "bare"), sys.argv[1]
def note(what, at):
    with open(path, "a") as file:
        file.write(f"{name} {os.getpid()} {what} {at}\\n")
note("begin", first_line)
with open(f"{path}.supervisors", "a") as file:
    file.write(open(f"/proc/{os.getppid()}/schedstat").read().split()[0] + "\\n")  # nanoseconds of a processor
time.sleep(float(sys.argv[2]))
note("end", time.time())
"""
BEGIN_S = 120.0
RAY_PORT = 8266  # below the ports of its workers
RAY = f"http://127.0.0.1:{RAY_PORT}"
FLAGS = {"module-name": "trainer.task", "region": "us-central1", "job-dir": "out", "scale-tier": "CUSTOM"}
FLAGS["master-machine-type"] = "n1-highcpu-8"  # little memory, so several jobs run at a time


class Workplace:
    """A directory with a package, and a home of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes = directory / "notes"
        self.numbers = 0
        package = directory / "trainer"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "task.py").write_text(TASK)
        os.environ["FOOTPLATE_HOME"] = str(directory / "home")
        os.chdir(directory)
        self.jobs = Jobs.from_env()

    def name(self) -> str:
        """A new job name."""
        self.numbers += 1
        return f"job_{self.numbers}"

    def submit(self, name: str, seconds: float = 0.0) -> None:
        """Submit a job from this process."""
        from footplate.jobs.spec.draft import draft
        from footplate.jobs.spec.resolving import resolve

        args = (str(self.notes), str(seconds))
        self.jobs.submit(resolve(draft(None, FLAGS, args, name)), Path("trainer"))

    def read(self) -> dict[str, list[tuple[str, str, float]]]:
        """The records of the programs: job, process, event and time."""
        records = defaultdict(list)
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        for name, pid, what, at in map(str.split, lines):
            records[name].append((pid, what, float(at)))
        return records

    def first_line(self, name: str) -> float:
        """Wait for a job's program to begin, and return that time."""
        limit = time.time() + BEGIN_S
        while not (records := self.read()[name]):
            assert time.time() < limit, f"{name} has not begun after {BEGIN_S:g} s: see {self.jobs.home.job(name)}"
            time.sleep(0.002)
        return records[0][2]


def measure_start(workplace: Workplace, entrant: str) -> dict[str, float]:
    """Seconds from the start of a command to the user's first line."""
    ours = entrant in ("command", "from Python")
    name = workplace.name() if ours else "bare"
    if not ours:
        workplace.notes.unlink(missing_ok=True)
    used = os.times()
    began = time.time()
    if entrant == "from Python":
        workplace.submit(name)
    else:
        flags = [word for key, value in FLAGS.items() for word in (f"--{key}", value)]
        commands = {
            "bare": ["trainer.task", str(workplace.notes), "0"],
            "command": [
                *["footplate", "jobs", "submit", "training", name, "--package-path", "trainer", *flags],
                *["--", str(workplace.notes), "0"],
            ],
            "Ray Jobs": [
                *["ray.scripts.scripts", "job", "submit", "--address", RAY, "--working-dir", ".", "--"],
                *[sys.executable, "-m", "trainer.task", str(workplace.notes), "0"],
            ],
        }
        subprocess.run([sys.executable, "-m", *commands[entrant]], check=True, capture_output=True)
    now = os.times()
    figures = {"seconds": workplace.first_line(name) - began}
    if ours:
        workplace.jobs.wait(name)
        figures["supervisor_cpu_s"] = int(Path(f"{workplace.notes}.supervisors").read_text().split()[-1]) / 1e9
    if entrant == "command":
        figures["command_cpu_s"] = now.children_user + now.children_system - used.children_user - used.children_system
    return figures


@contextlib.contextmanager
def ray_head() -> Iterator[None]:
    """A Ray head on loopback, with its job server."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    ray += ["--dashboard-host=127.0.0.1", f"--dashboard-port={RAY_PORT}", "--num-cpus=4", "--disable-usage-stats"]
    head = subprocess.Popen(ray, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while True:
            assert head.poll() is None, "Ray's head has ended"
            with suppress(OSError), socket.create_connection(("127.0.0.1", RAY_PORT), timeout=1):
                break
            time.sleep(0.2)
        yield
    finally:
        head.terminate()
        head.wait()


def measure_list(directory: Path, count: int) -> dict[str, float]:
    """Cost of a list of `count` finished jobs, in milliseconds."""
    home = Home(directory)
    store = open_store(home)
    spec = {"trainingInput": {"args": ["--epochs", "2"] * 10}}
    first = Job(
        "job", State.SUCCEEDED, 1.0, 1.0, "here", started=2.0, ended=3.0, spec=spec, plan=spec, labels={"a": "b"}
    )
    store._database.transaction(
        lambda execute: [_insert(execute, replace(first, name=f"job_{n}", created=n)) for n in range(count)]
    )
    fetched = []
    for _ in range(10):
        began = time.perf_counter()
        assert len(store.list()) == count
        fetched.append(time.perf_counter() - began)
    command = [sys.executable, "-m", "footplate", "jobs", "list", "--limit", "20"]
    ran = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "FOOTPLATE_HOME": str(directory)})
        ran.append(time.perf_counter() - began)
    return {
        f"list_ms_at_{count}": 1000 * statistics.median(fetched),
        f"list_command_ms_at_{count}": 1000 * statistics.median(ran),
    }


def _insert(execute, job: Job) -> None:
    from footplate.jobs.store.jobs import insert

    insert(execute, job)


def measure_queue(workplace: Workplace, count: int, kills: int, seed: int) -> dict[str, float]:
    """Run many tiny jobs, and kill some of their supervisors."""
    draw, began, killed, cpu = random.Random(seed), time.time(), 0, time.process_time()
    supervisors = Used()
    names = [workplace.name() for _ in range(count)]
    for name in names:
        workplace.submit(name, seconds=0.2)
    submitted = time.time()
    next_kill = time.time()
    host = os.uname().nodename
    while workplace.jobs.store.waiting(host) or workplace.jobs.store.of_host(host, SUPERVISED):
        time.sleep(0.1)
        workplace.jobs.reconcile()
        supervisors.look(workplace)
        if killed < kills and time.time() > next_kill:
            killed += _kill_one(workplace, draw)
            next_kill = time.time() + draw.uniform(0, 2.0)
    ended, notes = time.time(), workplace.read()
    states = {job.name: job.state for job in workplace.jobs.store.list()}
    lost = [
        job for job in names if states[job] != State.SUCCEEDED or not any(what == "end" for _, what, _ in notes[job])
    ]
    ends = [sum(what == "end" for _, what, _ in notes[job]) for job in names]
    return {
        "jobs": count,
        "supervisors_killed": killed,
        "lost": len(lost),
        "duplicated": sum(_overlaps(notes[job]) for job in names),
        "repeated": sum(count > 1 for count in ends),
        "submit_s": submitted - began,
        "queue_s": ended - began,
        "jobs_per_s": count / (ended - began),
        "submitter_cpu_s": time.process_time() - cpu,
        "submitter_rss_mb": psutil.Process().memory_info().rss / 2**20,
        "supervisor_cpu_s": statistics.median([*supervisors.cpu.values()] or [0.0]),
        "supervisor_rss_mb": max(supervisors.rss.values(), default=0.0),
    }


class Used:
    """Observed use of supervisors: processor seconds and MB by process."""

    def __init__(self) -> None:
        self.cpu: dict[int, float] = {}
        self.rss: dict[int, float] = {}

    def look(self, workplace: Workplace) -> None:
        """Record the supervisors that run now."""
        for job in workplace.jobs.store.of_host(os.uname().nodename, SUPERVISED):
            with suppress(psutil.Error):
                process = psutil.Process(job.owner["pid"]) if job.owner else None
                if process is not None:
                    times = process.cpu_times()
                    self.cpu[process.pid] = times.user + times.system
                    self.rss[process.pid] = process.memory_info().rss / 2**20


def _kill_one(workplace: Workplace, draw: random.Random) -> int:
    owners = [job.owner["pid"] for job in workplace.jobs.store.of_host(os.uname().nodename, SUPERVISED) if job.owner]
    if not owners:
        return 0
    with suppress(ProcessLookupError):
        os.kill(draw.choice(owners), signal.SIGKILL)
        return 1
    return 0


def _overlaps(notes: list[tuple[str, str, float]]) -> bool:
    """Return True if a process of a job began between another's begin and its end, or its last sign of life."""
    spans: dict[str, list[float]] = defaultdict(list)
    for pid, _, at in notes:
        spans[pid].append(at)
    ordered = sorted((min(times), max(times)) for times in spans.values())
    return any(after[0] < before[1] for before, after in pairwise(ordered))


def main() -> None:
    parser = arguments_parser(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["start", "list", "queue", "ray"], help="run only this part")
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs in the queue")
    parser.add_argument("--rounds", type=int, default=12, help="number of rounds of the starts")
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills")
    options: argparse.Namespace = parser.parse_args()
    path = options.json.absolute() if options.json else None
    rounds, count, many = (1, 10, 500) if options.quick else (options.rounds, options.jobs, 10_000)
    os.environ["FOOTPLATE_CPUS"] = "32"  # a job declares 8 cores
    host, rows, ratios, figures = machine(), [], {}, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        workplace = Workplace(Path(directory))
        if options.only in (None, "start"):
            workplace.submit("warm")
            workplace.jobs.wait("warm")
            results = interleave(
                ["bare", "command", "from Python"], lambda entrant: measure_start(workplace, entrant), rounds
            )
            rows = [row(name, runs) for name, runs in results.items()]
            ratios["submit_over_bare"] = ratio(results, "command", "bare", "seconds", UNTIL_FIRST_LINE)
            figures["bare_start_s"] = median(results["bare"], "seconds")
            figures["submit_to_user_code_s"] = median(results["command"], "seconds")
            figures["submit_to_user_code_from_python_s"] = median(results["from Python"], "seconds")
            figures["submit_command_cpu_s"] = median(results["command"], "command_cpu_s")
            figures["supervisor_until_user_code_cpu_s"] = median(results["command"], "supervisor_cpu_s")
        if options.only == "ray":
            with ray_head():
                measure_start(workplace, "Ray Jobs")
                results = interleave(["bare", "Ray Jobs"], lambda entrant: measure_start(workplace, entrant), rounds)
            rows = [row("Ray Jobs", results["Ray Jobs"])]
            ratios["ray_jobs_over_bare"] = ratio(results, "Ray Jobs", "bare", "seconds", UNTIL_FIRST_LINE)
            figures["ray_jobs_to_user_code_s"] = median(results["Ray Jobs"], "seconds")
        if options.only in (None, "list"):
            with tempfile.TemporaryDirectory() as other:
                figures |= measure_list(Path(other), many)
        if options.only in (None, "queue"):
            figures |= measure_queue(workplace, count, kills=count // 10, seed=options.seed)
        workplace.jobs.store.close()
    for name, value in figures.items():
        print(f"{name:36} {value:10.3f}")
    report(
        "jobs", "Jobs on this machine: seconds from a command to the user's first line", {"seconds": "s"}, rows, ratios,
        figures, host, ["footplate", "psutil", "ray"], path, add=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
