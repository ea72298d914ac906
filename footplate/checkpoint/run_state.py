"""The run state: everything that exact resume needs, in one place.

`RunState` collects the parts of a run that change during training. It turns them into one nested dict of plain values and
tensors, and back. The keys are Lightning's where Lightning has one. The order of the data and the draws of dropout are not
in it, because they are pure functions of the state (see `footplate.core.rng`).
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from footplate.checkpoint.frozen_weights import FROZEN_WEIGHTS, FrozenWeights
from footplate.checkpoint.metric_states import restore, states_of
from footplate.checkpoint.optimizer_settings import Settings, keep_own_settings
from footplate.checkpoint.step_history import Position, StepHistory
from footplate.core import rng
from footplate.core.errors import CheckpointError
from footplate.core.hooks import overrides
from footplate.core.hparams import to_state
from footplate.core.version import __version__
from footplate.data.adapters.training_combination import rewound
from footplate.step.optimizers import SchedulerConfig

log = logging.getLogger(__name__)

FORMAT = 1
# The version of Lightning whose keys the state uses. Its load_from_checkpoint requires the version.
LIGHTNING = "2.6.6"


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        epoch: complete epochs.
        batch_idx: trained batches of the epoch in progress.
        batches: trained batches since the beginning.
        global_step: optimizer steps since the beginning.
        validated_at: `batches` when validation last finished, so that a resumed run neither repeats nor skips one.
        unvalidated_s: seconds since that validation, if validation is scheduled by time.
        epoch_ended: the end of the epoch has been processed, except for saving.
        ended_at: `batches` when the end of an epoch was last processed, including an epoch that was stopped early.
        seconds: training time of this attempt and all earlier ones.
    """

    epoch: int = 0
    batch_idx: int = 0
    batches: int = 0
    global_step: int = 0
    validated_at: int = -1
    unvalidated_s: float = 0.0
    epoch_ended: bool = False
    ended_at: int = -1
    seconds: float = 0.0

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a saved `asdict(progress)`."""
        for name, value in saved.items():
            setattr(self, name, value)
        if self.epoch_ended:
            self.next_epoch()

    @property
    def position(self) -> Position:
        """The position in the history of steps. After the end of an epoch, it is the beginning of the next one."""
        if self.epoch_ended:
            return Position(self.epoch + 1, 0, self.batches, self.global_step)
        return Position(self.epoch, self.batch_idx, self.batches, self.global_step)

    def next_epoch(self) -> None:
        """Advance from the end of one epoch to the beginning of the next."""
        self.epoch, self.batch_idx, self.epoch_ended = self.epoch + 1, 0, False


@dataclass
class RunState:
    """The parts of one run. Each part has `state_dict` and `load_state_dict`, or is a plain value."""

    module: Any
    seed: int
    progress: Progress = field(default_factory=Progress)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    step: Any = None
    metrics: Any = None
    callbacks: list[Any] = field(default_factory=list)
    loggers: list[Any] = field(default_factory=list)
    loader: Any = None
    datamodule: Any = None
    steps: StepHistory = field(default_factory=StepHistory)
    callback_metrics: dict[str, float] = field(default_factory=dict)
    # The parameter groups of each optimizer, as they were configured.
    optimizer_settings: list[Settings] = field(default_factory=list)
    # The states of torchmetrics objects, if they were collected earlier. See `Trainer.keep_collected`.
    collected: dict[str, Any] | None = None
    # Given if checkpoints leave out frozen weights.
    frozen_weights: FrozenWeights | None = None

    def state_dict(self, weights_only: bool = False) -> dict[str, Any]:
        """Collect the state. Its tensors are the live ones: copy them before the next step."""
        # The current weights may be in a copy on the device.
        step: Any = self.step
        if step is not None:
            step.fetch_weights()

        state: dict[str, Any] = {
            "footplate": {"format": FORMAT, "footplate": __version__, "torch": str(torch.__version__)},
            "pytorch-lightning_version": LIGHTNING,
            "module": f"{type(self.module).__module__}.{type(self.module).__qualname__}",
            "epoch": self.progress.epoch,
            "global_step": self.progress.global_step,
            "state_dict": dict(self.module.state_dict()),
            **to_state(self.module),
        }
        if self.datamodule is not None and getattr(self.datamodule, "hparams", None):
            state |= to_state(self.datamodule, "datamodule_")
        if weights_only:
            return state

        state |= {
            "seed": self.seed,
            "progress": asdict(self.progress),
            **_switches(self.module),
            "optimizers": [type(optimizer).__qualname__ for optimizer in self.optimizers],
            "optimizer_states": [optimizer.state_dict() for optimizer in self.optimizers],
            "optimizer_settings": self.optimizer_settings,
            "lr_schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "step": self.step.state_dict(),
            "metrics": (logged := self.metrics.state_dict()),
            "torchmetrics": self._collected(logged),
            "callback_metrics": dict(self.callback_metrics),
            "callbacks": {key: part.state_dict() for key, part in keyed(self.callbacks)},
            "loggers": {key: part.state_dict() for key, part in keyed(self.loggers) if hasattr(part, "state_dict")},
            "loader": self.position(),
            "steps": self.steps.state_dict(),
            "datamodule": self.datamodule.state_dict() if self.datamodule is not None else {},
            "rng": rng.capture(self.step.spec.device),
        }
        return state

    def _collected(self, logged: dict[str, Any] | list[Any]) -> dict[str, Any]:
        """The states of torchmetrics objects, except for logged objects: their states are in `metrics`."""
        # Logical ranks log no torchmetrics objects.
        if isinstance(logged, list):
            return {}
        states = states_of(self.module) if self.collected is None else self.collected
        logged_paths = {entry["metric"] for entry in logged.values()}
        return {path: state for path, state in states.items() if path not in logged_paths}

    def position(self) -> dict[str, Any]:
        """The position from which the loader continues.

        If a batch was delivered but not trained on, because of a failure, the position is before that batch.

        Raises:
            CheckpointError: there is such a batch, and the loader keeps its own position and can't go back.
        """
        position = self.loader.state_dict()
        trained = self.progress.batch_idx
        if position.get("epoch") != self.progress.epoch or position.get("batch", 0) <= trained:
            return position

        if "parts" in position:
            return rewound(position, trained)
        if "own" in position:
            raise CheckpointError(
                f"{type(self.loader.loader).__name__} delivered a batch that was not trained on, and can't go back to "
                "it."
            )
        return {**position, "batch": trained}

    def load_module(self, state: dict[str, Any], source: str) -> None:
        """Load the weights into the module.

        Raises:
            CheckpointError: the names or shapes belong to another model.
        """
        strict = bool(getattr(self.module, "strict_loading", True))
        load_weights(self.module, state, source, strict)

    def load_training(
        self, state: dict[str, Any], source: str, begins_with: list[SchedulerConfig] | None = None
    ) -> None:
        """Load everything except the weights, callbacks and loggers: the other three methods load these.

        A state from another library (see `core/foreign_checkpoints.py`) lacks some parts, which start fresh.

        Args:
            state: the checkpoint's state.
            source: its name, for messages.
            begins_with: the schedulers of a training that begins from the checkpoint of another one, with hyperparameters
                of its own (`optimizer_settings.py`). None for a run that continues.

        Raises:
            CheckpointError: the state holds weights only, or belongs to other optimizers, schedulers or data.
        """
        if "progress" not in state or "optimizer_states" not in state:
            raise CheckpointError(
                f"{source} holds weights but no training state, so training can't continue from it. "
                f"Load the weights with {type(self.module).__name__}.load_from_checkpoint(...) and start a new run."
            )

        current = [type(optimizer).__qualname__ for optimizer in self.optimizers]
        if current != state.get("optimizers", current):
            raise CheckpointError(
                f"{source} was made with {', '.join(state['optimizers']) or 'no optimizer'}; configure_optimizers() now "
                f"returns {', '.join(current) or 'none'}. Use the same to resume."
            )
        self.seed = state.get("seed", self.seed)
        self.progress.load(state["progress"])
        for name, parts, saved in (
            ("optimizer", self.optimizers, state["optimizer_states"]),
            ("learning-rate scheduler", self.schedulers, state["lr_schedulers"]),
        ):
            if len(parts) != len(saved):
                raise CheckpointError(
                    f"{source} was made with {len(saved)} {name}(s); configure_optimizers() now returns {len(parts)}."
                )
            if name == "optimizer" or begins_with is None:
                for part, part_state in zip(parts, saved, strict=True):
                    _load_part(part, part_state, f"{source}: the state of {type(part).__name__}")
        if begins_with is None:
            self.optimizer_settings = state.get("optimizer_settings", self.optimizer_settings)
        else:
            steps = [self._steps_of(config) for config in begins_with]
            keep_own_settings(state, source, self.optimizers, self.optimizer_settings, begins_with, steps)

        self.steps.load_state_dict(state.get("steps", {}))
        _set_switches(self.module, state, source)
        self.step.load_state_dict(state["step"])
        if self.progress.batch_idx and "metrics" in state:
            self.metrics.load_state_dict(state["metrics"])
        restore(self.module, state.get("torchmetrics", {}))

        self.callback_metrics.clear()
        self.callback_metrics.update(state.get("callback_metrics", {}))
        if "loader" in state:
            self.loader.load_state_dict(state["loader"])
        elif "position" in state:
            # The position of another library's loader. This loader fills in the rest.
            self.loader.load_state_dict({**self.loader.state_dict(), **state["position"]})

        # Lightning's files keep the data module's state under the name of its class.
        saved = state.get("datamodule", state.get(type(self.datamodule).__qualname__))
        if self.datamodule is not None and saved:
            self.datamodule.load_state_dict(saved)

    def _steps_of(self, config: SchedulerConfig) -> int | None:
        """The steps that a scheduler has made by now; None if the module makes them."""
        if not self.module.automatic_optimization or overrides(self.module, "lr_scheduler_step"):
            return None
        done = self.progress.global_step if config.interval == "step" else self.progress.epoch
        return done // config.frequency

    def load_callbacks(self, state: dict[str, Any], but: tuple[type, ...] = ()) -> None:
        """Load the callbacks' states, but not of callbacks of some types. A callback without a state starts fresh."""
        for key, callback in keyed(self.callbacks):
            if state.get("callbacks", {}).get(key) and not isinstance(callback, but):
                callback.load_state_dict(state["callbacks"][key])

    def load_loggers(self, state: dict[str, Any]) -> None:
        """Load the loggers' states, so that they continue their runs."""
        for key, logger in keyed(self.loggers):
            if state.get("loggers", {}).get(key) and hasattr(logger, "load_state_dict"):
                logger.load_state_dict(state["loggers"][key])


def _switches(module: torch.nn.Module) -> dict[str, list[str]]:
    """Settings that hooks may change: frozen parameters, and layers in evaluation mode during training."""
    switches = {"frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad]}
    if module.training:
        switches["in_evaluation_mode"] = [name for name, layer in module.named_modules() if not layer.training]
    return switches


def _set_switches(module: torch.nn.Module, state: dict[str, Any], source: str) -> None:
    changed = []
    if "frozen" in state:
        frozen = set(state["frozen"])
        for name, parameter in module.named_parameters():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad = name not in frozen
                changed.append(name)
    if "in_evaluation_mode" in state and module.training:
        evaluating = set(state["in_evaluation_mode"])
        for name, layer in module.named_modules():
            if layer.training == (name in evaluating):
                layer.training = name not in evaluating
                changed.append(name)
    if changed:
        log.warning(
            "%s has other frozen parameters, or other layers in evaluation mode, than the module: %s. They were set as in "
            "the checkpoint, so that training continues without a change.",
            source,
            ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else ""),
        )


def describe(state: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The marker of a checkpoint: a description of its state. See `footplate.checkpoint`."""
    return {
        **state["footplate"],
        "module": state["module"],
        "epoch": progress.epoch,
        "global_step": progress.global_step,
        "batches": progress.batches,
        "weights_only": "progress" not in state,
    }


def keyed(parts: list[Any]) -> list[tuple[str, Any]]:
    """Pair each part with a key that is the same in the next attempt: its `state_key` or type, numbered if repeated."""
    counts: dict[str, int] = {}
    result = []
    for part in parts:
        key = str(getattr(part, "state_key", type(part).__qualname__))
        counts[key] = counts.get(key, 0) + 1
        result.append((key if counts[key] == 1 else f"{key}#{counts[key]}", part))
    return result


def load_weights(module: Any, state: dict[str, Any], source: str, strict: bool) -> None:
    """Load the weights of a checkpoint's state, after a check that they belong to this model.

    Args:
        module: the model.
        state: the state. Frozen weights that the checkpoint was saved without are filled in, as far as they can be loaded.
        source: the name of the checkpoint, for messages.
        strict: refuse names that are missing or unknown.

    Raises:
        CheckpointError: names are missing or unknown, or shapes differ. The module is unchanged.
    """
    weights, left_out = state["state_dict"], state.get(FROZEN_WEIGHTS, {}).keys()
    current = module.state_dict()
    missing = sorted(current.keys() - weights.keys() - left_out) if strict else []
    unknown = sorted(weights.keys() - current.keys()) if strict else []
    shapes = [
        f"{name} ({tuple(weights[name].shape)} in the checkpoint, {tuple(current[name].shape)} in the module)"
        for name in current.keys() & weights.keys()
        if isinstance(current[name], torch.Tensor) and current[name].shape != weights[name].shape
    ]
    faults = [
        f"{label} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for label, names in (("it lacks", missing), ("it has unknown", unknown), ("shapes differ:", shapes))
        if names
    ]
    if faults:
        of = f", made by {state['module']}," if state.get("module") else ""
        raise CheckpointError(
            f"{source}{of} is not a checkpoint of this {type(module).__name__}: {'; '.join(faults)}. "
            "Build the model with the arguments it was trained with, or load another checkpoint."
        )
    try:
        module.load_state_dict(weights, strict=strict and not left_out)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{source}: this {type(module).__name__} can't load the weights that it has saved ({reason[:300]} …). 4-bit "
            "weights of bitsandbytes are such weights: train with save_frozen_weights=False."
        ) from error


def _load_part(part: Any, state: Any, name: str) -> None:
    try:
        part.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{name} does not fit: {error}") from error
