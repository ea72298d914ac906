"""`footplate fit | validate | test | predict`: a trainer, a model and data from flags and configuration files.

Who knows LightningCLI knows these commands:

    footplate fit --config run.yaml --trainer.max_epochs 3 --model train.Net --model.lr 1e-3 \\
        --data TableDataModule --data.train lake/flowers --trainer.callbacks+=EarlyStopping \\
        --trainer.callbacks.monitor=val_loss

The order of events: parse → seed → construct trainer, model and data → run. When training begins, the whole resolved
configuration is written to the run's directory, with that directory in it, so that one command continues the run:
`footplate fit --config RUN/config.yaml --ckpt_path last`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


_CHECKPOINT = {
    "fit": 'continue from this checkpoint; "last": from the newest of the run\'s directory, if there is one',
    "validate": 'load these weights first: "best", "last" or a path; without it, the model\'s own are used',
    "test": 'load these weights first: "best", "last" or a path; without it, the model\'s own are used',
    "predict": 'load these weights first: "best", "last" or a path; without it, the model\'s own are used',
}


def parser(name: str) -> ArgumentParser:
    """The parser of `fit`, `validate`, `test` or `predict`."""
    from footplate.cli.class_types import CALLBACKS, DATA, MODELS
    from footplate.cli.commands import COMMANDS
    from footplate.cli.parsing import make_parser
    from footplate.training.config import TrainerConfig

    made = make_parser(name, f"{COMMANDS[name].help.capitalize()}.")
    made.add_argument("--config", action="config", help="a YAML file of these settings; flags win over it")
    made.add_argument(
        "--seed_everything",
        type=bool | int,
        default=True,
        help="seed of all randomness; true draws one and writes it down, false leaves it alone",
    )
    made.add_argument("--ckpt_path", type=str | None, default=None, help=_CHECKPOINT[name])
    if name == "predict":
        made.add_argument("--output", type=str, default="predictions", help="the directory of the Parquet table")
    for key, bases, what in (("model", MODELS, "train.Net"), ("data", DATA, "TableDataModule")):
        made.add_subclass_arguments(
            bases,
            key,
            as_group=False,
            fail_untyped=False,
            required=key == "model",
            metavar="CLASS",
            help=f"a class, such as {what}, or a YAML file of it; its arguments follow as --{key}.NAME",
        )
    made.add_class_arguments(TrainerConfig, "trainer", fail_untyped=False, instantiate=False, skip={"callbacks"})
    made.add_argument("--trainer.callbacks", type=CALLBACKS, default=None, help="a callback or several")
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Run the command `name`; returns its exit code.

    Raises:
        FootplateError: a mistake in the arguments, the configuration or the data.
        SystemExit: 143, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    from footplate.cli.class_types import SHORT_NAMES
    from footplate.cli.parsing import instantiate, parse
    from footplate.core.rng import seed_everything

    sys.path.insert(0, str(Path.cwd()))
    made = parser(name)
    config = parse(made, argv, SHORT_NAMES)
    if config.seed_everything is not False:
        seed = None if config.seed_everything is True else config.seed_everything
        config.seed_everything = seed_everything(seed)
    objects = instantiate(made, config)
    if name == "fit":
        _fit(objects, made, config)
    else:
        _evaluate(name, objects)
    return 0


def _fit(objects: Namespace, made: ArgumentParser, config: Namespace) -> None:
    from footplate.cli.save_config import SaveConfig
    from footplate.training.argument_checks import as_list
    from footplate.training.trainer import Trainer

    def to_yaml(run_dir: Path) -> str:
        config.trainer.default_root_dir = str(run_dir)
        return made.dump(config, skip_unset=False)

    saved = SaveConfig(to_yaml)
    settings = vars(objects.trainer)
    trainer = Trainer(**{**settings, "callbacks": [*as_list(settings["callbacks"]), saved]})
    try:
        trainer.fit(objects.model, datamodule=objects.data, ckpt_path=objects.ckpt_path)
    except (KeyboardInterrupt, SystemExit):
        if saved.path is not None:
            config_path = shlex.quote(str(saved.path))
            print(f"Continue with: footplate fit --config {config_path} --ckpt_path last", file=sys.stderr)
        raise
    print(f"Run directory: {trainer.run_dir}")


def _evaluate(name: str, objects: Namespace) -> None:
    from footplate.training.trainer import Trainer

    if objects.ckpt_path is None:
        print("No --ckpt_path was given: the model is used with the weights it was made with.", file=sys.stderr)
    more = {"output": objects.output} if name == "predict" else {}
    trainer = Trainer(**vars(objects.trainer))
    found = getattr(trainer, name)(objects.model, datamodule=objects.data, ckpt_path=objects.ckpt_path, **more)
    if name == "predict":
        print(f"Predictions: {objects.output} ({found.num_rows:,} rows)")
