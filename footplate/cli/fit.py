"""`footplate fit | validate | test | predict`: a trainer, a model and data from flags and configuration files.

If you know LightningCLI, these commands work the same way:

    footplate fit --config run.yaml --trainer.max_epochs 3 --model train.Net --model.lr 1e-3 \\
        --data TableDataModule --data.train lake/flowers --trainer.callbacks+=EarlyStopping \\
        --trainer.callbacks.monitor=val_loss

The order of events: parse → seed → construct trainer, model and data → run. When training begins, the whole resolved
configuration is written to the run's directory. It names that directory, so one command continues the run:
`footplate fit --config RUN/config.yaml --ckpt_path last`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.callbacks import Callback
from footplate.cli.variables import variable
from footplate.core.profile_requests import VARIABLE, StepRange

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from footplate.training.module import Module
    from footplate.training.trainer import Trainer


_WEIGHTS = 'load these weights first: "best", "last" or a path; by default the model keeps its initial weights'
_CHECKPOINT = {
    "fit": 'continue from this checkpoint; "last" is the newest one in the run\'s directory, if it has one',
    "validate": _WEIGHTS,
    "test": _WEIGHTS,
    "predict": _WEIGHTS,
}


def parser(name: str) -> ArgumentParser:
    """Make the parser of `fit`, `validate`, `test` or `predict`."""
    from footplate.cli.class_types import CALLBACKS, DATA, MODELS
    from footplate.cli.commands import COMMANDS
    from footplate.cli.fit_arguments import make_parser
    from footplate.training.config import TrainerConfig

    parser = make_parser(name, f"{COMMANDS[name].help.capitalize()}.")
    parser.add_argument("--config", action="config", help="a YAML file of these settings; flags win over it")
    parser.add_argument(
        "--seed_everything",
        type=bool | int,
        default=True,
        help="the seed of all randomness; true draws one and records it, false sets none",
    )
    if name == "fit":
        parser.add_argument(
            "--profile",
            metavar="FIRST:LAST",
            default=argparse.SUPPRESS,
            help="profile these steps, such as 10:20 for ten steps; no part of the saved configuration",
        )
    parser.add_argument("--ckpt_path", type=str | None, default=None, help=_CHECKPOINT[name])
    if name == "predict":
        parser.add_argument("--output", type=str, default="predictions", help="the directory of the Parquet table")
    for key, bases, example in (("model", MODELS, "train.Net"), ("data", DATA, "TableDataModule")):
        parser.add_subclass_arguments(
            bases,
            key,
            as_group=False,
            fail_untyped=False,
            required=key == "model",
            metavar="CLASS",
            help=f"a class, such as {example}, or a YAML file of it; its arguments follow as --{key}.NAME",
        )
    parser.add_class_arguments(TrainerConfig, "trainer", fail_untyped=False, instantiate=False, skip={"callbacks"})
    parser.add_argument("--trainer.callbacks", type=CALLBACKS, default=None, help="a callback or several")
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Run the command `name`; returns its exit code.

    Raises:
        FootplateError: a mistake in the arguments, the configuration or the data.
        SystemExit: 143, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    from footplate.cli.fit_arguments import instantiate, parse
    from footplate.core.rng import seed_everything

    # The user's modules are in the current directory. A trial has them as they were when its tuning was submitted.
    sys.path.insert(0, str(Path.cwd()))
    if code := os.environ.get("FOOTPLATE_TRIAL_CODE"):
        sys.path.insert(0, code)
    fit_parser = parser(name)
    config = parse(fit_parser, argv)

    # The seed that was drawn goes into the configuration, so that the saved one repeats the run.
    if config.seed_everything is not False:
        seed = None if config.seed_everything is True else config.seed_everything
        config.seed_everything = seed_everything(seed)

    objects = instantiate(fit_parser, config)
    if name == "fit":
        _fit(objects, fit_parser, config)
    else:
        _evaluate(name, objects)
    return 0


class SaveConfig(Callback):
    """Writes `config.yaml` when the run begins, over the file of an earlier attempt.

    Args:
        to_yaml: returns the text for a run in the given directory.

    Attributes:
        path: the file; None until it is written.
    """

    sees_weights = False

    def __init__(self, to_yaml: Callable[[Path], str]) -> None:
        self._to_yaml = to_yaml
        self.path: Path | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if not trainer.fast_dev_run and trainer.world.rank == 0:
            self.path = trainer.run_dir / "config.yaml"
            self.path.write_text(self._to_yaml(trainer.run_dir))


def _fit(objects: Namespace, fit_parser: ArgumentParser, config: Namespace) -> None:
    from footplate.training.argument_checks import as_list
    from footplate.training.trainer import Trainer

    # A continued or repeated run is not profiled again.
    steps = config.pop("profile", None)

    def to_yaml(run_dir: Path) -> str:
        config.trainer.default_root_dir = str(run_dir)
        return fit_parser.dump(config, skip_unset=False)

    save_config = SaveConfig(to_yaml)
    settings = vars(objects.trainer)
    trainer = Trainer(**{**settings, "callbacks": [*as_list(settings["callbacks"]), save_config]})
    try:
        with profiled(steps):
            trainer.fit(objects.model, datamodule=objects.data, ckpt_path=objects.ckpt_path)
    except (KeyboardInterrupt, SystemExit):
        if save_config.path is not None:
            config_path = shlex.quote(str(save_config.path))
            print(f"Continue with: footplate fit --config {config_path} --ckpt_path last", file=sys.stderr)
        raise
    print(f"Run directory: {trainer.run_dir}")


@contextlib.contextmanager
def profiled(steps: str | None) -> Iterator[None]:
    """Profile steps of the trainings in a `with` block.

    Raises:
        ConfigError: not a range of steps.
    """
    if steps is None:
        yield
        return
    StepRange.parse(steps, "--profile")
    with variable(VARIABLE, steps):
        yield


def _evaluate(name: str, objects: Namespace) -> None:
    from footplate.training.trainer import Trainer

    if objects.ckpt_path is None:
        print("No --ckpt_path was given: the model has its initial weights.", file=sys.stderr)
    options = {"output": objects.output} if name == "predict" else {}
    trainer = Trainer(**vars(objects.trainer))
    result = getattr(trainer, name)(objects.model, datamodule=objects.data, ckpt_path=objects.ckpt_path, **options)
    if name == "predict":
        print(f"Predictions: {objects.output} ({result.num_rows:,} rows)")
