"""Lightning's command line with our trainer. Change one line of your program:

    from footplate.compat.lightning.cli import LightningCLI      # was: from lightning.pytorch.cli import LightningCLI

Lightning's own `LightningCLI` refuses a trainer that doesn't inherit from Lightning's. This one takes `footplate.Trainer`,
a subclass, or a function that returns a trainer. `trainer.callbacks` and `trainer.logger` of a configuration may name
Lightning's classes or ours, and `trainer.profiler` a profiler of Lightning's.
"""

from __future__ import annotations

import inspect
from typing import Any

from jsonargparse.typing import class_from_function
from lightning.pytorch import Callback as LightningsCallback
from lightning.pytorch import cli
from lightning.pytorch.loggers import Logger as LightningsLogger
from lightning.pytorch.profilers import Profiler

from footplate.callbacks import Callback
from footplate.tracking.base import Logger
from footplate.training.argument_checks import as_list
from footplate.training.trainer import Trainer

CALLBACK = LightningsCallback | Callback
LOGGER = LightningsLogger | Logger


class Parser(cli.LightningArgumentParser):
    """Lightning's parser, which also adds our trainer's arguments."""

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a class, or of a function that returns its objects."""
        kind = lightning_class if isinstance(lightning_class, type) else class_from_function(lightning_class)
        if not issubclass(kind, Trainer):
            return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, required)
        return self.add_class_arguments(
            _annotated(kind), nested_key, fail_untyped=False, instantiate=False, sub_configs=True
        )


class LightningCLI(cli.LightningCLI):
    """Lightning's `LightningCLI`; `trainer_class` is `footplate.Trainer` by default.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from footplate.compat.lightning.cli import LightningCLI
        >>> class Net(pl.LightningModule):
        ...     def __init__(self, width: int = 4):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(width, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch[0]).square().mean()
        ...
        ...     def train_dataloader(self):
        ...         return train
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> words = ["fit", "--model.width=4", "--trainer.max_epochs=1"]
        >>> cli = LightningCLI(Net, seed_everything_default=False, args=words)
        >>> cli.trainer.global_step
        8
    """

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: Any = cli.SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Any = Trainer,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("parser_class", Parser)
        defaults = kwargs.get("trainer_defaults") or {}
        if "callbacks" in defaults:
            callbacks = [_instance(callback) for callback in as_list(defaults["callbacks"])]
            kwargs["trainer_defaults"] = {**defaults, "callbacks": callbacks}
        super().__init__(
            model_class, datamodule_class, save_config_callback, save_config_kwargs, trainer_class, **kwargs
        )


def _instance(callback: Any) -> Any:
    """A callback of `trainer_defaults`: an object, or `class_path` and `init_args` as in a configuration file."""
    return cli.instantiate_class((), callback) if isinstance(callback, dict) and "class_path" in callback else callback


def _annotated(kind: type[Trainer]) -> type[Trainer]:
    """A subclass of a trainer's class whose signature also accepts Lightning's callbacks, loggers and profilers."""
    types = {
        "callbacks": CALLBACK | list[CALLBACK] | None,
        "logger": bool | LOGGER | list[LOGGER] | None,
        "profiler": Profiler | str | None,
    }
    signature = inspect.signature(kind.__init__, eval_str=True)
    parameters = [
        parameter.replace(annotation=types.get(parameter.name, parameter.annotation))
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]

    def __init__(self: Any, **arguments: Any) -> None:
        kind.__init__(self, **arguments)

    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__init__": __init__, "__doc__": kind.__doc__, "__module__": kind.__module__})
