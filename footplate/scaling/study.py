"""`scale`: run the same training at several sizes, one after the other, and summarise the results.

    for each repeat:  for each size:  launch the function in that number of processes, take the results of rank 0

Repeats are interleaved, so that changes on the machine during a study affect all sizes. Every training starts from a warm
fork server. A training that fails isn't started again; the table shows it as failed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from footplate.scaling.findings import core_notes, read
from footplate.scaling.learning_rates import Rate, Rule, check_rule
from footplate.scaling.results import Setup, Study, Training, summarise
from footplate.scaling.training_task import Outcome, TrainingTask, check_unpickles

log = logging.getLogger(__name__)

ONCE = Restarts(max_restarts=0, max_host_restarts=0)
PRELOAD = ("footplate.training.trainer", "footplate.distributed.ddp", "torch._dynamo")
UNPACED = (
    "Each size had the training's own learning rate, because the code didn't call footplate.scaling.learning_rate."
)


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
    """Run the same training at several sizes, and compare time, throughput, efficiency and loss.

    A `Trainer` inside the function needs no change: the study sets its learning rate and measures its time. Code without a
    trainer calls `footplate.scaling.learning_rate` for its rate, and returns `{"val_loss": …, "samples": …}`.

    Args:
        fn: the training, from its beginning to its own stopping criterion. Each process calls it without arguments.
        np: the sizes: numbers of processes.
        backend: the backend that runs the processes: "local", "ray", "spark", or an object of your own. A size may have
            more processes than this machine has cores; the result then says so.
        resources: the resources of each worker, in the terms of the backend.
        repeat: the number of trainings of each size.
        lr_rule: the growth of the learning rate with n processes: "linear" (n times), "sqrt" (√n times), "none".
        lr: the rate of one process; None for the training's own rate.
        warmup: epochs in which the rate grows from that of one process; by default 1 for "linear", else 0.
        monitor: the metric that is the validation loss.
        output: a directory for table, JSON, chart and logs; by default a new one in `runs/`.
        experiment: the experiment in MLflow, where the study becomes a run with a child run for each training; None doesn't
            log it.

    Raises:
        ConfigError: an argument is invalid.
        MissingExtra: matplotlib, MLflow or the engine of the backend isn't installed.
        LaunchError: the function can't be sent to workers, or this process is itself a worker.

    Examples:
        >>> def training():
        ...     from footplate.scaling import learning_rate
        ...     lr = learning_rate(0.1)  # grows with the number of processes
        ...     return {"val_loss": 0.5, "samples": 64}  # a function with a Trainer returns nothing
        >>> study = fp.scale(training, np=[1, 2], output="runs/scaling", experiment=None)
    """
    sizes = check_sizes(np)
    check_repeat(repeat)
    rule, lr, warmup = check_rule(lr_rule, lr, warmup)
    refuse_inside("A scaling study")
    require("matplotlib.figure", "plot", "The chart of a scaling study")
    chosen = backends.named(backend, resources) if isinstance(backend, str) else backend
    logger = _logger(experiment)
    began = datetime.now()
    setup = Setup(
        getattr(fn, "name", None) or name_of(fn), sizes, chosen.name, repeat, rule, lr, warmup, monitor,
        _cores() if chosen.name == "local" else None, began.isoformat(timespec="seconds"),
    )  # fmt: skip
    directory = _directory(output, began)

    trainings, notes = _train_all(fn, setup, chosen, directory)
    summary = summarise(trainings, {size: setup.rate(size).factor for size in sizes})
    notes = (*core_notes(summary, setup.cores), *notes)
    study = Study(setup, trainings, summary, notes, read(summary, setup.monitor, setup.lr_rule), directory)
    report.write(study)
    if logger is not None:
        logger(study)
    return study


def check_sizes(np: Any) -> tuple[int, ...]:
    """Check the sizes of a study; returns each of them once, the smallest first.

    Raises:
        ConfigError: there are none, or one isn't a number of processes.
    """
    sizes = list(np) if isinstance(np, (list, tuple)) else [np]
    if not sizes:
        raise ConfigError("np=[]: expected numbers of processes, such as [1, 2, 4].")
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"np={size!r}: expected numbers of processes, each 1 or more, such as [1, 2, 4].")
    return tuple(sorted(set(sizes)))


def check_repeat(repeat: Any) -> None:
    """Check the number of repeats.

    Raises:
        ConfigError: it isn't a whole number of at least 1.
    """
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
        raise ConfigError(f"repeat={repeat!r}: expected a whole number, 1 or more.")


def _train_all(
    fn: Callable[[], Any], setup: Setup, backend: Backend, directory: Path
) -> tuple[tuple[Training, ...], tuple[str, ...]]:
    """Run all trainings; returns them with notes on missing figures.

    A size whose trainings have all failed isn't trained again.
    """
    # A function that can't be unpickled in a worker is an error of the study, not a failed training.
    task = TrainingTask(fn, 1, 0, Rate(), setup.monitor)
    _launch(functools.partial(check_unpickles, task), 1, backend, "study", None)

    trainings: list[Training] = []
    notes: dict[str, None] = {}
    for repeat, np in product(range(setup.repeat), setup.np):
        if repeat and all(training.failure for training in trainings if training.np == np):
            continue
        log.info("%s: training with np=%d, %d of %d …", setup.name, np, repeat + 1, setup.repeat)
        task = TrainingTask(fn, np, repeat, setup.rate(np), setup.monitor)
        training, note = _train(task, setup, backend, directory)
        trainings.append(training)
        notes.update(dict.fromkeys(filter(None, [note])))
        log.info("%s: np=%d %s", setup.name, np, training.failure or f"took {training.seconds:.1f} s")
    return tuple(trainings), tuple(notes)


def _train(task: TrainingTask, setup: Setup, backend: Backend, directory: Path) -> tuple[Training, str]:
    """Run one training; returns it with a note on missing figures."""
    logs = new_log_dir(directory / "logs", f"np-{task.np}")
    blank = Training(task.np, task.repeat, began_s=time.time())
    clock = time.monotonic()
    try:
        outcome = _launch(task, task.np, backend, f"np={task.np}", logs)
    except Exception as error:
        message = str(error).strip().splitlines()
        failure = f"{type(error).__name__}: {message[0] if message else 'without a message'}"
        return replace(blank, failure=failure, wall_s=time.monotonic() - clock), ""

    wall_s = time.monotonic() - clock
    if not isinstance(outcome, Outcome):
        return replace(blank, failure="rank 0 exited before its function returned", wall_s=wall_s), ""
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
    """Write a note on the figures that a training didn't report; empty if it reported all."""
    training = outcome.training
    own = "" if outcome.paced else f"{UNPACED} "
    if not outcome.trained and not outcome.returned:
        return (
            f"{own}Only the running time is known, because the function ran no Trainer and returned no figures. Let it "
            'return {"val_loss": …, "samples": …}.'
        )
    if training.loss is None and not training.diverged:
        where = did_you_mean(monitor, outcome.logged) if outcome.trained else 'Return it as "val_loss".'
        return f'{own}There is no validation loss: "{monitor}" was not logged. {where}'
    return own.rstrip()


def _logger(experiment: str | None) -> Callable[[Study], None] | None:
    """Make the logger to MLflow; None if the study isn't logged. This checks MLflow before the first training.

    Raises:
        MissingExtra: MLflow isn't installed.
    """
    if experiment is None:
        return None
    from footplate.scaling.record import Record

    return Record(experiment)


def _cores() -> int:
    from footplate.hardware.machine import usable_cores

    return max(1, int(usable_cores()))


def _directory(output: str | Path | None, began: datetime) -> Path:
    """Create the directory of the study.

    Raises:
        ConfigError: it can't be created.
    """
    directory = Path(output) if output is not None else Path("runs") / began.strftime("scaling-%Y%m%d-%H%M%S")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output={str(directory)!r}: this directory can't be created: {error}.") from error
    return directory
