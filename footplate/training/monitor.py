"""The monitor of a training: where its time goes.

The loop switches `times` between causes, for every batch. The monitor adds what costs more than that, and rarely:

    a look      every second or so, one step is timed by its phases, or examined (`step_looks.py`)
    a window    at a report, every second or so: a line in `monitor.jsonl`, every ten seconds the loggers
    the end     evidence → advice → printed, in `monitor.jsonl`, and as `trainer.monitor.advice`

The seconds of steps are divided into forward, backward and optimizer in the proportions of the steps that were timed.
Communication is measured by the strategy: by the clock where the host itself waits for other ranks, and in DDP's backward
passes by torch's own measurement of some of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.callbacks import ModelCheckpoint
from footplate.checkpoint.storage import to_place
from footplate.core.errors import ConfigError
from footplate.core.time_split import TimeSplit
from footplate.launch import worker
from footplate.monitoring import measures
from footplate.monitoring.evidence import Evidence
from footplate.monitoring.record import MonitorFile
from footplate.monitoring.rules import Advice, advise
from footplate.monitoring.summary import summarise
from footplate.training import job
from footplate.training.step_looks import StepLooks

if TYPE_CHECKING:
    from footplate.training.run import Run

WINDOW_S = 1.0
TRACKED_S = 10.0
LEAST_S = 10.0
LOOK_S = 1.0
STEPS_BETWEEN_LOOKS = 20
RANKS_S = 10.0


@dataclass(frozen=True)
class Mark:
    """A moment of a training, from which a stretch of it is measured.

    Attributes:
        at: seconds, on the clock of `Monitor.times`.
        batches: the batches so far.
        steps: the optimizer steps so far.
        seconds: the seconds so far, by cause.
    """

    at: float = 0.0
    batches: int = 0
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Monitor:
    """The monitor of one `fit`.

    Args:
        enabled: `Trainer(enable_monitor=…)`.

    Attributes:
        times: what time counts as, switched by the loop.
        look_at: when the next step is timed, on the clock of `times`.
        seconds: the wall time of training so far, by cause.
        advice: what to change, known at the end.
        evidence: what the advice follows from, known at the end.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.times = TimeSplit("setup")
        self.look_at = math.inf
        self.seconds: dict[str, float] = {}
        self.advice: tuple[Advice, ...] = ()
        self.evidence: Evidence | None = None
        self._enabled = enabled
        self._file = MonitorFile(None)
        self._looks = StepLooks()
        self._size = measures.BatchSize()
        self._collections = measures.Collections()
        # The beginnings of training, of this window, and of what the loggers get next. A window's seconds are not divided.
        self._first = self._window = self._tracked = Mark()
        self._began_at = self._ranks_at = 0.0
        self._samples = self._tokens = self._saves = 0
        self._own_s: dict[int, float] = {}

    # What the loop calls

    def begin(self, run: Run) -> None:
        """Begin to measure: training starts now."""
        self.times.switch("callbacks")
        if not self._enabled:
            return
        progress, setup = run.progress, self.times.total()
        self._window = Mark(self.times.since, progress.batches, progress.global_step, setup)
        self._first = self._tracked = replace(self._window, seconds={})
        self._ranks_at, self._began_at = run.agreement.now_s, time.time()
        self.look_at = self.times.since + LOOK_S / 2
        self._collections.begin()
        # On a GPU, the host doesn't wait for collectives.
        run.parallel.measure(self.times if run.device.type == "cpu" else None)
        if run.world.rank == 0 and run.recorders and not run.config.fast_dev_run:
            self._file = MonitorFile(run.run_dir)
        self._file.add(
            "start", epoch=progress.epoch, step=progress.global_step, world_size=run.world.size,
            device=run.device.type, precision=run.precision.name, setup_s=sum(setup.values()),
            process_s=_process_s(), job=job.identity(), attempt=_attempt(), total_steps=_total_steps(run),
            checkpoints=_checkpoints_elsewhere(run),
        )  # fmt: skip

    def train(self, run: Run, batches: Sequence[Any], batch_idx: int, last: bool) -> Iterable[Any]:
        """Train on a chunk of batches, and look at the step closely."""
        self._size = measures.BatchSize.of(batches[0] if run.logical is None else batches[0][0])
        began = time.perf_counter()
        outputs = self._looks.train(run, batches, batch_idx, last)
        now = time.perf_counter()
        # On a GPU a look waits for each phase, so only few steps are looked at.
        self.look_at = now + max(LOOK_S, STEPS_BETWEEN_LOOKS * (now - began))
        return outputs

    def report(self, run: Run) -> None:
        """End a window if it is long enough. Called when metrics are reported."""
        if self._enabled and self.times.since - self._window.at >= WINDOW_S:
            self._end_window(run)

    def end_epoch(self, run: Run) -> None:
        """End a window with an epoch, and compare the ranks from time to time. All ranks call it."""
        if not self._enabled:
            return
        if run.group.is_distributed and run.agreement.now_s - self._ranks_at >= RANKS_S:
            self._compare_ranks(run)
        if self.times.since - self._window.at >= WINDOW_S:
            self._end_window(run)

    def saved(self) -> None:
        """Count a checkpoint."""
        self._saves += 1

    def end(self, run: Run) -> None:
        """End a training that is complete: find the advice and print it. All ranks call it."""
        if not self._enabled:
            return
        if run.group.is_distributed:
            self._compare_ranks(run)
        self._end_window(run)
        if run.world.rank != 0 or self.times.since - self._first.at < LEAST_S:
            return
        self.evidence = self._evidence(run)
        self.advice = tuple(advise(self.evidence))
        for advice in self.advice:
            self._file.add(
                "advice", rule=advice.rule, text=str(advice), gain=advice.gain, evidence=advice.evidence
            )  # fmt: skip
        for line in summarise(self.evidence, self.advice):
            run.print(line)

    def close(self, run: Run, status: str) -> None:
        """Stop measuring, after any end."""
        if self._enabled and self._first.at:
            self._collections.end()
            run.parallel.measure(None)
            self.look_at = math.inf
            self._end_window(run)
            peak = None if self.evidence is None else self.evidence.peak_flops_per_s
            self._file.add("end", step=run.progress.global_step, status=status, peak_flops_per_s=peak)
            if self.times.since - self._first.at >= LEAST_S:
                self._send_goodput(run)
            self._first = Mark()

    # A window

    def _end_window(self, run: Run) -> None:
        total, progress, before = self.times.total(), run.progress, self._window
        now = self._window = Mark(self.times.since, progress.batches, progress.global_step, total)
        spent = {cause: seconds - before.seconds.get(cause, 0.0) for cause, seconds in total.items()}
        seconds = self._divided(
            run, {cause: each for cause, each in spent.items() if each > 0.0}, now.steps - before.steps
        )
        for cause, each in seconds.items():
            self.seconds[cause] = self.seconds.get(cause, 0.0) + each

        batches, flops = now.batches - before.batches, self._flops(run)
        samples = self._size.rows * batches * run.data_ranks if self._size.rows else None
        tokens = samples * self._size.length if samples and self._size.length else None
        self._samples += samples or 0
        self._tokens += tokens or 0
        self._file.add(
            "window", epoch=progress.epoch, step=now.steps, batches=batches, wall_s=now.at - before.at, seconds=seconds,
            samples=samples, tokens=tokens, flops=flops and flops * batches, gc_s=self._collections.take(),
            memory_bytes=measures.memory_bytes(), device_memory_bytes=measures.device_memory_bytes(run.device),
            recompilations=measures.recompilations(run.step, self._began_at),
        )  # fmt: skip
        if now.at - self._tracked.at >= TRACKED_S:
            self._send(run, replace(now, seconds=dict(self.seconds)))

    def _divided(self, run: Run, seconds: dict[str, float], steps: int) -> dict[str, float]:
        """Divide the seconds of steps into communication and phases."""
        step_s, measured_s = seconds.pop("step", 0.0), seconds.pop("communication", 0.0)
        waits_s = run.parallel.communication_s() or 0.0
        in_backward_s = min(step_s, waits_s * steps)
        communication_s = measured_s + in_backward_s
        parts = self._looks.divided(step_s - in_backward_s, waits_s)
        return {**seconds, **parts, **({"communication": communication_s} if communication_s else {})}

    def _flops(self, run: Run) -> float | None:
        """Return the floating-point operations of one batch, of all ranks. None if they aren't known."""
        if self._looks.examined is None:
            return run.step.flops() or None
        # Operations on cut tensors count as a whole on each rank of a share.
        return self._looks.examined.flops * run.data_world.size or None

    def _send(self, run: Run, now: Mark) -> None:
        """Send the shares and rates since the last time to the loggers."""
        before, self._tracked = self._tracked, now
        wall_s = now.at - before.at
        values = {
            f"monitor/{cause}": (seconds - before.seconds.get(cause, 0.0)) / wall_s
            for cause, seconds in now.seconds.items()
        }
        batches_per_s = (now.batches - before.batches) / wall_s
        if self._size.rows:
            values["monitor/samples_per_s"] = self._size.rows * run.data_ranks * batches_per_s
        if self._size.rows and self._size.length:
            values["monitor/tokens_per_s"] = self._size.rows * self._size.length * run.data_ranks * batches_per_s
        values["monitor/steps_per_s"] = (now.steps - before.steps) / wall_s
        if flops := self._flops(run):
            values["monitor/tflops_per_s"] = flops * batches_per_s / 1e12
        values["monitor/memory_gb"] = measures.memory_bytes() / 1e9
        if device_bytes := measures.device_memory_bytes(run.device):
            values["monitor/device_memory_gb"] = device_bytes / 1e9
        for logger in run.recorders:
            if logger.logs_times:
                logger.log_metrics(values, run.progress.global_step, run.progress.epoch)

    def _send_goodput(self, run: Run) -> None:
        """Send the share of the time of all attempts in which steps were made that count to the loggers."""
        if self._file.path is None:
            return
        from footplate.core.goodput import goodput

        with contextlib.suppress(ConfigError):
            share = goodput(run.run_dir).goodput
            for logger in run.recorders:
                if share is not None and logger.logs_times:
                    logger.log_metrics({"monitor/goodput": share}, run.progress.global_step, run.progress.epoch)

    def _compare_ranks(self, run: Run) -> None:
        """Ask all ranks for the seconds in which they did not wait for each other."""
        self._ranks_at = run.agreement.now_s
        self._end_window(run)
        known = run.parallel.communication_s() is not None
        own_s = sum(self.seconds.values()) - self.seconds.get("communication", 0.0) if known else None
        answers = run.group.gather((own_s, self.seconds.get("input", 0.0)))
        self._own_s = {rank: own for rank, (own, _) in enumerate(answers) if own is not None}
        ranks = [{"rank": rank, "own_s": own, "input_s": waited} for rank, (own, waited) in enumerate(answers)]
        progress = run.progress
        self._file.add(
            "epoch", epoch=progress.epoch, step=progress.global_step, seconds=dict(self.seconds), ranks=ranks
        )  # fmt: skip

    # The end

    def _peak(self, run: Run, precision: str) -> float | None:
        """Return the peak rate of all devices; None if nothing is known to compare with it."""
        if self._flops(run) is None:
            return None
        peak = run.accelerator.peak_flops_per_s(run.device, precision)
        if run.accelerator.name == "cpu":
            # The ranks of a machine share its processor.
            devices = run.world.size / run.world.local_size
        else:
            drives_all = run.parallel.copies or run.accelerator.single_controller
            devices = run.world.size * (len(run.placement.device_ids) if drives_all else 1)
        return None if peak is None else peak * devices

    def _evidence(self, run: Run) -> Evidence:
        looks, examined = self._looks, self._looks.examined
        loader = run.loop.loader if run.loop is not None else None
        peaks = [self._peak(run, precision) for precision in (run.precision.name, "bf16-mixed")]
        return Evidence(
            seconds=dict(self.seconds),
            batches=run.progress.batches - self._first.batches,
            rows=self._size.rows,
            samples=self._samples or None,
            tokens=self._tokens or None,
            device="xla" if run.accelerator.owns_weights else run.device.type,
            precision=run.precision.name,
            log_every_n_steps=run.config.log_every_n_steps,
            saves=self._saves,
            loader=measures.loader_facts(loader, sum(self.seconds.values())),
            hooks=tuple(_owners(run)),
            operations=examined.operations if examined else 0,
            flops=self._flops(run),
            reads=dict(examined.reads) if examined else {},
            visits=dict(examined.visits) if examined else {},
            by_line=dict(examined.by_line) if examined else {},
            pauses=dict(looks.pauses),
            least_step_s=looks.least_step_s if looks.timed else None,
            operation_s=measures.least_operation_s() if examined and run.device.type == "cpu" else None,
            compilations=tuple(measures.compilations(run.step, self._began_at)),
            launching=looks.launching,
            own_s=self._own_s,
            peak_flops_per_s=peaks[0],
            bfloat16_flops_per_s=peaks[1],
            gc_s=self._collections.seconds,
            memory_bytes=measures.peak_memory_bytes(),
            device_memory_bytes=measures.device_memory_bytes(run.device),
        )


def _process_s() -> float | None:
    """Return the seconds since this process began, or since it was given to this attempt."""
    kept_s = worker.kept_s()
    return measures.process_s() if kept_s is None else kept_s


def _attempt() -> int | None:
    """Return the number of the job's attempt; None outside of a job."""
    attempt = os.environ.get("FOOTPLATE_JOB_ATTEMPT", "")
    return int(attempt) if attempt.isdigit() else None


def _checkpoints_elsewhere(run: Run) -> list[str]:
    """Return the places of checkpoints that are not below the run's directory, such as those in a bucket."""
    savers = [callback for callback in run.callbacks if isinstance(callback, ModelCheckpoint)]
    places = {
        place.absolute() if isinstance(place, Path) else place
        for place in (to_place(saver.dirpath) for saver in savers if saver.dirpath is not None)
    }
    inside = run.run_dir.absolute()
    return sorted(str(place) for place in places if not isinstance(place, Path) or not place.is_relative_to(inside))


def _total_steps(run: Run) -> int | None:
    """Return the optimizer steps of the whole training; None if its arguments don't tell them."""
    trainer = run.trainer
    # A manual module may take any number of steps for a batch, and a timer ends at any step.
    if not run.module.automatic_optimization or run.config.max_time is not None:
        return None
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) else None


def _owners(run: Run) -> Iterable[str]:
    """Yield the names of the classes whose hooks run at every batch, without Footplate's own."""
    for name in ("on_train_batch_start", "on_train_batch_end"):
        for hook in (*run.hooks.get(name), *run.hooks.late(name)):
            owner = type(getattr(getattr(hook, "func", hook), "__self__", None))
            if not owner.__module__.startswith(("footplate.", "builtins")):
                yield owner.__name__
