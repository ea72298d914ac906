"""The training loop: epochs of chunks of batches, and what happens between two steps.

    epoch:          on_train_epoch_start → chunks → metrics, callbacks, schedulers, loggers, savers
    chunk:          on_train_batch_start → step → for each of its batches: between_steps
    between steps:  schedulers → callbacks → loggers → savers → agreement → validation → a signal that came

With several ranks, all do the same at the same batch: they train on their shares of it, and what one rank alone can know
(a signal, `should_stop`) counts from when they have agreed on it, which is at some step, after a validation, or at the end
of an epoch; see `distributed/agreement.py`.

The loop's rule: nothing in it reads from the device but every `log_every_n_steps`. The order between two steps is the
order in which a run can be resumed: first what changes the state, then what reports it, last what saves it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from footplate.core import rng
from footplate.core.errors import ConfigError, DataError, did_you_mean
from footplate.core.hooks import overrides
from footplate.data.adapters.rank_shares import even, weigher
from footplate.distributed.uneven_loaders import close, together
from footplate.launch import worker
from footplate.training.evaluation import evaluate
from footplate.training.metrics import MetricLog
from footplate.training.multi_step import next_chunk
from footplate.training.prefetching import batches_of, read_ahead, timed
from footplate.training.profiling import profiled_batches, recorder
from footplate.training.rank_checks import check_order
from footplate.training.reloading import made_at, making_loaders
from footplate.training.saving import end_on_signal
from footplate.training.settings import validation_seconds

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)

LOGGING_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end", "on_validation_end")


class TrainingLoop:
    """One run of `trainer.fit`, once everything it needs is there.

    Args:
        run: prepared: its module, step, hooks, metrics and progress.
        loader: the training loader, made resumable.
        val_loaders: the validation loaders; none when there is no validation.

    Attributes:
        source: what knows the batch that was handed out last: the loader, or what reads ahead of the step from it.
        weight: how much a batch of the loader counts; see `weigher`.
        make_loaders: makes the loaders again; None where none of them comes from a hook.
    """

    def __init__(self, run: Run, loader: Any, val_loaders: list[Any]) -> None:
        self.run = run
        self.make_loaders: Callable[[], tuple[Any, list[Any]]] | None = None
        self._take_loaders(loader, val_loaders)
        self.logs_this_step = False
        self._progress, self._reports = run.progress, run.reports
        self._agreement, self._signals = run.agreement, run.signals
        self._several = run.group.is_distributed
        self._known: set[str] = set()
        self._skipped = 0
        self._checked = run.progress.batches > 0
        self._log_every = run.config.log_every_n_steps
        self._val_seconds = validation_seconds(run.config.val_check_interval)
        self._validated_s = self._agreement.now_s - run.progress.unvalidated_s
        self._by_step = False
        self._batch_start = run.hooks.get("on_train_batch_start")
        self._batch_end = run.hooks.get("on_train_batch_end")
        self._late_batch_end = run.hooks.late("on_train_batch_end")

    def _take_loaders(self, loader: Any, val_loaders: list[Any]) -> None:
        run = self.run
        self.loader, self.val_loaders = loader, val_loaders
        self._ahead = read_ahead(run, loader, "training")
        self.source = loader if self._ahead is None else self._ahead
        self.weight = weigher(loader, run.world)
        self._val_every = run.val_check_batches
        self._made_at = made_at(run.progress.epoch, run.config.reload_dataloaders_every_n_epochs)

    def _reload(self) -> None:
        """Make the loaders again, if it is time."""
        run = self.run
        epoch = run.progress.epoch
        if self.make_loaders is None or made_at(epoch, run.config.reload_dataloaders_every_n_epochs) == self._made_at:
            return
        with making_loaders(run, epoch):
            loaders = self.make_loaders()
        self._take_loaders(*loaders)
        run.use_loader(self.source)

    def epoch(self) -> None:
        """Train for one epoch, or for the rest of one that was resumed."""
        self._reload()
        run, loader, ahead = self.run, self.loader, self._ahead
        progress, metrics, step = run.progress, run.metrics, run.step
        total, transfer = run.num_training_batches, run.transfer(moved=ahead is not None)
        seed_step = rng.step_seeder(rng.mix(run.seed, run.world.rank), run.device)
        self._begin_epoch()

        complete = False
        ended = progress.batch_idx >= total or self.stops_here()
        if not ended:
            check_order(run, loader)
        batches = iter(()) if ended else batches_of(loader, ahead, total - progress.batch_idx)
        if run.data_wait_s is not None:
            batches = timed(batches, run)
        profile = recorder(run.profiler)
        if profile is not None:
            batches = profiled_batches(batches, profile, "[_TrainingEpochLoop].train_dataloader_next")
        if self._several and not even(loader):
            batches = together(batches, run.group, "training")
        size = step.chunk_size
        for chunk in chunks(batches, 1) if size == 1 else varying(batches, functools.partial(next_chunk, self, size)):
            first = progress.batch_idx
            seed_step(progress.batches)
            if transfer is not None and len(chunk) == 1:
                chunk = [transfer(chunk[0], 0)]
            elif transfer is not None:
                chunk = [
                    seeded(seed_step, progress.batches + index, transfer, batch) for index, batch in enumerate(chunk)
                ]
                seed_step(progress.batches)
            metrics.begin_batch(chunk[0])
            if self.weight is not None:
                metrics.counts = self.weight(first) != 0.0
            if self._batch_start and self._skips_epoch(chunk, first):
                complete = True
                break
            steps_before = progress.global_step
            outputs = step.train(chunk, first, first + len(chunk) >= total, progress.epoch)
            for batch, output in zip(chunk, outputs, strict=True):
                progress.batch_idx += 1
                progress.batches += 1
                metrics.end_batch()
                ends_chunk = progress.batch_idx == first + len(chunk)
                self.between_steps(batch, output, progress.batch_idx - 1, steps_before, ends_chunk)
                steps_before = progress.global_step
            if progress.batch_idx >= total or self.stops_here():
                break
        else:
            if not ended:
                self._source_ran_out(total)
                complete = True
        close(batches)
        self._end_epoch(complete or progress.batch_idx >= total)

    def between_steps(
        self, batch: Any, output: Any, batch_idx: int, steps_before: int, ends_chunk: bool = True
    ) -> None:
        """What follows a batch; see the module's docstring for the order. Inside a chunk, whose steps are all done, nothing
        is saved and nothing ends.
        """
        run = self.run
        progress, reports = self._progress, self._reports
        step = progress.global_step
        if self._by_step and step != steps_before:
            self._step_schedulers("step", plateau=False)
        self.logs_this_step = step // self._log_every != steps_before // self._log_every
        if output is not None:
            reports.note_loss(output, steps_before + 1)
        if self.logs_this_step:
            reports.check_finite()
        for hook in self._batch_end:
            hook(output, batch, batch_idx)
        if self.logs_this_step:
            reports.step(run.metrics)
            reports.send(step, progress.epoch)
        if not self._checked:
            self._checked = True
            names = {name for found in run.group.gather(list(run.metrics.names())) for name in found}
            run.group.ask_first(lambda: self._check_monitors(names))
        if not ends_chunk:
            return
        for hook in self._late_batch_end:
            hook(output, batch, batch_idx)
        if self._several:
            worker.progressed()
            self._agreement.step()
            run.should_stop = run.should_stop or self._agreement.stop
        if self.val_loaders and self._validation_due(batch_idx + 1):
            self.validate()
        if self._by_step and step != steps_before:
            self._step_schedulers("step", plateau=True)
        if self._signals.received is not None and self._agreement.interrupted:
            end_on_signal(run)

    def run_forward(self) -> None:
        """Run `training_step` over the training data once more, without gradients and without logging, for what layers
        gather by themselves. The order is that of the next epoch.
        """
        run, ahead, progress = self.run, self._ahead, self._progress
        total, transfer = run.num_training_batches, run.transfer(moved=ahead is not None)
        seed_step = rng.step_seeder(rng.mix(run.seed, run.world.rank), run.device)
        self.source.set_epoch(progress.epoch)
        check_order(run, self.loader)
        batches = batches_of(self.loader, ahead, total)
        if self._several and not even(self.loader):
            batches = together(batches, run.group, "training")
        self._agreement.begin()
        unlogged = run.logging_to(MetricLog(run.module, by_step=False, group=run.group))
        with torch.no_grad(), unlogged:
            for batch_idx, batch in enumerate(batches if math.isinf(total) else itertools.islice(batches, int(total))):
                seed_step(progress.batches + batch_idx)
                run.metrics.batch = batch = batch if transfer is None else transfer(batch, 0)
                run.step.evaluate("training", batch, batch_idx, None)
                if self._several:
                    self._agreement.step()
                if self._agreement.interrupted:
                    end_on_signal(run)
        close(batches)
        run.parallel.sync_buffers(run.module)

    def finished(self) -> bool:
        """Whether training is over."""
        run = self.run
        if run.config.max_epochs not in (None, -1) and run.progress.epoch >= run.config.max_epochs:
            return True
        return self.stops_here() and not self._owes_an_end()

    def _owes_an_end(self) -> bool:
        """Whether the run was cut off between the last step of an epoch and what follows it: validation, metrics, hooks."""
        progress = self.run.progress
        return progress.batch_idx > 0 and progress.ended_at != progress.batches

    def stops_here(self) -> bool:
        """Whether training ends before the epoch does."""
        run = self.run
        if run.config.max_steps != -1 and run.progress.global_step >= run.config.max_steps:
            return True
        stop = self._agreement.stop if self._several else run.should_stop
        return stop and self._may_stop()

    def sanity_check(self) -> None:
        """Try a few validation batches, so that a mistake there is found now and not after an epoch."""
        run = self.run
        asked = run.config.num_sanity_val_steps
        steps = math.inf if asked == -1 else asked
        if not self.val_loaders or steps == 0:
            return
        run.sanity_checking = True
        run.hooks.call("on_sanity_check_start")
        limits = [min(steps, limit) for limit in run.num_val_batches]
        run.reports.publish(evaluate(run, "validate", self.val_loaders, limits), log=False)
        self._known = set(run.reports.callback)
        run.hooks.call("on_sanity_check_end")
        run.sanity_checking = False
        run.reports.forget()

    def validate(self) -> None:
        """Validate in the middle of training."""
        run = self.run
        run.reports.publish(evaluate(run, "validate", self.val_loaders, run.num_val_batches))
        run.reports.send(run.progress.global_step, run.progress.epoch)
        run.progress.validated_at, run.progress.unvalidated_s = run.progress.batches, 0.0
        for hook in run.hooks.late("on_validation_end"):
            hook()
        self._agreement.settle()
        self._validated_s = self._agreement.now_s

    def _begin_epoch(self) -> None:
        run = self.run
        progress = run.progress
        self.source.set_epoch(progress.epoch)
        if progress.batch_idx == 0:
            if progress.batches == 0 and run.world.rank == 0:
                _warn_of_evaluation_mode(run.module)
            run.metrics.by_step = False
            run.hooks.call("on_train_epoch_start")
        elif self._validation_due(progress.batch_idx) and progress.validated_at != progress.batches:
            self.validate()  # the run was cut off between a step and the validation after it
        run.metrics.by_step = True
        self._by_step = any(config.interval == "step" for config in run.lr_scheduler_configs)
        run.step.accumulate(run.config.accumulate_grad_batches)
        run.step.begin_epoch()

    def _end_epoch(self, complete: bool) -> None:
        """The end of an epoch. One that was stopped before its last batch can be taken up again where it stopped."""
        run = self.run
        metrics, hooks, progress, reports = run.metrics, run.hooks, run.progress, run.reports
        metrics.batch, metrics.by_step, metrics.counts = None, False, True
        unfinished = None if complete else metrics.state_dict()
        if not complete:
            run.keep_collected()
        reports.check_finite()
        reports.publish(metrics.step_values(), log=False)
        reports.publish(metrics.epoch_values())
        for hook in hooks.get("on_train_epoch_end"):
            hook()
        reports.publish(metrics.epoch_values())
        self._report_skipped()
        if complete:
            self._step_schedulers("epoch", plateau=False)
            self._step_schedulers("epoch", plateau=True)
        reports.send(progress.global_step, progress.epoch)
        metrics.reset_metrics()
        if unfinished is not None:
            metrics.load_state_dict(unfinished)
            metrics.forget_latest()
        progress.epoch_ended, progress.ended_at = complete, progress.batches
        for hook in hooks.late("on_train_epoch_end"):
            hook()
        self._agreement.settle()
        if complete:
            progress.next_epoch()

    def _source_ran_out(self, total: float) -> None:
        """The loader had fewer batches than was known: end the accumulation window, and validate if it is due."""
        run = self.run
        progress = run.progress
        if progress.batch_idx == 0:
            raise DataError("The training loader gave no batch in this epoch.")
        if math.isfinite(total) and run.world.rank == 0:
            log.warning("The training loader ended after %d of %d batches.", progress.batch_idx, total)
        steps_before = progress.global_step
        run.step.finish_window(progress.epoch, progress.batch_idx - 1)
        if progress.global_step != steps_before:
            self._report_late_step(steps_before)
        by_clock = self._val_seconds is not None
        if math.isinf(self._val_every) and not by_clock and self.val_loaders and self._validates_in_epoch():
            self.validate()

    def _report_late_step(self, steps_before: int) -> None:
        """What follows the step of a window that was cut short: its batches have been dealt with."""
        step = self._progress.global_step
        if self._by_step:
            self._step_schedulers("step", plateau=False)
        if step // self._log_every != steps_before // self._log_every:
            self._reports.step(self.run.metrics)
            self._reports.send(step, self._progress.epoch)
        for hook in self._late_batch_end:
            hook(None, None, self._progress.batch_idx - 1)

    def _report_skipped(self) -> None:
        """Say how many rows the loader has left out since it was last said (`on_error="skip"`)."""
        skipped = getattr(self.loader, "skipped", 0)
        if skipped > self._skipped:
            log.warning(
                "%d rows could not be read in epoch %d and were left out.",
                skipped - self._skipped,
                self._progress.epoch,
            )
            self._skipped = skipped

    def _skips_epoch(self, chunk: Sequence[Any], first: int) -> bool:
        """Call `on_train_batch_start`; whether one of them wants no more of this epoch."""
        answers = [hook(batch, first + i) for i, batch in enumerate(chunk) for hook in self._batch_start]
        return -1 in answers

    def _validation_due(self, batch_idx: int) -> bool:
        if not self.val_loaders:
            return False
        if self._agreement.stop and self._may_stop():
            return self._validates_in_epoch()  # so that what was trained last is judged, and saved
        if self._val_seconds is not None:
            self._progress.unvalidated_s = self._agreement.now_s - self._validated_s
            return self._progress.unvalidated_s >= self._val_seconds and self._validates_in_epoch()
        if math.isinf(self._val_every):
            return False
        if self.run.config.check_val_every_n_epoch is None:
            return self.run.progress.batches % self._val_every == 0
        return batch_idx % self._val_every == 0 and self._validates_in_epoch()

    def validation_ends_epoch(self, batch_idx: int) -> bool:
        """Whether a batch is the epoch's last, and validation follows it at once."""
        return batch_idx + 1 >= self.run.num_training_batches and self._validation_due(batch_idx + 1)

    def _validates_in_epoch(self) -> bool:
        every = self.run.config.check_val_every_n_epoch
        return every is None or (self.run.progress.epoch + 1) % every == 0

    def _may_stop(self) -> bool:
        """Whether `min_epochs` and `min_steps` allow an early stop."""
        run = self.run
        epochs = run.progress.epoch + (run.progress.batch_idx >= run.num_training_batches)
        enough_epochs = run.config.min_epochs is None or epochs >= run.config.min_epochs
        return enough_epochs and (run.config.min_steps is None or run.progress.global_step >= run.config.min_steps)

    def _step_schedulers(self, interval: str, plateau: bool) -> None:
        run = self.run
        if not run.module.automatic_optimization:
            return
        now = run.progress.global_step if interval == "step" else run.progress.epoch + 1
        for config in run.lr_scheduler_configs:
            if config.interval != interval or config.reduce_on_plateau != plateau or now % config.frequency:
                continue
            metric = None
            if config.reduce_on_plateau:
                value = run.group.from_first(run.latest_metrics().get(config.monitor or ""))
                if value is None:
                    if config.strict:
                        raise ConfigError(
                            f'{type(config.scheduler).__name__} monitors "{config.monitor}", which has not been logged. '
                            f"{did_you_mean(config.monitor or '', run.reports.callback)}"
                        )
                    continue
                metric = torch.tensor(value)
            run.module.lr_scheduler_step(config.scheduler, metric)

    def _check_monitors(self, logged: set[str]) -> None:
        """After the first batch, name a monitored metric that nothing can log, rather than after the first epoch. Rank 0's
        value counts, so rank 0 judges; at an epoch's end it knows what any rank has logged.
        """
        run = self.run
        if run.config.fast_dev_run or (self.val_loaders and not self._known):
            return  # validation has not been tried, so what it logs isn't known
        if any(overrides(run.module, name) for name in LOGGING_HOOKS):
            return
        if any(not type(one).__module__.startswith("footplate.") for one in run.callbacks):
            return  # a callback of somebody else's may log anything later
        known = {*self._known, *run.reports.callback}
        for name in logged:
            known |= {name, f"{name}_step", f"{name}_epoch"}
        watchers = [(type(one).__name__, getattr(one, "monitor", None)) for one in run.callbacks]
        watchers += [
            (type(config.scheduler).__name__, config.monitor)
            for config in run.lr_scheduler_configs
            if config.reduce_on_plateau
        ]
        counters = {("ModelCheckpoint", "epoch"), ("ModelCheckpoint", "step")}
        for who, monitor in watchers:
            if monitor is not None and monitor not in known and (who, monitor) not in counters:
                raise ConfigError(f'{who} monitors "{monitor}", which nothing logs. {did_you_mean(monitor, known)}')


def _warn_of_evaluation_mode(module: torch.nn.Module) -> None:
    """Layers keep the mode they come in, so that one can be kept out of training; say so, since it is easily missed."""
    resting = sum(1 for part in module.modules() if not part.training)
    if resting:
        log.warning(
            "%d layers of %s are in evaluation mode and stay in it (dropout and batch statistics are off there). "
            "Call .train() on what is to be trained.",
            resting,
            type(module).__name__,
        )


def chunks(batches: Iterator[Any], size: int) -> Iterator[Sequence[Any]]:
    """Batches, so many at a time; the last chunk may be shorter."""
    if size == 1:
        return zip(batches, strict=False)  # tuples of one, made in C
    return iter(lambda: tuple(itertools.islice(batches, size)), ())


def varying(batches: Iterator[Any], size: Callable[[], int]) -> Iterator[Sequence[Any]]:
    """Batches, each time as many as `size` then says; the last chunk may be shorter."""
    return iter(lambda: tuple(itertools.islice(batches, size())), ())


def seeded(seed_step: Callable[[int], None], number: int, transfer: Callable[[Any, int], Any], batch: Any) -> Any:
    """A batch of a chunk through its transfer hooks, under its own step's seed."""
    seed_step(number)
    return transfer(batch, 0)
