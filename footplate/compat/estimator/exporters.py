"""Exporters: what `train_and_evaluate` hands the model to once it has been evaluated, for those who serve it.

    LatestExporter    after every evaluation; the newest few files stay
    FinalExporter     once, when training has ended

Both write `model_dir/export/NAME/TIME/model.pt2`, which `torch.export.load(path).module()` runs anywhere. One of your own
is a class with a `name` and an `export`. While training goes on, a callback of the trainer calls it (`Exporting`): between
an evaluation and the next step, when the run has been saved; of several processes, in the first.
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
    """Base class.

    Attributes:
        name: its directory in `model_dir/export`.
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
        """Write the model of a checkpoint, or not.

        Args:
            estimator: whose `export_saved_model` may be called.
            export_path: its directory, which need not be there.
            checkpoint_path: what has been evaluated.
            eval_result: what was found: `loss`, the metrics, `global_step`.
            is_the_final_export: whether training has ended.

        Returns:
            What was written, if anything.
        """


class FinalExporter(Exporter):
    """Exports once, when training has ended.

    Args:
        name: its directory in `model_dir/export`.
        serving_input_receiver_fn: see `Estimator.export_saved_model`.
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
    """Exports after every evaluation, and deletes what it wrote before the newest few.

    Args:
        name: its directory in `model_dir/export`.
        serving_input_receiver_fn: see `Estimator.export_saved_model`.
        exports_to_keep: how many stay; None keeps all.
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
            times = sorted(
                (one for one in export_path.iterdir() if one.name.isdecimal()), key=lambda one: int(one.name)
            )
            for old in times[: -self._most]:
                shutil.rmtree(old)
        return path


class Exporting(Callback):
    """Between an evaluation on the way and the next step: saves the run, unless it is, and calls the exporters.

    What is evaluated when training ends is left to `train_and_evaluate`.
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
            found = evaluated(trainer.latest_metrics()) | {"global_step": trainer.global_step}
            export_all(self._exporters, self._estimator, path, found)


def exporters_of(spec: EvalSpec) -> tuple[Exporter, ...]:
    """The exporters of an evaluation, of which one alone may be given as it is.

    Raises:
        ConfigError: two have one name, and so one directory.
    """
    found = (spec.exporters,) if isinstance(spec.exporters, Exporter) else tuple(spec.exporters)
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"EvalSpec(exporters=…): names {', '.join(names)}: each needs one of its own, for its directory."
        )
    return found


def export_all(
    exporters: Sequence[Exporter], estimator: Estimator, path: Place, found: Mapping[str, float], final: bool = False
) -> None:
    """Hand a checkpoint to all exporters, in the first of several processes."""
    if World.from_environ().rank == 0:
        for one in exporters:
            one.export(estimator, estimator.run_dir / "export" / one.name, path, found, final)


def _checked(name: str) -> str:
    if not name or Path(name).name != name:
        raise ConfigError(f'name="{name}": expected the name of a directory, in which exports are put.')
    return name
