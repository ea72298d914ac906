"""`footplate plan demo|RUN.yaml|CONFIG.json --on v5e-8,H100,cpu`: predict memory, step time and price on other hardware."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from footplate.planning.subject import Subject


def parser(name: str) -> Parser:
    """Make the parser of `plan`."""
    from footplate.cli.formats import add_format

    parser = make_parser(
        name,
        "Predict what a training needs on hardware that isn't here: memory, the least time of a step, hours and price. "
        "For TPU slices this runs the TPU's own compiler, which takes minutes for a large model. The result is kept.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        help="demo, a configuration file of footplate fit, or a config.json of transformers or diffusers, or its directory",
    )
    parser.add_argument("--model", help="plan a library model instead, such as torchvision.models:resnet50")
    parser.add_argument("--config", help="the config.json, or its directory, of a --model of transformers or diffusers")
    parser.add_argument(
        "--sequence-length", type=int, help="the tokens of a text, for a language model from a config.json"
    )
    parser.add_argument(
        "--input", default="3x224x224", help="the shape of one input of --model; for tokens, such as 1024:int64"
    )
    parser.add_argument(
        "--on", default="v5e-8,v6e-8,H100,cpu", help="the hardware: slices (v5e-8), GPUs (H100, A100x8), cpu"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        help="the global batch size, of all devices together; without it, GPUs get the best for a config.json",
    )
    parser.add_argument("--precision", help="32, bf16 or bf16-true; for a config.json bf16 by default")
    parser.add_argument(
        "--strategy",
        help="how GPUs share the training: auto (the fastest that fits), ddp, fsdp or model_parallel",
    )
    parser.add_argument("--compile", action="store_true", help="plan compiled steps on GPUs, with fused operations")
    parser.add_argument("--dataset-rows", type=int, help="the number of samples in an epoch, for hours and price")
    parser.add_argument("--epochs", type=int, help="the number of epochs, for hours and price")
    parser.add_argument(
        "--search",
        action="store_true",
        help="find the largest batch by compiling, which takes some minutes more for each slice",
    )
    parser.add_argument("--measure", action="store_true", help="run some steps on this CPU, and compare")
    parser.add_argument("--output", metavar="FILE", help="also write the plan to this file, as JSON")
    parser.add_argument("--chart", metavar="FILE", help="draw a chart into this .png or .svg file")
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Make a plan; returns 1 if the training fits on none of the hardware, else 0.

    Raises:
        FootplateError: a mistake in the arguments; a step that can't be captured or compiled.
        Exception: the code of the model raised it.
    """
    from footplate.cli.formats import show_as, write

    args = parser(name).parse_args(argv)
    if args.chart and Path(args.chart).suffix not in (".png", ".svg"):
        raise ConfigError(f"--chart {args.chart}: expected a name that ends in .png or .svg.")
    for flag, file in (("--output", args.output), ("--chart", args.chart)):
        if file and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
            raise ConfigError(f"{flag} {file}: expected a file in an existing folder.")

    # The user's modules are in the current directory.
    sys.path.insert(0, str(Path.cwd()))
    from footplate.planning import report
    from footplate.planning.study import plan_for

    subject = _subject(args)
    if args.strategy is not None:
        subject = replace(subject, strategy=args.strategy)
    if args.compile:
        subject = replace(subject, compile=True)
    names = [name.strip() for name in args.on.split(",") if name.strip()]
    if args.measure and "cpu" not in map(str.lower, names):
        raise ConfigError(f"--measure runs steps on this machine. Add cpu: --on {','.join([*names, 'cpu'])}.")
    plan = plan_for(subject, names, args.search, args.measure)

    values = report.to_dict(plan)
    if args.output:
        Path(args.output).write_text(write(values, "json"))
    if args.chart:
        from footplate.planning.chart import draw

        draw(plan, Path(args.chart))
    show_as(args.format, values, lambda: report.to_text(plan).rstrip())
    return 0 if any(choice.fits for choice in plan.choices) else 1


def _subject(args: Namespace) -> Subject:
    from footplate.cli import plan_subjects
    from footplate.planning.huggingface_models import configured_model, is_configuration
    from footplate.planning.library_models import library_model
    from footplate.planning.subject import precision_of, require_sizes

    if (args.what is None) == (args.model is None):
        raise ConfigError("expected one of: demo, a configuration file, or --model torchvision.models:resnet50.")
    sizes = args.batch_size, args.dataset_rows, args.epochs
    require_sizes(*sizes)
    if args.sequence_length is not None and not 1 <= args.sequence_length <= 2**31:
        raise ConfigError(f"--sequence-length {args.sequence_length}: expected a whole number from 1 to {2**31:,}.")
    config = args.config or (args.what if args.what and is_configuration(Path(args.what)) else None)
    if config is not None:
        if args.config and args.model is None:
            raise ConfigError(f"--config {config} goes with --model. Or leave --config out: footplate plan {config}.")
        precision = precision_of("bf16" if args.precision is None else args.precision)
        return configured_model(Path(config), args.model, args.sequence_length, *sizes, precision)
    if args.sequence_length is not None:
        raise ConfigError("--sequence-length goes with the config.json of a language model. For --model, use --input.")
    precision = precision_of("32" if args.precision is None else args.precision)
    if args.model is not None:
        return library_model(args.model, args.input, *sizes, precision)
    if args.what == "demo":
        return plan_subjects.demo(*sizes, precision)
    path = Path(args.what)
    if not path.is_file():
        raise ConfigError(
            f'"{args.what}" is neither demo nor a file. To plan a library model, use --model module:callable.'
        )
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{args.what} is no text file: expected a configuration file of footplate fit.") from None
    return plan_subjects.configured(path, *sizes, args.precision)
