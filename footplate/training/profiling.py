"""What a profiler is told of a run (`Trainer(profiler=…)`), under the names that Lightning gives to actions.

    run_training_epoch                              an epoch
    run_training_batch                              a step of the trainer: forward, backward, optimizer
    [_TrainingEpochLoop].train_dataloader_next      waiting for a batch; [_EvaluationLoop].val_next, …
    [Strategy]Strategy.training_step                your step function, with the name of the strategy; likewise backward
    [LightningModule]Classifier.optimizer_step      the optimizer's step
    [LightningModule]Classifier.on_fit_start        a hook of the module; [LightningDataModule]… and [Callback]… likewise

Functions are wrapped when a run is put together, and only where there is a profiler: without one, nothing is looked up. A
profiler is an object with `start(action)` and `stop(action)`, such as Lightning's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import proxy

from footplate.core.errors import ConfigError, MissingExtra
from footplate.distributed.uneven_loaders import close

if TYPE_CHECKING:
    from footplate.training.run import Run

NAMED = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler", "xla": "XLAProfiler"}

Profile = Callable[[str], contextlib.AbstractContextManager[Any]]

_END = object()


class NoProfiler:
    """What `trainer.profiler` is without one, so that a module may call `self.trainer.profiler.profile("…")`."""

    def profile(self, action_name: str) -> contextlib.AbstractContextManager[Any]:
        """A context in which nothing is recorded."""
        return contextlib.nullcontext()


def make_profiler(given: Any) -> Any:
    """The profiler that `Trainer(profiler=…)` stands for.

    Raises:
        ConfigError: an unknown name, or an object that can't record.
        MissingExtra: a name of Lightning's, which isn't installed.
    """
    if given is None:
        return NoProfiler()
    if isinstance(given, str):
        name = NAMED.get(given.lower())
        if name is None:
            raise ConfigError(f'profiler="{given}": expected one of {", ".join(NAMED)}, or a profiler object.')
        for home in ("lightning.pytorch.profilers", "pytorch_lightning.profilers"):
            with contextlib.suppress(ImportError):
                return getattr(importlib.import_module(home), name)()
        raise MissingExtra(
            f"profiler=\"{given}\" is Lightning's {name}, and Lightning isn't installed: pip install lightning."
        )
    if isinstance(given, type) or not all(callable(getattr(given, name, None)) for name in ("start", "stop")):
        raise ConfigError(f"profiler={given!r}: expected an object with start(action) and stop(action), or a name.")
    return given


def recorder(profiler: Any) -> Profile | None:
    """The context in which a profiler records an action; None without a profiler."""
    if isinstance(profiler, NoProfiler):
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
    """A call of the trainer: what a profiler wants to know before, and its report afterwards."""
    profiler = run.profiler
    if isinstance(profiler, NoProfiler):
        yield
        return
    if hasattr(profiler, "_lightning_module"):
        profiler._lightning_module = proxy(run.module)  # PyTorchProfiler asks it for its trainer and its layers
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
    """A function whose every call is recorded."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with profile(action):
            return function(*args, **kwargs)

    return call


def profile_step(run: Run, profile: Profile) -> None:
    """Record what a run's step does: the whole, and of an eager step its parts too."""
    step, kind, module = run.step, type(run.parallel).__name__, type(run.module).__name__
    evaluate = step.evaluate
    step.train = profiled(step.train, profile, "run_training_batch")  # type: ignore[method-assign]

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
    """The same batches; waiting for each is recorded."""
    try:
        while True:
            with profile(action):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
    finally:
        close(batches)
