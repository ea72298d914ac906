"""`Alert`: tell a person when a rule about a run holds.

    fp.Alert(["loss is NaN", "no step for 5 min", "run failed"], to=fp.Webhook("$SLACK_URL", form="slack"))
    fp.Alert("val_loss > 2", to=fp.Email("me@lab.example", sender="gpu@lab.example", host="smtp.lab.example"))

A rule is checked when its metric is reported, so it costs a step nothing that isn't reported. A thread watches the time
since the last batch. A rule that holds sends one message; the next message comes when the rule has not held in between,
and at the earliest an hour later. Each attempt of a job begins again, and a message tells the number of the attempt.
"""

from __future__ import annotations

import math
import operator
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from footplate.callbacks.alert_channels import AlertMessage, Channel, Email, Sender, Webhook
from footplate.callbacks.base import Callback
from footplate.core.errors import ConfigError
from footplate.core.threads import join
from footplate.tracking.parameters import without_credentials

if TYPE_CHECKING:
    from torch.nn import Module

    from footplate.callbacks.trainer_view import TrainerView

RECORD = "alerts.jsonl"  # in the run's directory: the messages of all attempts
CLOSE_TIMEOUT_S = 15.0
AGAIN_AFTER_S = 3600.0
WATCHES_PER_LIMIT = 4
LONGEST_WATCH_S = 5.0

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_EXPECTED = '"loss is NaN", "no step for 5 min", "run failed" (or "job failed"), or a bound such as "val_loss > 2"'


@dataclass(frozen=True)
class Rule:
    """A rule, parsed.

    Attributes:
        text: the rule as the user wrote it.
        kind: "nan" (or infinite), "stuck", "failed" or "bound".
        metric: the metric of "nan" and "bound".
        sign: the comparison of "bound".
        limit: the bound of "bound", or the seconds of "stuck".
    """

    text: str
    kind: Literal["nan", "stuck", "failed", "bound"]
    metric: str = ""
    sign: str = ""
    limit: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse a rule.

        Raises:
            ConfigError: the text is not a rule.
        """
        plain = " ".join(str(text).split())
        if plain in ("run failed", "job failed"):
            return cls(plain, "failed")
        if stuck := re.fullmatch(r"no step for (\d+(?:\.\d+)?) ?(s|min|h)", plain):
            limit_s = float(stuck[1]) * _UNITS[stuck[2]]
            if limit_s > 0:
                return cls(plain, "stuck", limit=limit_s)
        if nan := re.fullmatch(r"(\S+) is nan", plain, re.IGNORECASE):
            return cls(plain, "nan", nan[1])
        if bound := re.fullmatch(r"(\S+) (<=|>=|<|>) (\S+)", plain):
            try:
                return cls(plain, "bound", bound[1], bound[2], float(bound[3]))
            except ValueError:
                pass
        raise ConfigError(f"Alert({text!r}): expected {_EXPECTED}.")

    def holds(self, value: float) -> bool:
        """Return True if a "nan" or a "bound" rule holds for a value of its metric."""
        return not math.isfinite(value) if self.kind == "nan" else _BOUNDS[self.sign](value, self.limit)


class Alert(Callback):
    """Send a message to a webhook, an e-mail server or a function when a rule holds.

    The rules:

    - `"loss is NaN"`: the training loss, or another metric, is NaN or infinite.
    - `"no step for 5 min"` (`s`, `min`, `h`): no batch of training or validation has ended in this time.
    - `"run failed"` or `"job failed"`: an exception ends the run. Ctrl-C and a preemption are no failures.
    - `"val_loss > 2"` (`<`, `<=`, `>`, `>=`): a reported metric is beyond a bound.

    Messages are sent by a thread of rank 0, at most four times each. A channel that fails or hangs doesn't stop training.

    Args:
        rule: a rule, or several.
        to: a channel, or several: `fp.Webhook`, `fp.Email`, or a function that receives an `AlertMessage`.
        again_after_s: a rule that holds again sends another message after this time at the earliest.

    Raises:
        ConfigError: a text that is not a rule, or an object that is not a channel.

    Examples:
        >>> alert = fp.Alert(["loss is NaN", "no step for 5 min", "val_loss > 2"], to=fp.Webhook("$ALERT_URL"))
        >>> trainer = fp.Trainer(callbacks=[alert])
    """

    sees_weights = False
    order = 1

    def __init__(
        self, rule: str | Sequence[str], to: Channel | Sequence[Channel], again_after_s: float = AGAIN_AFTER_S
    ) -> None:
        self._rules = [Rule.parse(text) for text in ([rule] if isinstance(rule, str) else rule)]
        self._channels: list[Channel] = list(to) if isinstance(to, (list, tuple)) else [to]  # type: ignore[list-item]
        for channel in self._channels:
            if not callable(channel) and not isinstance(channel, (Webhook, Email)):
                raise ConfigError(f"Alert(to={channel!r}): expected fp.Webhook, fp.Email or a function.")
        self._again_after_s = again_after_s
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._sender: Sender | None = None
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()
        # The rules that hold, and when each sent its last message.
        self._holding: set[str] = set()
        self._sent_s: dict[str, float] = {}
        self._last_batch_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: no threads."""
        kept = ("_rules", "_channels", "_again_after_s")
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_anew()

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        """Check the channels. Raises ConfigError if a variable of a channel is missing."""
        if trainer.world.rank != 0:
            return
        for channel in self._channels:
            if isinstance(channel, (Webhook, Email)):
                channel.check()
        self._begin_anew()
        record = None if trainer.fast_dev_run else Path(trainer.default_root_dir) / RECORD
        self._sender = Sender(self._channels, record)

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        stuck = [rule for rule in self._rules if rule.kind == "stuck"]
        if stuck and self._sender is not None:
            self._last_batch_s = time.monotonic()
            self._watcher = threading.Thread(
                target=self._watch, args=(trainer, stuck), name="footplate-alert-watcher", daemon=True
            )
            self._watcher.start()

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._last_batch_s = time.monotonic()
        if trainer.logs_this_step:
            self._check(trainer)

    def on_validation_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._last_batch_s = time.monotonic()

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if not trainer.sanity_checking:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._stop_watching()

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        self._stop_watching()
        if isinstance(exception, (KeyboardInterrupt, SystemExit)):
            return
        for rule in self._rules:
            if rule.kind == "failed":
                self._note(trainer, rule, True, _one_line(exception))

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._stop_watching()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(CLOSE_TIMEOUT_S)

    def _check(self, trainer: TrainerView) -> None:
        """Check the rules about metrics."""
        if self._sender is None:
            return
        metrics = trainer.latest_metrics()
        for rule in self._rules:
            if rule.kind == "nan" and rule.metric == "loss" and trainer.not_finite is not None:
                name, step = trainer.not_finite
                self._note(trainer, rule, True, f"{name} became NaN or infinite at step {step}", math.nan)
            elif rule.kind in ("nan", "bound") and rule.metric in metrics:
                value = metrics[rule.metric]
                self._note(trainer, rule, rule.holds(value), f"{rule.metric} is {value:.6g}", value)

    def _watch(self, trainer: TrainerView, rules: list[Rule]) -> None:
        """Check the time since the last batch, in a thread."""
        pause_s = min(LONGEST_WATCH_S, *(rule.limit / WATCHES_PER_LIMIT for rule in rules))
        while not self._ended.wait(pause_s):
            waited_s = time.monotonic() - self._last_batch_s
            for rule in rules:
                self._note(trainer, rule, waited_s > rule.limit, f"no batch has ended for {waited_s:.0f} s")

    def _stop_watching(self) -> None:
        self._ended.set()
        if self._watcher is not None:
            join(self._watcher, CLOSE_TIMEOUT_S, "an alert is being checked")
            self._watcher = None

    def _note(self, trainer: TrainerView, rule: Rule, holds: bool, fact: str, value: float | None = None) -> None:
        """Send a message if a rule holds that didn't hold before."""
        was = rule.text in self._holding
        if not holds:
            self._holding.discard(rule.text)
        now_s = time.monotonic()
        too_soon = now_s - self._sent_s.get(rule.text, -math.inf) < self._again_after_s
        if not holds or was or self._sender is None:
            return
        self._holding.add(rule.text)
        if not too_soon:
            self._sent_s[rule.text] = now_s
            self._sender.put(_message(trainer, rule, fact, value))


def _one_line(exception: BaseException) -> str:
    text = " ".join(f"{type(exception).__name__}: {exception}".split())
    return without_credentials(text)[:500]


def _message(trainer: TrainerView, rule: Rule, fact: str, value: float | None) -> AlertMessage:
    run = Path(trainer.default_root_dir).name
    job = os.environ.get("FOOTPLATE_JOB_NAME") if "FOOTPLATE_JOB_ID" in os.environ else None
    attempt = int(os.environ.get("FOOTPLATE_JOB_ATTEMPT", 1)) if job else 1
    host = socket.gethostname()
    where = f"job {job}, attempt {attempt}" if job else f"run {run}"
    return AlertMessage(
        rule=rule.text,
        text=f"{rule.text}: {where} on {host}, step {trainer.global_step}, epoch {trainer.current_epoch}: {fact}.",
        run=run, job=job, attempt=attempt, host=host,
        step=trainer.global_step, epoch=trainer.current_epoch, value=value, time_s=time.time(),
    )  # fmt: skip
