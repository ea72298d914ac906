"""`scale`: the same training at several sizes, one after the other, and what comes of it.

    for each repeat:  for each size:  launch the function in so many processes, note what rank 0 brings home

Repeats are interleaved, so that what changes on a machine in the course of a study meets all sizes alike. Every training
begins from a warm fork server, and is not started again when it fails: one that fails is in the table as failed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from footplate.core.errors import ConfigError, did_you_mean
from footplate.core.optional import require
from footplate.launch import backends
from footplate.launch.backends import Backend
from footplate.launch.pickling import name_of
from footplate.launch.policy import Restarts
from footplate.launch.runner import new_log_dir, refuse_inside
from footplate.launch.supervisor import launch
from footplate.scaling import report
from footplate.scaling.figures import Size, Training, summarise
from footplate.scaling.measured import Measured, Outcome, arrive
from footplate.scaling.rates import Rate, Rule, check_rule, factor
from footplate.scaling.reading import core_notes, read

log = logging.getLogger(__name__)

ONCE = Restarts(max_restarts=0, max_host_restarts=0)
PRELOAD = ("footplate.training.trainer", "footplate.distributed.ddp", "torch._dynamo")
UNPACED = "The learning rate was the training's own at each size: nothing asked for footplate.scaling.learning_rate."


@dataclass(frozen=True)
class Setup:
    """What was asked for.

    Attributes:
        name: of the function or script.
        np: the sizes, the smallest first.
        backend: its name.
        repeat: trainings of each size.
        lr_rule: how the learning rate grows with the size.
        lr: of one process; None for the training's own.
        warmup: of the learning rate, in epochs.
        monitor: the metric that is the validation loss.
        cores: of this machine, where the processes were on it; None elsewhere.
        date: when it began, in ISO 8601.
    """

    name: str
    np: tuple[int, ...]
    backend: str
    repeat: int
    lr_rule: Rule
    lr: float | None
    warmup: float
    monitor: str
    cores: int | None
    date: str

    def rate(self, np: int) -> Rate:
        """What the learning rate becomes with so many processes."""
        return Rate(factor(self.lr_rule, np), self.warmup, self.lr)


@dataclass(frozen=True)
class Study:
    """What a study found.

    Attributes:
        setup: what was asked for.
        trainings: in the order in which they were run.
        sizes: the smallest first.
        notes: what must be known to read the figures, in sentences.
        reading: what the figures say, in sentences.
        directory: where `scaling.json`, `scaling.md`, `scaling.png` and the logs are.
    """

    setup: Setup
    trainings: tuple[Training, ...]
    sizes: tuple[Size, ...]
    notes: tuple[str, ...]
    reading: str
    directory: Path

    @property
    def failed(self) -> bool:
        """Whether no training succeeded."""
        return not any(size.done for size in self.sizes)


def scale(
    fn: Callable[[], Any],
    np: Sequence[int] = (1, 2, 4),
    *,
    backend: str | Backend = "local",
    resources: Mapping[str, Any] | None = None,
    repeat: int = 3,
    lr_rule: Rule = "linear",
    lr: float | None = None,
    warmup: float | None = None,
    monitor: str = "val_loss",
    output: str | Path | None = None,
    experiment: str | None = "scaling",
) -> Study:
    """Run the same training at several sizes, and write down what adding devices brings.

    A `Trainer` inside the function needs no change: the study sets its learning rate and takes its time. Code without one
    asks for its rate (`footplate.scaling.learning_rate`) and returns `{"val_loss": …, "samples": …}`.

    Args:
        fn: the training, from its beginning to its own stopping criterion; called without arguments in each process.
        np: the sizes: numbers of processes.
        backend: where they are: "local", "ray", "spark", or an object of your own. On this machine they may be more than
            the cores; the result then says so.
        resources: what each worker needs, in the words of the backend.
        repeat: how often each size is trained.
        lr_rule: how the learning rate grows with n processes: "linear" (n times), "sqrt" (√n times), "none".
        lr: the rate of one process; None for the training's own.
        warmup: epochs in which the rate grows from that of one process; by default 1 for "linear", else 0.
        monitor: the metric that is the validation loss.
        output: a directory for table, JSON, chart and logs; by default a new one in `runs/`.
        experiment: of MLflow, where the study becomes a run, with one for each training beneath it; None not to log it.

    Raises:
        ConfigError: a size, a rule or another argument that can't be.
        MissingExtra: matplotlib, MLflow or the engine of the backend is not installed.
        LaunchError: the function can't be sent to workers, or this process is itself one of several.
    """
    sizes = check_sizes(np)
    check_repeat(repeat)
    rule, lr, warmup = check_rule(lr_rule, lr, warmup)
    refuse_inside("A scaling study")
    require("matplotlib.figure", "plot", "The chart of a scaling study")
    made = backends.named(backend, resources) if isinstance(backend, str) else backend
    logger = _logger(experiment)
    began = datetime.now()
    setup = Setup(
        getattr(fn, "name", None) or name_of(fn), sizes, made.name, repeat, rule, lr, warmup, monitor,
        _cores() if made.name == "local" else None, began.isoformat(timespec="seconds"),
    )  # fmt: skip
    directory = _directory(output, began)
    trainings, notes = _train_all(fn, setup, made, directory)
    summary = summarise(trainings, {one: setup.rate(one).factor for one in sizes})
    notes = (*core_notes(summary, setup.cores), *notes)
    study = Study(setup, trainings, summary, notes, read(summary, setup.monitor, setup.lr_rule), directory)
    report.write(study)
    if logger is not None:
        logger(study)
    return study


def check_sizes(np: Any) -> tuple[int, ...]:
    """The sizes of a study, each once, the smallest first.

    Raises:
        ConfigError: none, or one that is no number of processes.
    """
    sizes = list(np) if isinstance(np, (list, tuple)) else [np]
    if not sizes:
        raise ConfigError("np=[]: expected numbers of processes, such as [1, 2, 4].")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"np={size!r}: expected numbers of processes, each 1 or more, such as [1, 2, 4].")
    return tuple(sorted(set(sizes)))


def check_repeat(repeat: Any) -> None:
    """See that this is a number of repeats.

    Raises:
        ConfigError: it isn't.
    """
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
        raise ConfigError(f"repeat={repeat!r}: expected a whole number, 1 or more.")


def _train_all(
    fn: Callable[[], Any], setup: Setup, backend: Backend, directory: Path
) -> tuple[tuple[Training, ...], tuple[str, ...]]:
    """All trainings, and notes on what they didn't tell.

    A size whose first training fails is not trained again.
    """
    _launch(functools.partial(arrive, Measured(fn, 1, 0, Rate(), setup.monitor)), 1, backend, "study", None)
    trainings: list[Training] = []
    notes: dict[str, None] = {}
    for repeat, np in product(range(setup.repeat), setup.np):
        if repeat and all(one.failure for one in trainings if one.np == np):
            continue
        log.info("%s: training with np=%d, %d of %d …", setup.name, np, repeat + 1, setup.repeat)
        training, note = _train(Measured(fn, np, repeat, setup.rate(np), setup.monitor), setup, backend, directory)
        trainings.append(training)
        notes.update(dict.fromkeys(filter(None, [note])))
        log.info("%s: np=%d %s", setup.name, np, training.failure or f"took {training.seconds:.1f} s")
    return tuple(trainings), tuple(notes)


def _train(measured: Measured, setup: Setup, backend: Backend, directory: Path) -> tuple[Training, str]:
    logs = new_log_dir(directory / "logs", f"np-{measured.np}")
    blank = Training(measured.np, measured.repeat, began_s=time.time())
    clock = time.monotonic()
    try:
        outcome = _launch(measured, measured.np, backend, f"np={measured.np}", logs)
    except Exception as error:
        failed = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'without a word'}"
        )
        return replace(blank, failure=failed, wall_s=time.monotonic() - clock), ""
    wall_s = time.monotonic() - clock
    if not isinstance(outcome, Outcome):
        return replace(blank, failure="rank 0 ended before its function had returned", wall_s=wall_s), ""
    return replace(outcome.training, began_s=blank.began_s, wall_s=wall_s), _missing(outcome, setup.monitor)


def _launch(fn: Callable[[], Any], np: int, backend: Backend, name: str, logs: Path | None) -> Any:
    return launch(
        fn,
        world_size=np,
        backend=backend,
        restarts=ONCE,
        name=name,
        log_dir=logs,
        show="log_callback_only",
        preload=PRELOAD,
    )


def _missing(outcome: Outcome, monitor: str) -> str:
    """What is to be said of a training that didn't tell all; empty when it did."""
    training = outcome.training
    own = "" if outcome.paced else f"{UNPACED} "
    if not outcome.trained and not outcome.returned:
        return (
            f"{own}Only the running time is known: no Trainer was run, and no figures were returned. Let the function "
            'return {"val_loss": …, "samples": …}.'
        )
    if training.loss is None and not training.diverged:
        where = did_you_mean(monitor, outcome.logged) if outcome.trained else 'Return it as "val_loss".'
        return f'{own}There is no validation loss: "{monitor}" was not logged. {where}'
    return own.rstrip()


def _logger(experiment: str | None) -> Callable[[Study], None] | None:
    """What logs the study to MLflow, found before the first training; None when it is not to be logged.

    Raises:
        MissingExtra: MLflow is not installed.
    """
    if experiment is None:
        return None
    from footplate.scaling.record import Record

    return Record(experiment)


def _cores() -> int:
    from footplate.hardware.machine import usable_cores

    return max(1, int(usable_cores()))


def _directory(output: str | Path | None, began: datetime) -> Path:
    """The study's directory, made.

    Raises:
        ConfigError: it can't be made.
    """
    place = Path(output) if output is not None else Path("runs") / began.strftime("scaling-%Y%m%d-%H%M%S")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output={str(place)!r}: no directory can be made there: {error}.") from error
    return place
