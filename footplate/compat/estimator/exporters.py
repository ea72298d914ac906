"""Exporters: `train_and_evaluate` calls them after an evaluation, to write model files for serving.

    LatestExporter    after every evaluation; keeps the newest few files
    FinalExporter     once, when training has ended

Both write `model_dir/export/NAME/TIME/model.pt2`, which `torch.export.load(path).module()` runs anywhere. An exporter of
your own is a class with a `name` and an `export`. During training, the callback `Exporting` calls it: after an evaluation,
when the run has been saved, and before the next step. With several processes, only rank 0 calls exporters.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.callbacks import Callback, ModelCheckpoint
from footplate.checkpoint.storage import Place
from footplate.compat.estimator.spec import EvalSpec, evaluated
from footplate.core.errors import ConfigError
from footplate.distributed.world import World

if TYPE_CHECKING:
    from footplate.compat.estimator.estimator import Estimator


class Exporter(ABC):
    """Base class of exporters.

    Attributes:
        name: the exporter's directory in `model_dir/export`.

    Examples:
        >>> from footplate.compat.estimator import EvalSpec, Exporter, TrainSpec, train_and_evaluate
        >>> class PrintLoss(Exporter):
        ...     name = "loss"
        ...
        ...     def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        ...         print("step", eval_result["global_step"])
        >>> evaluation = EvalSpec(input_fn, exporters=PrintLoss())
        >>> metrics = train_and_evaluate(estimator, TrainSpec(input_fn, max_steps=16), evaluation)
        step 16
    """

    name: str

    @abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: Path,
        checkpoint_path: Place,
        eval_result: Mapping[str, float],
        is_the_final_export: bool,
    ) -> Path | None:
        """Write the model of a checkpoint, or do nothing.

        Args:
            estimator: its `export_saved_model` may be called.
            export_path: the exporter's directory, which may not exist yet.
            checkpoint_path: the checkpoint that was evaluated.
            eval_result: the result of the evaluation: `loss`, the metrics, `global_step`.
            is_the_final_export: True if training has ended.

        Returns:
            The file that was written; None for none.
        """


class FinalExporter(Exporter):
    """Exports once, when training has ended.

    Args:
        name: the exporter's directory in `model_dir/export`.
        serving_input_receiver_fn: see `Estimator.export_saved_model`.

    Examples:
        >>> from footplate.compat.estimator import EvalSpec, FinalExporter, TrainSpec, train_and_evaluate
        >>> exporter = FinalExporter("serving", lambda: torch.ones(2, 4))
        >>> metrics = train_and_evaluate(
        ...     estimator, TrainSpec(input_fn, max_steps=16), EvalSpec(input_fn, exporters=exporter)
        ... )
        >>> [path.name for path in estimator.run_dir.glob("export/serving/*/*")]
        ['model.pt2']
    """

    def __init__(self, name: str, serving_input_receiver_fn: Callable[[], Any]) -> None:
        self.name, self._receiver = _checked(name), serving_input_receiver_fn

    def export(
        self,
        estimator: Estimator,
        export_path: Path,
        checkpoint_path: Place,
        eval_result: Mapping[str, float],
        is_the_final_export: bool,
    ) -> Path | None:
        if not is_the_final_export:
            return None
        return estimator.export_saved_model(export_path, self._receiver, checkpoint_path)


class LatestExporter(Exporter):
    """Exports after every evaluation, and keeps the newest few exports.

    Args:
        name: the exporter's directory in `model_dir/export`.
        serving_input_receiver_fn: see `Estimator.export_saved_model`.
        exports_to_keep: the number of exports to keep; None keeps all.

    Examples:
        >>> from footplate.compat.estimator import EvalSpec, LatestExporter, TrainSpec, train_and_evaluate
        >>> exporter = LatestExporter("latest", lambda: torch.ones(2, 4), exports_to_keep=1)
        >>> metrics = train_and_evaluate(
        ...     estimator, TrainSpec(input_fn, max_steps=16), EvalSpec(input_fn, exporters=exporter)
        ... )
        >>> [path.name for path in estimator.run_dir.glob("export/latest/*/*")]
        ['model.pt2']
    """

    def __init__(
        self, name: str, serving_input_receiver_fn: Callable[[], Any], exports_to_keep: int | None = 5
    ) -> None:
        if exports_to_keep is not None and exports_to_keep < 1:
            raise ConfigError(
                f"LatestExporter(exports_to_keep={exports_to_keep}): expected 1 or more, or None for all."
            )
        self.name, self._receiver, self._most = _checked(name), serving_input_receiver_fn, exports_to_keep

    def export(
        self,
        estimator: Estimator,
        export_path: Path,
        checkpoint_path: Place,
        eval_result: Mapping[str, float],
        is_the_final_export: bool,
    ) -> Path | None:
        path = estimator.export_saved_model(export_path, self._receiver, checkpoint_path)
        if self._most is not None:
            exports = [directory for directory in export_path.iterdir() if directory.name.isdecimal()]
            for old in sorted(exports, key=lambda directory: int(directory.name))[: -self._most]:
                shutil.rmtree(old)
        return path


class Exporting(Callback):
    """Saves the run after an evaluation during training, unless it is saved, and calls the exporters.

    `train_and_evaluate` itself calls the exporters after the evaluation at the end.
    """

    order = 2
    sees_weights = False

    def __init__(self, estimator: Estimator, exporters: Sequence[Exporter], saver: ModelCheckpoint) -> None:
        self._estimator, self._exporters, self._saver = estimator, exporters, saver

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking or trainer.global_step >= trainer.max_steps:
            return
        path = self._saver.save_now(trainer)
        trainer.wait_for_save()
        if path is not None:
            metrics = evaluated(trainer.latest_metrics()) | {"global_step": trainer.global_step}
            export_all(self._exporters, self._estimator, path, metrics)


def exporters_of(spec: EvalSpec) -> tuple[Exporter, ...]:
    """The exporters of an evaluation.

    Raises:
        ConfigError: two exporters have one name, and so one directory.
    """
    exporters = (spec.exporters,) if isinstance(spec.exporters, Exporter) else tuple(spec.exporters)
    names = [exporter.name for exporter in exporters]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"EvalSpec(exporters=…): the names are {', '.join(names)}. Give each exporter its own, which is its directory."
        )
    return exporters


def export_all(
    exporters: Sequence[Exporter], estimator: Estimator, path: Place, metrics: Mapping[str, float], final: bool = False
) -> None:
    """Call all exporters for a checkpoint, on rank 0."""
    if World.from_environ().rank == 0:
        for exporter in exporters:
            exporter.export(estimator, estimator.run_dir / "export" / exporter.name, path, metrics, final)


def _checked(name: str) -> str:
    if not name or Path(name).name != name:
        raise ConfigError(f'name="{name}": expected the name of a directory for exports, without slashes.')
    return name
