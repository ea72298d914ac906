"""The training loop: epochs of chunks of batches, and what happens between two steps.

    epoch:          on_train_epoch_start → chunks → metrics, callbacks, schedulers, loggers, checkpoints
    chunk:          on_train_batch_start → step → for each of its batches: between_steps
    between steps:  schedulers → callbacks → loggers → checkpoints → agreement of ranks → validation → a signal

With several ranks, all ranks do the same at the same batch. They train on their shares of it. A signal or `should_stop` on
one rank counts once all ranks have agreed on it: at some later step, after a validation, or at the end of an epoch
(`distributed/agreement.py`).

The loop reads from the device only every `log_every_n_steps`. The order between two steps is the order in which a run can
be resumed: first what changes the state, then what reports it, last what saves it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from footplate.checkpoint.step_history import hash_weights
from footplate.core import rng
from footplate.core.errors import DataError
from footplate.data.adapters.order_record import record_order
from footplate.data.adapters.rank_shares import even, weigher
from footplate.distributed.uneven_loaders import close, together
from footplate.launch import worker
from footplate.training.argument_checks import validation_seconds
from footplate.training.evaluation import evaluate
from footplate.training.lr_schedulers import step_schedulers
from footplate.training.metrics import MetricLog
from footplate.training.monitor_check import check_monitors
from footplate.training.multi_step import chunks, each_transferred, next_chunk, varying
from footplate.training.prefetching import batches_of, read_ahead
from footplate.training.profiling import profiled_batches, recorder
from footplate.training.rank_checks import check_order, same_rows
from footplate.training.reloading import made_at, making_loaders
from footplate.training.saving import end_on_signal

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)


class TrainingLoop:
    """The epochs of one call of `trainer.fit`.

    Args:
        run: its module, step, hooks, metrics and progress are ready.
        loader: the training loader, made resumable.
        val_loaders: the validation loaders. Empty without validation.

    Attributes:
        source: the object that knows the batch which was handed out last: the loader, or its prefetcher.
        weight: how much a batch of the loader counts; see `weigher`.
        make_loaders: makes the loaders again. None if no hook makes any of them.
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
        self.weight = (
            weigher(loader, run.data_world) if run.logical is None else functools.partial(_logical_weight, run, loader)
        )
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
        """Train for one epoch, or for the rest of a resumed epoch."""
        self._reload()
        run, progress = self.run, self.run.progress
        total, transfer = run.num_training_batches, run.transfer(moved=self._ahead is not None)
        seed_step = rng.step_seeder(rng.mix(run.seed, run.data_world.rank), run.device)
        self._begin_epoch()

        ended = progress.batch_idx >= total or self.stops_here()
        batches = self._open_loader(ended, total)
        if progress.global_step >= run.profiles.due:
            run.profiles.at_boundary()
        complete = self._train_chunks(batches, ended, total, transfer, seed_step)
        close(batches)
        self._end_epoch(complete or progress.batch_idx >= total)

    def _open_loader(self, ended: bool, total: float) -> Iterator[Any]:
        """Begin to read the loader, for at most the `total` batches of an epoch. An epoch that has ended has no batches."""
        run, loader = self.run, self.loader
        if not ended:
            check_order(run, loader)
        batches = iter(()) if ended else batches_of(loader, self._ahead, total - run.progress.batch_idx)
        profile = recorder(run.profiler)
        if profile is not None:
            batches = profiled_batches(batches, profile, "[_TrainingEpochLoop].train_dataloader_next")
        if self._several and not even(loader):
            batches = together(batches, run.group, "training")
        return batches if ended else same_rows(run, batches)

    def _train_chunks(
        self,
        batches: Iterator[Any],
        ended: bool,
        total: float,
        transfer: Callable[[Any, int], Any] | None,
        seed_step: Callable[[int], None],
    ) -> bool:
        """Train on the batches of an epoch, chunk by chunk.

        Args:
            batches: those that are left.
            ended: the epoch had ended already, so it is no loss that there are none.
            total: the number of batches of a whole epoch.
            transfer: brings a batch to the device. None if there is nothing to do.
            seed_step: seeds the generators for a step.

        Returns:
            True if the epoch is over, however many batches it has had: a hook skips the rest, or the loader has ended.
        """
        run = self.run
        progress, metrics, step, profiles, logical = run.progress, run.metrics, run.step, run.profiles, run.logical
        size = step.chunk_size
        monitor, times = run.monitor, run.monitor.times
        is_idle = step.idle if run.device.type == "cuda" or run.accelerator.owns_weights else None
        times.switch("input")
        for chunk in chunks(batches, 1) if size == 1 else varying(batches, functools.partial(next_chunk, self, size)):
            if is_idle is not None and not is_idle():
                # The host is ahead of the device, which hasn't waited.
                times.cause = "step"
            times.switch("transfer")
            # Transfer hooks may draw random numbers, so each batch goes through them under its own seed.
            first = progress.batch_idx
            seed_step(progress.batches)
            if logical is not None:
                chunk = [logical.transferred(run, chunk[0], transfer)]
            elif transfer is not None and len(chunk) == 1:
                chunk = [transfer(chunk[0], 0)]
            elif transfer is not None:
                chunk = each_transferred(chunk, progress.batches, seed_step, transfer)

            if self._batch_start:
                times.switch("callbacks")
            metrics.begin_batch(chunk[0])
            # Hooks between two steps get the batch of this process's first logical rank.
            shown = chunk if logical is None else [chunk[0][0]]
            if self.weight is not None and logical is None:
                metrics.counts = self.weight(first) != 0.0
            if self._batch_start and self._skips_epoch(shown, first):
                return True
            steps_before = progress.global_step
            run.in_step = True
            times.switch("step")
            if times.since < monitor.look_at:
                outputs = step.train(chunk, first, first + len(chunk) >= total, progress.epoch)
            else:
                outputs = monitor.train(run, chunk, first, first + len(chunk) >= total)
            run.in_step = False
            self._after_chunk(shown, outputs, first + len(chunk), steps_before)
            # Nothing of this batch stays in the device's memory during the next step.
            del chunk, shown, outputs
            ends = progress.batch_idx >= total or self.stops_here()
            if progress.global_step >= profiles.due:
                profiles.at_boundary(ends)
            if ends:
                return False
            times.switch("input")

        times.switch("callbacks")
        if not ended:
            self._source_ran_out(total)
        return not ended

    def _after_chunk(self, batches: Sequence[Any], outputs: Iterable[Any], end: int, steps_before: int) -> None:
        """Do what follows each batch of a chunk, whose last batch is the one before `end`."""
        progress, metrics, times = self._progress, self.run.metrics, self.run.monitor.times
        # A compiled step makes its call when its first output is taken.
        for batch, output in zip(batches, outputs, strict=True):
            times.switch("callbacks")
            progress.batch_idx += 1
            progress.batches += 1
            metrics.end_batch()
            self.between_steps(batch, output, progress.batch_idx - 1, steps_before, progress.batch_idx == end)
            steps_before = progress.global_step

    def between_steps(
        self, batch: Any, output: Any, batch_idx: int, steps_before: int, ends_chunk: bool = True
    ) -> None:
        """Do what follows a batch, in the order of the module's docstring.

        Inside a chunk, whose steps are all done already, nothing is saved and nothing ends.
        """
        run = self.run
        progress, reports, times = self._progress, self._reports, run.monitor.times
        step = progress.global_step
        if self._by_step and step != steps_before:
            step_schedulers(run, "step", plateau=False)

        # Report. Both reads from the device happen only in a step that reports.
        self.logs_this_step = step // self._log_every != steps_before // self._log_every
        for loss in (output,) if run.logical is None else run.step.outputs:
            if loss is not None:
                reports.note_loss(loss, steps_before + 1)
        if self.logs_this_step:
            # The host waits here until the device has made all steps.
            times.switch("step")
            reports.check_finite()
            times.switch("callbacks")
        for hook in self._batch_end:
            hook(output, batch, batch_idx)
        if self.logs_this_step:
            times.switch("logging")
            reports.step(run.metrics)
            reports.send(step, progress.epoch)
            times.switch("callbacks")
            run.monitor.report(run)
        if not self._checked:
            self._checked = True
            names = {name for rank_names in run.group.gather(list(run.metrics.names())) for name in rank_names}
            run.group.ask_first(lambda: check_monitors(run, names, self._known, self.val_loaders))
        if not ends_chunk:
            return

        # Save, agree with the other ranks, validate, and end.
        for hook in self._late_batch_end:
            hook(output, batch, batch_idx)
        if self._several:
            worker.progressed()
            self._agreement.step()
            run.should_stop = run.should_stop or self._agreement.stop
        if self.val_loaders and self._validation_due(batch_idx + 1):
            self.validate()
        if self._by_step and step != steps_before:
            step_schedulers(run, "step", plateau=True)
        if self._signals.received is not None and self._agreement.interrupted and not self._may_finish():
            end_on_signal(run)

    def run_forward(self) -> None:
        """Run `training_step` over the training data once more, without gradients and logging.

        Layers such as batch norm collect their statistics again. The order of the batches is that of the next epoch.
        """
        run, ahead, progress = self.run, self._ahead, self._progress
        total, transfer = run.num_training_batches, run.transfer(moved=ahead is not None)
        seed_step = rng.step_seeder(rng.mix(run.seed, run.data_world.rank), run.device)
        self.source.set_epoch(progress.epoch)
        check_order(run, self.loader)
        batches = batches_of(self.loader, ahead, total)
        if self._several and not even(self.loader):
            batches = together(batches, run.group, "training")
        self._agreement.begin()
        unlogged = run.logging_to(MetricLog(run.module, by_step=False, group=run.placement.data_group))
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
        """Return True if training is over."""
        run = self.run
        if run.config.max_epochs not in (None, -1) and run.progress.epoch >= run.config.max_epochs:
            return True
        return self.stops_here() and not self._owes_an_end()

    def _may_finish(self) -> bool:
        """Return True if a signal leaves the run to end by itself: SIGTERM, after the last step and its validation.

        Such a run saves and ends as fast as one that the signal ends, and needn't be continued.
        """
        return self._signals.received == signal.SIGTERM and self.has_trained()

    def has_trained(self) -> bool:
        """Return True if no batch is left to train. The end of the epoch may be."""
        run, progress = self.run, self._progress
        epochs = progress.epoch + (progress.batch_idx >= run.num_training_batches)
        limit = run.config.max_epochs
        return (limit is not None and limit != -1 and epochs >= limit) or self.stops_here()

    def _owes_an_end(self) -> bool:
        """Return True if the run was cut off after the last step of an epoch, before its validation, metrics and hooks."""
        progress = self.run.progress
        return progress.batch_idx > 0 and progress.ended_at != progress.batches

    def stops_here(self) -> bool:
        """Return True if training ends before the epoch does."""
        run = self.run
        if run.config.max_steps != -1 and run.progress.global_step >= run.config.max_steps:
            return True
        stop = self._agreement.stop if self._several else run.should_stop
        return stop and self._may_stop()

    def sanity_check(self) -> None:
        """Try a few validation batches, to find a mistake now and not after an epoch."""
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
        """Validate inside training."""
        run = self.run
        if run.logical is not None:
            # All processes have the same values, of the latest step, for what monitors them.
            run.reports.publish(run.metrics.step_values(sync=True), log=False)
        with run.monitor.times.during("validation"):
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
            # The run was cut off between a step and the validation that was due after it.
            self.validate()
        run.metrics.by_step = True
        self._by_step = any(config.interval == "step" for config in run.lr_scheduler_configs)
        run.step.accumulate(run.config.accumulate_grad_batches)
        self._note_history()
        run.step.begin_epoch()

    def _note_history(self) -> None:
        """Note in the history of steps from which batches the next steps are made; see `checkpoint/step_history.py`."""
        run = self.run
        assert run.state is not None
        steps = run.state.steps
        if run.progress.batches == 0 and not steps.initial and not run.parallel.sharded:
            steps.initial = hash_weights(run.module)
        by_hand = not run.module.automatic_optimization
        steps.note(
            run.progress.position,
            run.num_training_batches,
            0 if by_hand else run.config.accumulate_grad_batches,
            run.data_ranks,
            self.loader,
            record_order,
        )

    def _end_epoch(self, complete: bool) -> None:
        """End an epoch. An epoch that was stopped before its last batch can be resumed where it stopped."""
        run = self.run
        metrics, hooks, progress, reports = run.metrics, run.hooks, run.progress, run.reports
        metrics.batch, metrics.by_step, metrics.counts = None, False, True

        # Reducing metrics empties them. An incomplete epoch keeps what it has collected, for the rest of it.
        unfinished = None if complete else metrics.state_dict()
        if not complete:
            run.keep_collected()
        times = run.monitor.times
        times.switch("step")
        reports.check_finite()
        times.switch("callbacks")
        reports.publish(metrics.step_values(sync=run.logical is not None), log=False)
        reports.publish(metrics.epoch_values())
        for hook in hooks.get("on_train_epoch_end"):
            hook()
        reports.publish(metrics.epoch_values())
        self._report_skipped()

        if complete:
            step_schedulers(run, "epoch", plateau=False)
            step_schedulers(run, "epoch", plateau=True)
        reports.send(progress.global_step, progress.epoch)
        metrics.reset_metrics()
        if unfinished is not None:
            metrics.load_state_dict(unfinished)
            metrics.forget_latest()

        progress.epoch_ended, progress.ended_at = complete, progress.batches
        for hook in hooks.late("on_train_epoch_end"):
            hook()
        self._agreement.settle()
        run.monitor.end_epoch(run)
        if complete:
            progress.next_epoch()

    def _source_ran_out(self, total: float) -> None:
        """Handle a loader with fewer batches than expected: end the accumulation window, and validate if it is due."""
        run = self.run
        progress = run.progress
        if progress.batch_idx == 0:
            raise DataError("The training loader gave no batch in this epoch.")
        if math.isfinite(total) and run.world.rank == 0:
            log.warning("The training loader ended after %d of %d batches.", progress.batch_idx, total)
        steps_before = progress.global_step
        run.in_step = True
        run.step.finish_window(progress.epoch, progress.batch_idx - 1)
        run.in_step = False
        if progress.global_step != steps_before:
            self._report_late_step(steps_before)
        by_clock = self._val_seconds is not None
        if math.isinf(self._val_every) and not by_clock and self.val_loaders and self._validates_in_epoch():
            self.validate()

    def _report_late_step(self, steps_before: int) -> None:
        """Do what follows the step of a window that was cut short. Its batches have been handled already."""
        step = self._progress.global_step
        if self._by_step:
            step_schedulers(self.run, "step", plateau=False)
        if step // self._log_every != steps_before // self._log_every:
            self._reports.step(self.run.metrics)
            self._reports.send(step, self._progress.epoch)
        for hook in self._late_batch_end:
            hook(None, None, self._progress.batch_idx - 1)

    def _report_skipped(self) -> None:
        """Log how many rows the loader has left out since the last report (`on_error="skip"`)."""
        skipped = getattr(self.loader, "skipped", 0)
        if skipped > self._skipped:
            log.warning(
                "%d rows could not be read in epoch %d and were left out.",
                skipped - self._skipped,
                self._progress.epoch,
            )
            self._skipped = skipped

    def _skips_epoch(self, chunk: Sequence[Any], first: int) -> bool:
        """Call `on_train_batch_start`. Return True if a hook asks to skip the rest of this epoch."""
        answers = [hook(batch, first + index) for index, batch in enumerate(chunk) for hook in self._batch_start]
        return -1 in answers

    def _validation_due(self, batch_idx: int) -> bool:
        if not self.val_loaders:
            return False
        if self._agreement.stop and self._may_stop():
            # The loop evaluates the last steps, and saves.
            return self._validates_in_epoch()
        if self._val_seconds is not None:
            self._progress.unvalidated_s = self._agreement.now_s - self._validated_s
            return self._progress.unvalidated_s >= self._val_seconds and self._validates_in_epoch()
        if math.isinf(self._val_every):
            return False
        if self.run.config.check_val_every_n_epoch is None:
            return self.run.progress.batches % self._val_every == 0
        return batch_idx % self._val_every == 0 and self._validates_in_epoch()

    def validation_ends_epoch(self, batch_idx: int) -> bool:
        """Return True if a batch is the epoch's last and validation follows it at once."""
        return batch_idx + 1 >= self.run.num_training_batches and self._validation_due(batch_idx + 1)

    def _validates_in_epoch(self) -> bool:
        every = self.run.config.check_val_every_n_epoch
        return every is None or (self.run.progress.epoch + 1) % every == 0

    def _may_stop(self) -> bool:
        """Return True if `min_epochs` and `min_steps` allow an early stop."""
        run = self.run
        epochs = run.progress.epoch + (run.progress.batch_idx >= run.num_training_batches)
        enough_epochs = run.config.min_epochs is None or epochs >= run.config.min_epochs
        return enough_epochs and (run.config.min_steps is None or run.progress.global_step >= run.config.min_steps)


def _logical_weight(run: Run, loader: Any, batch: int) -> float:
    """Return the weight of the share of the logical rank whose code runs."""
    assert run.logical is not None
    return loader.weight(run.logical.position or 0, batch)


def _warn_of_evaluation_mode(module: torch.nn.Module) -> None:
    """Warn of layers in evaluation mode. A layer keeps its mode, so that a user can exclude it from training."""
    resting = sum(1 for part in module.modules() if not part.training)
    if resting:
        log.warning(
            "%d layers of %s are in evaluation mode and stay in it (dropout and batch statistics are off there). "
            "Call .train() on the layers that you want to train.",
            resting,
            type(module).__name__,
        )
