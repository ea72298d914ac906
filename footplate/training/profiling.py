"""Actions of a run that one of Lightning's profilers records (`Trainer(profiler=…)`), under Lightning's names.

Footplate's own profiler records ranges of steps; see `training/profiler/`.

    run_training_epoch                              an epoch
    run_training_batch                              a step of the trainer: forward, backward, optimizer
    [_TrainingEpochLoop].train_dataloader_next      waiting for a batch; also [_EvaluationLoop].val_next, …
    [Strategy]Strategy.training_step                your step function, with the name of the strategy; also .backward
    [LightningModule]Classifier.optimizer_step      the optimizer's step
    [LightningModule]Classifier.on_fit_start        a hook of the module; also [LightningDataModule]… and [Callback]…

Functions are wrapped when a run is set up, and only with a profiler. Without it, a step has no overhead. A profiler is an
object with `start(action)` and `stop(action)`, such as Lightning's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from footplate.core.adapters import adapter_of, all_adapters
from footplate.core.errors import ConfigError
from footplate.distributed.uneven_loaders import close
from footplate.training.profiler.settings import Profiler

if TYPE_CHECKING:
    from footplate.training.run import Run

Profile = Callable[[str], contextlib.AbstractContextManager[Any]]

_END = object()


class NoProfiler:
    """The profiler of a trainer without one, so that a module may call `self.trainer.profiler.profile("…")`.

    Args:
        final: no step is profiled, not even by `footplate run --profile`. For trainings that aren't the user's own.
    """

    def __init__(self, final: bool = False) -> None:
        self.final = final

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that records nothing."""
        return contextlib.nullcontext()


def make_profiler(argument: Any) -> Any:
    """Return the profiler for an argument `profiler`.

    Raises:
        ConfigError: an unknown name, or an object that can't record.
        MissingExtra: the name of a profiler of a library that isn't installed.
    """
    if argument is None:
        return NoProfiler()
    if isinstance(argument, (NoProfiler, Profiler)):
        return argument
    if isinstance(argument, str):
        makers = {name: adapter for adapter in all_adapters() for name in adapter.profilers}
        if argument.lower() == "torch":
            return Profiler()
        adapter = makers.get(argument.lower())
        if adapter is None:
            names = ", ".join(["torch", *makers])
            raise ConfigError(f'profiler="{argument}": expected one of {names}, or a profiler object.')
        return adapter.make_profiler(argument.lower())
    if isinstance(argument, type) or not all(callable(getattr(argument, name, None)) for name in ("start", "stop")):
        raise ConfigError(f"profiler={argument!r}: expected an object with start(action) and stop(action), or a name.")
    return argument


def recorder(profiler: Any) -> Profile | None:
    """Return the context in which a profiler records an action. None without a profiler that records actions."""
    if isinstance(profiler, (NoProfiler, Profiler)):
        return None
    own = getattr(profiler, "profile", None)
    return own if own is not None else functools.partial(_recording, profiler)


@contextlib.contextmanager
def _recording(profiler: Any, action: str) -> Iterator[None]:
    profiler.start(action)
    try:
        yield
    finally:
        profiler.stop(action)


@contextlib.contextmanager
def profiling(run: Run, stage: str) -> Iterator[None]:
    """Set up a profiler for a call of the trainer, and print its report at the end."""
    profiler = run.profiler
    if recorder(profiler) is None:
        yield
        return
    if (adapter := adapter_of(profiler)) is not None:
        adapter.attach_profiler(profiler, run.module)
    rank = run.world.local_rank if run.world.size > 1 else None
    if hasattr(profiler, "setup"):
        profiler.setup(stage=stage, local_rank=rank, log_dir=str(run.run_dir))
    try:
        yield
    finally:
        for name, arguments in (("describe", ()), ("teardown", (stage,))):
            if hasattr(profiler, name):
                getattr(profiler, name)(*arguments)


def profiled(function: Callable[..., Any], profile: Profile, action: str) -> Callable[..., Any]:
    """Return a function whose every call is recorded."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with profile(action):
            return function(*args, **kwargs)

    return call


def profiled_outputs(
    train: Callable[..., Iterator[Any]], profile: Profile, action: str
) -> Callable[..., Iterator[Any]]:
    """Return a `Step.train` that is a generator, and record each of its outputs: it trains when one is asked for."""

    @functools.wraps(train)
    def call(batches: Sequence[Any], *args: Any) -> Iterator[Any]:
        outputs = train(batches, *args)
        for _ in batches:
            with profile(action):
                output = next(outputs)
            yield output
        yield from outputs

    return call


def profile_step(run: Run, profile: Profile) -> None:
    """Record a run's step: the whole, and the parts of an eager step.

    Its methods stay replaced, since each call of the trainer builds a step of its own. Nothing of the user's is replaced.
    """
    step, kind, module = run.step, type(run.parallel).__name__, type(run.module).__name__
    evaluate = step.evaluate
    recorded = profiled_outputs if inspect.isgeneratorfunction(step.train) else profiled
    step.train = recorded(step.train, profile, "run_training_batch")  # type: ignore[method-assign]

    def evaluated(stage: str, *args: Any) -> Any:
        with profile(f"[Strategy]{kind}.{stage}_step"):
            return evaluate(stage, *args)

    step.evaluate = evaluated  # type: ignore[method-assign]
    parts = {
        "forward": f"[Strategy]{kind}.training_step",
        "backpropagate": f"[Strategy]{kind}.backward",
        "end_window": f"[LightningModule]{module}.optimizer_step",
    }
    for name, action in parts.items():
        if hasattr(step, name):
            setattr(step, name, profiled(getattr(step, name), profile, action))
    if hasattr(step, "show_phases"):
        step.show_phases()  # type: ignore[attr-defined]


def profiled_batches(batches: Iterator[Any], profile: Profile, action: str) -> Iterator[Any]:
    """Return the same batches, and record the wait for each."""
    try:
        while True:
            with profile(action):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
    finally:
        close(batches)
