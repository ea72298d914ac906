"""`python -m footplate.jobs.backends.slurm.entrypoint FOLDER`: run one attempt, as the batch script of a Slurm job.

    ready       srun starts `replica.py` for each replica. Each reports a free address of its node
    run         the entry point sends each replica its variables
    follow      it judges the replicas together by their ends, by the same rules as on this machine
                (`supervision/exit_status.py`), and ends them together
    over        it writes the verdict into `events.jsonl`, where the supervisor reads it

Meanwhile it passes on the questions that others write into `questions.jsonl` (`asking.py`).

It talks to the replicas over srun: their standard output arrives here, and a line that is written here arrives at all of
them. So it needs no ports of its own, and no supervisor.

    SIGUSR1     (from Slurm, before the time limit) the replicas get SIGTERM, save and end; then the job is requeued
    SIGTERM     (`jobs cancel`, a preemption) the replicas get SIGTERM, save and end
    a lost node the job is requeued

Slurm sends SIGTERM to the replicas itself, too. So a replica may have ended before the entry point's own SIGTERM arrives.
Such an end is judged `SIGNAL_S` later, when it is known if the whole job was asked to end.

`FOLDER` is that of the job's first attempt. This start has the number of that attempt, plus Slurm's count of restarts.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from footplate.jobs.backends.slurm import attempt_files
from footplate.jobs.cluster_env import ReplicaProcess, processes, replica_ids
from footplate.jobs.execution import Execution
from footplate.jobs.supervision.exit_status import End, Orders, Verdict, outcome
from footplate.jobs.tuning.trial_jobs import trial_variables
from footplate.launch.failure import Failure

log = logging.getLogger(__name__)

# A replica reports every `replica.ALIVE_S`. One that is silent for this long is lost with its node.
LOST_S = 120.0
# The time in which a signal of Slurm reaches all processes of a job.
SIGNAL_S = 5.0
# Exit codes of a process that SIGTERM has ended. Slurm may signal it before its replica.
_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
# A batch script that ends within milliseconds of the signal of a requeue can make Slurm 22.05 count its job as failed, and
# forget the requeue.
SETTLE_S = 1.0
# Starts of a job by Slurm, after which this program leaves the next attempt to the supervisor.
MAX_STARTS = 10
# The time that Slurm needs to end this process after it was asked to requeue the job.
REQUEUE_S = 60.0
_TICK_S = 0.25
# Between two looks for questions.
_QUESTIONS_S = 1.0

# A request to end the attempt: by SIGTERM, or since the time limit is near.
StopRequest = Literal["", "term", "time"]


@dataclass
class Replica:
    """The entry point's view of a replica."""

    role: str
    index: int
    last_heard: float
    addresses: tuple[str, ...] = ()
    over: bool = False


class EntryPoint:
    """Runs an attempt.

    Args:
        task: from `request.task`.
        number: the attempt's number.
        folder: the attempt's folder.
        environ: the variables of the batch script.
    """

    def __init__(self, task: Mapping[str, Any], number: int, folder: Path, environ: Mapping[str, str]) -> None:
        self._task = task
        self._number = number
        self._folder = folder
        self._environ = environ
        self._execution = Execution.from_dict(task["execution"])
        now = time.monotonic()
        # An Execution has all fields of a resolved job that `replica_ids` and `processes` read.
        ids = replica_ids(cast("Any", self._execution))
        self._replicas = [Replica(replica.role, replica.index, now) for replica in ids]
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._verdict = Verdict()
        self._lost = False
        self._kill_at = float("inf")
        self._killed = False
        self._running = False
        # Replicas that Slurm has asked to end, with the messages of their ends and the times at which those are judged.
        self._unjudged: list[tuple[float, Replica, Mapping[str, Any]]] = []
        self._stopping = False
        self._questions = attempt_files.LineReader(folder / attempt_files.QUESTIONS)
        self._looked_at = now
        self.stop_requested: StopRequest = ""

    def run(self) -> bool:
        """Run the attempt until it ends. Returns True if it succeeded."""
        self._step = subprocess.Popen(
            self._srun(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_without_options(self._environ)
        )
        threading.Thread(target=self._listen, daemon=True).start()
        while not self._all_over() and not (self._stopping and not self._running):
            self._take_messages()
            self._keep_time()
            self._pass_on_questions()
        self._end_step()
        return self._verdict.succeeded

    def request_stop(self, reason: StopRequest) -> None:
        """Let `run` end the attempt. The first reason counts. Handlers of signals call this."""
        self.stop_requested = self.stop_requested or reason

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the attempt, unless it succeeded or was stopped."""
        return None if self._stopping else self._verdict.failure

    @property
    def lost(self) -> bool:
        """True if a replica was lost with its node."""
        return self._lost

    def _srun(self) -> list[str]:
        cores = self._environ.get("SLURM_CPUS_PER_TASK")
        return [
            "srun", "--unbuffered", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL",
            "--distribution=block", f"--ntasks={len(self._replicas)}",
            *(["--ntasks-per-node=1"] if self._task["own_node"] else []),
            # Since Slurm 22.05, srun doesn't read this from sbatch.
            *([f"--cpus-per-task={cores}"] if cores else []),
            sys.executable, "-P", "-m", "footplate.jobs.backends.slurm.replica", str(self._folder),
            str(self._number), str(self._task["first"]),
        ]  # fmt: skip

    def _listen(self) -> None:
        """Read the replicas' messages. Runs in a thread."""
        assert self._step.stdout is not None
        for line in self._step.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                # A message of a plug-in of Slurm, say.
                sys.stderr.write(line.decode(errors="replace"))
                continue
            self._messages.put(message)
        self._messages.put(None)

    def _send(self, **message: Any) -> None:
        assert self._step.stdin is not None
        try:
            self._step.stdin.write(json.dumps(message).encode() + b"\n")
            self._step.stdin.flush()
        except (BrokenPipeError, ValueError):
            # srun has ended, which `_listen` shows.
            pass

    def _all_over(self) -> bool:
        return all(replica.over for replica in self._replicas)

    def _take_messages(self) -> None:
        """Take the messages that are there. Waits for one, or for a tick."""
        wait = True
        while True:
            try:
                message = self._messages.get(wait, _TICK_S)
            except queue.Empty:
                return
            wait = False
            if message is None:
                self._end_all_lost()
                return
            self._take(self._replicas[message["task"]], message)

    def _take(self, replica: Replica, message: Mapping[str, Any]) -> None:
        replica.last_heard = time.monotonic()
        match message["event"]:
            case "ready":
                replica.addresses = tuple(message["addresses"])
                if all(each.addresses for each in self._replicas) and not self._stopping:
                    self._begin()
            case "began":
                self._event("began", role=replica.role, index=replica.index)
            case "refused":
                self._end(replica, 2 if message["mistake"] else None, f"could not be started: {message['text']}")
            case "ended" if message["code"] and (message["asked_by_slurm"] or message["code"] in _BY_SIGTERM):
                self._unjudged.append((replica.last_heard + SIGNAL_S, replica, message))
            case "ended":
                self._judge(replica, message)

    def _judge(self, replica: Replica, message: Mapping[str, Any]) -> None:
        self._end(replica, message["code"], outcome(message["code"], message["last"]))

    def _begin(self) -> None:
        """Send all replicas their variables."""
        self._running = True
        trial = self._execution.trial
        described = processes(
            cast("Any", self._execution),
            [replica.addresses[0] for replica in self._replicas],
            self._replicas[0].addresses[1],
            self._number - 1,
            self._execution.job_dir,
            None if trial is None else trial["number"],
        )
        if trial is not None:
            for process in described:
                process.env.update(trial_variables(trial, self._folder, process.role, process.index))
        ranks = self._ranks_of_each()
        self._send(do="run", replicas=[list(variables_of_ranks(process, ranks)) for process in described])

    def _ranks_of_each(self) -> int:
        """The ranks of each replica, as in `variables_of_ranks`. --sbatch-args may have changed the number of GPUs."""
        if not self._task["own_node"]:
            return 0
        gpus = int(self._environ.get("SLURM_GPUS_ON_NODE") or 0)
        return gpus if self._task["ranks"] > 1 and gpus else self._task["ranks"]

    def _end(self, replica: Replica, code: int | None, text: str, at: float | None = None) -> None:
        if replica.over:
            return
        replica.over = True
        self._event("ended", role=replica.role, index=replica.index, outcome=text)
        if not self._stopping:
            at = time.monotonic() if at is None else at
            self._carry_out(self._verdict.ended(End(replica.role, replica.index, code, text, at)))
            failure = self._verdict.failure
            self._lost = failure is not None and failure.lost

    def _end_all_lost(self) -> None:
        """Judge the replicas that are left when srun ends: it ends when a node is lost, or if it can't start them."""
        code = self._step.wait()
        have_ended = [replica for _, replica, _ in self._unjudged]
        for replica in self._replicas:
            if replica.over or replica in have_ended:
                continue
            if self._running:
                self._end(replica, None, "was lost with its node", replica.last_heard)
            else:
                self._end(replica, None, f"could not be started: srun ended with exit code {code}")

    def _carry_out(self, orders: Orders) -> None:
        if orders.ask:
            self._send(do="signal", roles=list(orders.ask), signal=int(signal.SIGTERM))
        self._kill_at = min(self._kill_at, time.monotonic() + orders.kill_within_s)

    def _keep_time(self) -> None:
        """Do what is due: a requested end, the end of the grace period, silent replicas."""
        now = time.monotonic()
        if self.stop_requested and not self._stopping:
            self._stopping = True
            self._event("told")
            roles = tuple({replica.role for replica in self._replicas})
            grace_s = self._task["save_s"] if self.stop_requested == "time" else self._task["grace_s"]
            self._carry_out(Orders(roles, grace_s))
        while self._unjudged and (self._stopping or now >= self._unjudged[0][0]):
            _, replica, message = self._unjudged.pop(0)
            self._judge(replica, message)
        if now >= self._kill_at and not self._killed:
            self._killed = True
            self._send(do="signal", roles=[replica.role for replica in self._replicas], signal=int(signal.SIGKILL))
        if self._running:
            for replica in self._replicas:
                if not replica.over and now - replica.last_heard > LOST_S:
                    self._end(replica, None, "was lost with its node", replica.last_heard)

    def _pass_on_questions(self) -> None:
        if time.monotonic() - self._looked_at < _QUESTIONS_S:
            return
        self._looked_at = time.monotonic()
        for question in self._questions.read():
            self._send(do="ask", **question)

    def _end_step(self) -> None:
        """End srun, and with it the replicas that are left."""
        assert self._step.stdin is not None
        try:
            self._step.stdin.close()
            self._step.wait(5.0)
        except (OSError, subprocess.TimeoutExpired):
            self._step.kill()

    def _event(self, name: str, **values: Any) -> None:
        attempt_files.add_event(self._folder, name, at=time.time(), **values)


def variables_of_ranks(process: ReplicaProcess, ranks: int) -> Sequence[dict[str, str]]:
    """The variables of each process of a replica.

    >>> process = ReplicaProcess("worker", 0, {"RANK": "1", "WORLD_SIZE": "2"})
    >>> [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in variables_of_ranks(process, 2)]
    [('2', '0', '4'), ('3', '1', '4')]

    Args:
        process: the replica, with its rank among the replicas.
        ranks: its number of ranks, if it has a node of its own; 0 if it may share a node, and has one rank.
    """
    if "RANK" not in process.env or ranks == 0:
        return [process.env]
    node, nodes = int(process.env["RANK"]), int(process.env["WORLD_SIZE"])
    return [
        {
            **process.env,
            "RANK": str(node * ranks + local_rank),
            "WORLD_SIZE": str(nodes * ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "NODE_RANK": str(node),
            "GROUP_RANK": str(node),
        }
        for local_rank in range(ranks)
    ]


def _without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for srun, without those that a user has set for the options of other steps."""
    names = ("SLURM_NTASKS_PER_NODE", "SLURM_EXPORT_ENV", "SLURM_KILL_BAD_EXIT", "SLURM_WAIT", "SLURM_DISTRIBUTION")
    return {name: value for name, value in environ.items() if name not in names}


def _requeue(job: int) -> str:
    """Ask Slurm to requeue this job. Returns why it doesn't; empty if it does."""
    if shutil.which("scontrol") is None:
        return "this node has no scontrol"
    result = subprocess.run(["scontrol", "requeue", str(job)], capture_output=True, text=True)
    # Slurm ends all processes of a requeued job: also this scontrol, perhaps before it has Slurm's answer.
    if result.returncode <= 0:
        return ""
    return (result.stderr.strip() or f"scontrol ends with exit code {result.returncode}").splitlines()[-1]


def _has_verdict(folder: Path) -> bool:
    """Return True if an attempt has ended for good, so that no other start may follow."""
    events = attempt_files.LineReader(folder / attempt_files.EVENTS).read()
    return any(event["event"] == "over" and not event["told"] for event in events)


def main(first_folder: Path, environ: Mapping[str, str] = os.environ) -> int:
    """Run the attempt of this start. Returns the exit code of the Slurm job."""
    job, restarts = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_RESTART_COUNT") or 0)
    task = json.loads((first_folder / attempt_files.TASK).read_text())
    number = task["first"] + restarts
    folder = first_folder.with_name(f"attempt-{number}")
    if restarts and _has_verdict(folder.with_name(f"attempt-{number - 1}")):
        print(f"attempt {number - 1} has ended for good: job {job} has nothing to do", flush=True)
        return 0
    folder.mkdir(mode=0o700, exist_ok=True)
    if not attempt_files.claim(folder, job):
        print(f"job {attempt_files.claimed(folder)} runs attempt {number}: job {job} has nothing to do", flush=True)
        return 0
    attempt_files.Record(task["first"], job).write(folder)

    entry_point = EntryPoint(task, number, folder, environ)
    signal.signal(signal.SIGTERM, lambda *_: entry_point.request_stop("term"))
    signal.signal(signal.SIGUSR1, lambda *_: entry_point.request_stop("time"))
    attempt_files.add_event(folder, "start", at=time.time(), job=job, nodes=environ.get("SLURM_JOB_NODELIST", ""))
    succeeded = entry_point.run()

    failure, stop, why = entry_point.failure, entry_point.stop_requested, ""
    if succeeded:
        stop = ""
    elif stop == "time":
        why = "its time limit was near"
    elif failure is not None and entry_point.lost and restarts + 1 < MAX_STARTS:
        why = str(failure)
    # Before a requeue this isn't the last word: Slurm tells if the job goes on.
    _say_over(folder, succeeded, failure, stop or ("lost" if why else ""), why)
    if why:
        refusal = _requeue(job)
        if not refusal:
            time.sleep(REQUEUE_S)
        text = f"{why}, and Slurm doesn't requeue it: {refusal or 'nothing happens'}"
        _say_over(folder, False, failure or Failure("host", text, 0.0), "", text)
    if stop:
        time.sleep(SETTLE_S)
    return 0 if succeeded else 1


def _say_over(folder: Path, succeeded: bool, failure: Failure | None, stop: str, why: str) -> None:
    words = failure and {
        "kind": failure.kind, "text": failure.text, "mistake": failure.mistake, "code": failure.code, "lost": failure.lost,
    }  # fmt: skip
    attempt_files.add_event(folder, "over", at=time.time(), succeeded=succeeded, failure=words, told=stop, why=why)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    sys.exit(main(Path(sys.argv[1])))
