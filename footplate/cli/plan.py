"""`footplate plan demo|CONFIG --on v5e-8,H100,cpu`: does it fit, how fast at best, and for how much?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from footplate.planning.subject import Subject


def parser(name: str) -> ArgumentParser:
    """The parser of `plan`."""
    from footplate.cli.formats import add_format
    from footplate.cli.parsing import make_parser

    made = make_parser(
        name,
        "Say what a training would need on hardware that isn't here: memory, the least time of a step, hours and price. "
        "Slices of TPUs are answered for by the TPU's own compiler, which takes minutes for a large model, once.",
    )
    made.add_argument("what", type=str, nargs="?", help="demo, or a configuration file of footplate fit")
    made.add_argument("--model", type=str | None, default=None, help="instead: such as torchvision.models:resnet50")
    made.add_argument("--input", type=str, default="3x224x224", help="of --model: one input; tokens: 1024:int64")
    made.add_argument("--on", type=str, default="v5e-8,v6e-8,H100,cpu", help="slices (v5e-8), GPUs (H100, A100x8), cpu")
    made.add_argument("--batch-size", type=int | None, default=None, help="the global batch, of all devices together")
    made.add_argument("--precision", type=str | None, default=None, help="32, bf16 or bf16-true")
    made.add_argument("--dataset-rows", type=int | None, default=None, help="samples of an epoch, for hours and price")
    made.add_argument("--epochs", type=int | None, default=None, help="how often they are gone through")
    made.add_argument("--search", action="store_true", help="find the largest batch by compiling; minutes more a slice")
    made.add_argument("--measure", action="store_true", help="run some steps on this CPU, and compare")
    made.add_argument("--json", type=str | None, default=None, metavar="FILE", help="write the plan there, too")
    made.add_argument("--chart", type=str | None, default=None, metavar="FILE", help="draw a chart: a .png or .svg")
    add_format(made)
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Make a plan; returns 1 when it fits nowhere, else 0.

    Raises:
        FootplateError: a mistake in the arguments; a step that can't be captured or compiled.
        Exception: what the model's code raised.
    """
    from footplate.cli.formats import show_as
    from footplate.cli.parsing import parse

    given = parse(parser(name), argv)
    if given.chart and Path(given.chart).suffix not in (".png", ".svg"):
        raise ConfigError(f"--chart {given.chart}: expected a name that ends in .png or .svg.")
    for flag, file in (("--json", given.json), ("--chart", given.chart)):
        if file and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
            raise ConfigError(f"{flag} {file}: expected a file in a folder that there is.")
    sys.path.insert(0, str(Path.cwd()))
    from footplate.planning import report
    from footplate.planning.study import plan_for

    about = _subject(given)
    names = [one.strip() for one in given.on.split(",") if one.strip()]
    if given.measure and "cpu" not in map(str.lower, names):
        raise ConfigError(f"--measure runs on this machine: add it, --on {','.join([*names, 'cpu'])}.")
    plan = plan_for(about, names, given.search, given.measure)
    found = report.to_dict(plan)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n")
    if given.chart:
        from footplate.planning.chart import draw

        draw(plan, Path(given.chart))
    show_as(given.format, found, lambda: report.to_text(plan).rstrip())
    return 0 if any(choice.fits for choice in plan.choices) else 1


def _subject(given: Namespace) -> Subject:
    from footplate.cli import plan_subjects
    from footplate.planning import known
    from footplate.planning.subject import precision_of, require_sizes

    if (given.what is None) == (given.model is None):
        raise ConfigError("expected one of: demo, a configuration file, or --model torchvision.models:resnet50.")
    sizes = given.batch_size, given.dataset_rows, given.epochs
    require_sizes(*sizes)
    precision = precision_of("32" if given.precision is None else given.precision)
    if given.model is not None:
        return known.library_model(given.model, given.input, *sizes, precision)
    if given.what == "demo":
        return plan_subjects.demo(*sizes, precision)
    path = Path(given.what)
    if not path.is_file():
        raise ConfigError(f'"{given.what}" is neither demo nor a file. A model of a library: --model module:callable.')
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{given.what} is no text: expected a configuration file of footplate fit.") from None
    return plan_subjects.configured(path, *sizes, given.precision)
