"""Rebuild a run of `footplate fit` from the `config.yaml` in its directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from footplate.checkpoint.storage import is_remote, to_place
from footplate.core.errors import ConfigError

CONFIG = "config.yaml"


def rebuild(run: str | Path) -> tuple[dict[str, Any], Any, Any]:
    """Return the trainer's arguments, the model and the data module of a run. The seed is set as in the run.

    Args:
        run: the run's directory, or one of its checkpoints. Modules of the user are in the current directory.

    Raises:
        ConfigError: the run wasn't made by `footplate fit`.
        Exception: a constructor raised it.
    """
    from footplate.cli.fit import parser
    from footplate.cli.fit_arguments import instantiate, parse
    from footplate.core.rng import seed_everything

    config_path = _config_of(run)
    sys.path.insert(0, str(Path.cwd()))
    fit_parser = parser("fit")
    config = parse(fit_parser, ["--config", str(config_path)])
    if config.seed_everything is not False:
        seed_everything(config.seed_everything)
    objects = instantiate(fit_parser, config)
    return vars(objects.trainer), objects.model, objects.data


def _config_of(run: str | Path) -> Path:
    place = to_place(run)
    folders = [] if is_remote(place) else [Path(str(place)).absolute(), *Path(str(place)).absolute().parents[:2]]
    for folder in folders:
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    raise ConfigError(
        f"{run}: there is no {CONFIG}, so a script made this run, which only the script can rebuild. Call it there, "
        "with what it passes to trainer.fit(): fp.replay(run, step, trainer, model, loader)."
    )
