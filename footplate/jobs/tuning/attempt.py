"""A tuning, as its supervisor sees it: an attempt that has trials instead of processes.

    wait, wait, …    each time:  trials whose jobs have ended get their results
                                 unpromising trials are stopped, or paused (`stopping.py`)
                                 paused trials that are promising by now continue
                                 the next trial is added, and its job is queued
    stop             cancel the jobs of the trials
    close            nothing: trials have supervisors of their own

The store has all of its state: which trials there are, and their results. So the attempt outlives its supervisor. When the
supervisor is killed, the next one reads the trials and goes on, and no trial is lost or repeated. A tuning has one
supervisor at a time, which holds the lock of the tuning's job.

**How many trials run.** `maxParallelTrials` at most, and as many as the machine has room for. At most one trial waits in
the queue, so that the parameters of a trial are chosen late, with the results of all trials that have ended by then.

**Trials that reach their end.** A trial that has trained to its end isn't stopped or paused. A trial may reach its end
while it is asked to save. If its program ends with exit code 0 then, it has done its work, and the trial has its result. If
SIGTERM ends the program after the training, the trial continues from its last checkpoint, does what is left, and ends.

**Population-based training.** With the rule `pbt`, a trial that gives way is stopped, and then replaced by a fork of a
better one (`population.py`). The checkpoint is copied into the fork's directory, and then the fork is added to the store
with its job. A supervisor that was killed in between makes the copy again.

**When it ends.** After `maxTrials`, or when all combinations were tried. Trials that are still paused then count as stopped
early. It succeeds if a trial has a result. It fails after `maxFailedTrials` failed trials. Without that number, it fails
when `BROKEN` trials have failed and no trial has a result: the program is broken then. A trial whose program ends without a
measurement has failed. If the last measurement is NaN or infinite, the trial is INFEASIBLE: parameters that let a training
diverge are a finding, and no failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from footplate.core.errors import ConfigError, FootplateError, Unavailable
from footplate.jobs.fork_server.starting import TuningForkServer
from footplate.jobs.home import Home
from footplate.jobs.record import Fork, Job, Process, Trial, TrialState
from footplate.jobs.scheduling import Resources
from footplate.jobs.states import FINAL, State
from footplate.jobs.store.jobs import Store
from footplate.jobs.supervision.exit_status import outcome
from footplate.jobs.supervision.logfiles import Writer
from footplate.jobs.tuning.checkpoints import keep_checkpoint
from footplate.jobs.tuning.measurements import (
    Measurement,
    Measurements,
    TrialCheckpoint,
    is_finite,
    measurements_of,
)
from footplate.jobs.tuning.plan import TuningPlan, best_of
from footplate.jobs.tuning.population import choose_parent, explore, parents, to_replace, why_exploit
from footplate.jobs.tuning.proposals import propose
from footplate.jobs.tuning.space import to_text
from footplate.jobs.tuning.stopping import next_to_continue, why_pause, why_stop
from footplate.jobs.tuning.trial_jobs import continue_job, end_job, make_folder, make_trial
from footplate.launch.failure import Failure

log = logging.getLogger(__name__)

# Without maxFailedTrials, a tuning without a result ends after this many failed trials.
BROKEN = 3
LOG = "tuning.log"
# The pause after a failure of the store or the disk.
AWAY_S = 1.0
# How often the measurements of running trials are read, if trials may be stopped early.
MEASURE_S = 0.05
# The shortest pause before the trials are looked at again. A part of the machine that is free waits for that long.
LOOK_S = 0.05
# The states of trials whose jobs are asked to end, in words.
_ENDING = {TrialState.STOPPING: "stopped early", TrialState.PAUSING: "paused"}


class TuningAttempt:
    """The trials of a tuning. Implements `Attempt`. Call `wait` until it is `over`.

    Args:
        home: the home of the jobs.
        store: the store of the jobs.
        job: the job of the tuning.
        needs: the part of the machine that a trial needs.
        folder: the attempt's folder.
        fork_server: the process from which trials begin; None if all begin from nothing.
    """

    def __init__(
        self,
        home: Home,
        store: Store,
        job: Job,
        needs: Resources,
        folder: Path,
        fork_server: TuningForkServer | None = None,
    ) -> None:
        self._home = home
        self._store = store
        self._job = job
        self._plan = TuningPlan.from_dict(job.plan["tuning"])
        self._needs = needs
        self._fork_server = fork_server
        self._writer = Writer(folder / LOG)
        self._stopping = False
        self._over = False
        self._failure = ""
        # On the monotonic clock.
        self._measure_at = 0.0
        self._progress = ""
        # The newest checkpoints of running trials from which another one can begin, by number.
        self._checkpoints: dict[int, TrialCheckpoint] = {}
        # Trials of an earlier submission of this job have run.
        self.running = job.started is not None
        self.succeeded = False

    @property
    def waits_for(self) -> str:
        """What it waits for until its first trial runs."""
        return "" if self.running else "its first trial waits in the queue"

    @property
    def over(self) -> bool:
        """True when no trial runs, and no other follows."""
        return self._over

    @property
    def failure(self) -> Failure | None:
        """The reason why the tuning failed; None unless it did."""
        return Failure("exception", self._failure, time.monotonic(), mistake=True) if self._failure else None

    @property
    def processes(self) -> list[Process]:
        """Empty: the processes belong to the jobs of the trials."""
        return []

    def wait(self, timeout_s: float) -> list[Process]:
        """Move the tuning on, then wait. A store that can't be used for a while is no failure."""
        began = time.monotonic()
        try:
            self._advance()
        except (Unavailable, OSError) as error:
            log.warning("%s: %s", self._job.name, error)
            timeout_s = max(timeout_s, AWAY_S)
        except FootplateError as error:
            # Optuna is missing, say. The trials that run must end before the tuning does.
            self._fail(str(error))
        except Exception as error:
            # A supervisor that ends here would be replaced, and fail again, for ever.
            log.exception("%s", self._job.name)
            self._fail(f"{type(error).__name__}: {error}")
        else:
            # At most a tenth of the time goes into that.
            timeout_s = min(timeout_s, max(LOOK_S, 10 * (time.monotonic() - began)))
        if not self._over:
            time.sleep(timeout_s)
        return []

    def stop(self, grace_s: float) -> None:
        """Cancel the jobs of the trials. Each job's own supervisor lets its program save, for its own grace period."""
        self._stopping = True

    def close(self) -> None:
        """End the fork server, and close the log. The trials go on."""
        if self._fork_server is not None:
            self._fork_server.close()
        self._writer.close()

    def _advance(self) -> None:
        trials = [self._follow(trial) for trial in self._store.trials.of(self._job.name)]
        if self._stopping or self._failure:
            self._end_all(trials)
            return
        began = time.monotonic()
        is_measured = bool(self._plan.stop_early) and began >= self._measure_at
        if is_measured:
            trials = self._end_unpromising(trials)
            # Long files take long to read. At most a tenth of the time goes into that.
            self._measure_at = time.monotonic() + max(MEASURE_S, 10 * (time.monotonic() - began))
        # The measurements of trials that don't run are in the store.
        if is_measured or not self._plan.stop_early or not _active(trials):
            trials = self._continue_promising(trials)
        if is_measured and self._plan.stop_early == "pbt":
            trials = self._replace(trials)
        active = _active(trials)
        if why := self._why_failed(trials):
            self._fail(why)
        elif not self._may_add(trials, active):
            self._over = not active
        elif not self._waits_for_fork_server(trials):
            self._over = not self._add(trials) and not active
        if self._over:
            trials = [self._end_paused(trial) for trial in trials]
        self._tell_progress(trials)
        if self._over:
            self._finish(trials)

    def _follow(self, trial: Trial) -> Trial:
        """Look at the job of a trial. If it has ended, the trial gets its result."""
        if trial.has_ended:
            return trial
        job = self._store.get(trial.job)
        if trial.state == TrialState.PAUSED and job is not None:
            # A supervisor that died may have continued the job, and not the trial.
            continues = job.state != State.CANCELLED
            return self._store.trials.change(trial, state=TrialState.ACTIVE, cause="") if continues else trial
        if job is not None and job.started is not None:
            self.running = True
        if job is not None and job.state not in FINAL:
            return trial
        if job is not None and job.state == State.CANCELLED:
            if (trial.state in _ENDING or self._stopping) and _did_its_work(self._store, job):
                self._store.explain(trial.job, State.CANCELLED, "its program ended by itself")
                return self._end(trial, replace(job, state=State.SUCCEEDED))
            if trial.state in _ENDING and not self._stopping and self._measure(trial, job).has_trained:
                return self._continue(trial)
            if trial.state == TrialState.PAUSING:
                return self._pause(trial, job, trial.cause)
            if self._stopping and trial.state != TrialState.STOPPING:
                return self._pause(trial, job, "cancelled with its tuning")
        return self._end(trial, job)

    def _pause(self, trial: Trial, job: Job, cause: str) -> Trial:
        """Write that a trial is paused, whose job has saved and ended."""
        if trial.state == TrialState.PAUSING:
            # Show in lists of jobs that nobody cancelled it.
            self._store.explain(trial.job, State.CANCELLED, f"paused: {cause}")
        series = self._measure(trial, job).series
        trial = self._store.trials.change(trial, state=TrialState.PAUSED, measurements=series, cause=cause)
        self._say(_sentence(self._plan, trial))
        return trial

    def _continue_promising(self, trials: Sequence[Trial]) -> list[Trial]:
        """Continue paused trials, as many as may run."""
        result = {trial.number: trial for trial in trials}
        while len(_active(result.values())) < self._plan.max_parallel_trials:
            trial = next_to_continue(self._plan, list(result.values()))
            if trial is None:
                break
            result[trial.number] = self._continue(trial)
        return list(result.values())

    def _continue(self, trial: Trial) -> Trial:
        """Let a trial go on whose job has saved and ended."""
        continue_job(self._store, trial.job)
        trial = self._store.trials.change(trial, state=TrialState.ACTIVE, cause="")
        self._say(f"trial {trial.number} continues: {_parameters(trial)}")
        self._reconcile()
        return trial

    def _end_paused(self, trial: Trial) -> Trial:
        """End a trial that is still paused when the tuning is over."""
        return self._end(trial, self._store.get(trial.job)) if trial.state == TrialState.PAUSED else trial

    def _end(self, trial: Trial, job: Job | None) -> Trial:
        """Write the result of a trial whose job has ended."""
        measured = self._measure(trial, job)
        series = measured.series
        state, cause = result_of(self._plan.metric, trial, job, series, measured.names)
        step, value = series[-1] if series and is_finite(series[-1]) else (None, None)
        ended = (job.ended if job is not None else None) or time.time()
        if state == TrialState.STOPPED_EARLY:
            # Show in lists of jobs that nobody cancelled it.
            self._store.explain(trial.job, State.CANCELLED, f"stopped early: {cause}")
        trial = self._store.trials.change(
            trial, state=state, measurements=series, value=value, step=step, ended=ended, cause=cause
        )
        self._say(_sentence(self._plan, trial))
        return trial

    def _measure(self, trial: Trial, job: Job | None) -> Measurements:
        """Read the measurements of a trial so far. Those that its program no longer keeps are in the store."""
        attempts = job.attempt if job is not None else 0
        measured = measurements_of(self._home, trial.job, attempts, self._plan.metric)
        if measured.is_whole or not measured.series:
            return measured
        first = measured.series[0][0]
        earlier = [each for each in trial.measurements if each[0] < first]
        return replace(measured, series=(*earlier, *measured.series))

    def _end_unpromising(self, trials: Sequence[Trial]) -> list[Trial]:
        measured = []
        # The numbers of the trials that have trained to their ends.
        trained = set()
        for trial in trials:
            if trial.state == TrialState.ACTIVE:
                now = self._measure(trial, self._store.get(trial.job))
                self._checkpoints.pop(trial.number, None)
                if now.has_trained:
                    trained.add(trial.number)
                elif now.checkpoint is not None:
                    self._checkpoints[trial.number] = now.checkpoint
                if now.is_whole:
                    trial = replace(trial, measurements=now.series)
                elif now.series != trial.measurements:
                    trial = self._store.trials.change(trial, measurements=now.series)
            measured.append(trial)
        result = []
        for index, trial in enumerate(measured):
            if trial.state == TrialState.ACTIVE and trial.number not in trained:
                others = [other for other in measured if other.number != trial.number]
                if why := why_stop(self._plan, trial, others):
                    trial = self._store.trials.change(trial, state=TrialState.STOPPING, cause=why)
                elif why := why_pause(self._plan, trial, others):
                    trial = self._store.trials.change(trial, state=TrialState.PAUSING, cause=why)
                elif why := self._why_exploit(trial, [*result, *measured[index:]]):
                    trial = self._store.trials.change(trial, state=TrialState.STOPPING, cause=why)
            if trial.state in _ENDING:
                end_job(self._store, trial.job, f"{_ENDING[trial.state]}: {trial.cause}")
            result.append(trial)
        return result

    def _why_exploit(self, trial: Trial, trials: Sequence[Trial]) -> str:
        """Explain why a trial gives way to a fork of a better one; empty if it goes on."""
        if self._plan.stop_early != "pbt" or not self._parents(trial, trials):
            return ""
        return why_exploit(self._plan, trial, trials)

    def _parents(self, trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that may be forked in the place of a trial."""
        return [parent for parent in parents(self._plan, trial, trials) if parent.number in self._checkpoints]

    def _replace(self, trials: Sequence[Trial]) -> list[Trial]:
        """Replace trials that have given way with forks of better ones, as many as may run."""
        result = list(trials)
        for trial in to_replace(self._plan, result):
            candidates = self._parents(trial, result)
            if trial.state == TrialState.STOPPED_EARLY and candidates and self._may_fork(result):
                result += self._fork(trial, choose_parent(self._plan, len(result) + 1, candidates), len(result) + 1)
        return result

    def _may_fork(self, trials: Sequence[Trial]) -> bool:
        return len(trials) < self._plan.max_trials and len(_active(trials)) < self._plan.max_parallel_trials

    def _fork(self, replaced: Trial, parent: Trial, number: int) -> list[Trial]:
        """Add a fork. Returns it; nothing if the checkpoint was deleted meanwhile: then a newer one is used later."""
        checkpoint = self._checkpoints[parent.number]
        fork = Fork(parent.number, checkpoint.step, replaced.number)
        parameters = explore(self._plan, number, parent.parameters)
        trial, job = make_trial(self._job, self._plan, number, parameters, self._needs, fork)
        try:
            keep_checkpoint(checkpoint.path, Path(job.plan["trial"]["checkpoint"]))
        except ConfigError as error:
            log.warning("%s: %s", self._job.name, error)
            return []
        if not self._enter(trial, job):
            return []
        self._say(
            f"trial {number} begins from trial {parent.number} at step {checkpoint.step:g}, in the place of trial "
            f"{replaced.number}: {_parameters(trial)}"
        )
        self._reconcile()
        return [trial]

    def _may_add(self, trials: Sequence[Trial], active: Sequence[Trial]) -> bool:
        if len(trials) >= self._plan.max_trials or len(active) >= self._plan.max_parallel_trials:
            return False
        population = sum(trial.fork is None for trial in trials)
        if self._plan.stop_early == "pbt" and population >= self._plan.max_parallel_trials:
            # The population is complete. Forks follow.
            return False
        # One that waits for room is enough. A later one is chosen with more results.
        return all(self._store.state(trial.job) != State.QUEUED for trial in active)

    def _waits_for_fork_server(self, trials: Sequence[Trial]) -> bool:
        """Return True while the next trial should wait until it can begin from a fork. A last trial alone doesn't."""
        server = self._fork_server
        if server is None or len(trials) + 1 >= self._plan.max_trials:
            return False
        if server.is_starting():
            return True
        if server.problem:
            self._say(f"trials begin in new interpreters: {server.problem}")
            self._fork_server = None
        return False

    def _add(self, trials: Sequence[Trial]) -> bool:
        """Add the next trial. Returns False if all combinations were tried."""
        number = len(trials) + 1
        parameters = propose(self._plan, number, trials)
        if parameters is None:
            return False
        trial, job = make_trial(self._job, self._plan, number, parameters, self._needs)
        if self._enter(trial, job):
            self._say(f"trial {number} begins: {_parameters(trial)}")
            self._reconcile()
        return True

    def _enter(self, trial: Trial, job: Job) -> bool:
        """Put a trial into the store, with its job. Returns False, and fails, if another job has its name."""
        is_free = self._store.get(job.name) is None
        if is_free:
            make_folder(self._home, self._job, job)
        if not is_free or not self._store.trials.add(trial, job):
            self._fail(f"a job {job.name} exists already, and trial {trial.number} needs its name")
            return False
        return True

    def _why_failed(self, trials: Sequence[Trial]) -> str:
        """Explain why the failures of trials end the tuning; empty if they don't. A resubmission forgives failures."""
        failed = [
            trial for trial in trials if trial.state == TrialState.FAILED and (trial.ended or 0) > self._job.queued
        ]
        has_result = any(trial.state == TrialState.SUCCEEDED for trial in trials)
        limit = self._plan.max_failed_trials
        if limit and len(failed) >= limit:
            return f"{len(failed)} trials failed, and maxFailedTrials is {limit}. The last: {failed[-1].cause}"
        if not limit and len(failed) >= BROKEN and not has_result:
            return f"{len(failed)} trials failed, and none has a result. The last: {failed[-1].cause}"
        return ""

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._say(why)

    def _end_all(self, trials: Sequence[Trial]) -> None:
        """Cancel the jobs of all trials. It is over when they have ended."""
        left = [trial for trial in trials if not trial.has_ended and trial.state != TrialState.PAUSED]
        cause = "its tuning failed" if self._failure else "cancelled with its tuning"
        # The next call finds the ended jobs.
        self._stopping = True
        for trial in left:
            end_job(self._store, trial.job, cause)
        self._over = not left

    def _finish(self, trials: Sequence[Trial]) -> None:
        best = best_of(self._plan, trials)
        self.succeeded = best is not None
        if self._plan.stop_early == "pbt" and not any(trial.fork for trial in trials):
            self._say(
                "no trial gave way to a better one: trials are compared while they run, so four or more must have room on "
                "this machine at once, and report values after their checkpoints"
            )
        if best is None and not self._failure:
            failed = [trial for trial in trials if trial.state == TrialState.FAILED]
            self._fail("no trial has a result" + (f". The last failure: {failed[-1].cause}" if failed else ""))

    def _tell_progress(self, trials: Sequence[Trial]) -> None:
        """Show in lists how far the tuning is."""
        best = best_of(self._plan, trials)
        ended = sum(trial.has_ended for trial in trials)
        progress = f"{ended} of {self._plan.max_trials} trials have ended"
        if best is not None:
            progress += f"; the best: {best.job}, {self._plan.metric}={best.value:.6g}"
        if progress != self._progress:
            self._store.explain(self._job.name, State.RUNNING, progress)
            self._progress = progress

    def _reconcile(self) -> None:
        # Import here: the reconcile pass imports the backends.
        from footplate.jobs.supervision.reconcile import reconcile

        try:
            reconcile(self._home, self._store)
        except (ConfigError, OSError) as error:
            # The trial is in the queue, and a later pass starts it.
            log.warning("%s: %s", self._job.name, error)

    def _say(self, sentence: str) -> None:
        self._writer.write(f"{sentence}\n".encode())


def result_of(
    metric: str, trial: Trial, job: Job | None, series: Sequence[Measurement], names: Sequence[str] = ()
) -> tuple[TrialState, str]:
    """The final state of a trial, and its cause.

    Args:
        metric: the metric's name.
        trial: the trial.
        job: its job, which has ended; None if it was deleted.
        series: the measurements.
        names: other metrics that the program logged.
    """
    if job is None:
        return TrialState.FAILED, f"its job {trial.job} was deleted"
    if job.state == State.CANCELLED:
        stopped = trial.state in (TrialState.STOPPING, TrialState.PAUSED)
        return (TrialState.STOPPED_EARLY, trial.cause) if stopped else (TrialState.CANCELLED, job.cause)
    if job.state == State.FAILED:
        return TrialState.FAILED, job.cause
    if not series:
        logged = f" It logged {', '.join(names)}." if names else ""
        return TrialState.FAILED, (
            f'it ended without a value of "{metric}", its hyperparameterMetricTag.{logged} Log that metric with self.log, '
            "or report it with cloudml-hypertune."
        )
    if not is_finite(series[-1]):
        return TrialState.INFEASIBLE, f"{metric} is {series[-1][1]} at step {series[-1][0]:g}"
    return TrialState.SUCCEEDED, ""


def _did_its_work(store: Store, job: Job) -> bool:
    """Return True if the program of a job ended with exit code 0, although the job is cancelled."""
    success = outcome(0, "")
    return any(
        process.role == "master" and process.attempt == job.attempt and process.outcome == success
        for process in store.processes(job.name)
    )


def _active(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that run, or wait for room."""
    return [trial for trial in trials if not trial.has_ended and trial.state != TrialState.PAUSED]


def _sentence(plan: TuningPlan, trial: Trial) -> str:
    value = f": {plan.metric}={trial.value:.6g} at step {trial.step:g}" if trial.value is not None else ""
    cause = f" ({trial.cause})" if trial.cause else ""
    return f"trial {trial.number} is {trial.state}{value}{cause}: {_parameters(trial)}"


def _parameters(trial: Trial) -> str:
    return " ".join(f"{name}={to_text(value)}" for name, value in trial.parameters.items())
