"""`footplate scale TRAIN [options] [-- ARGS]`: run the same training at several sizes, and compare speed and loss.

`TRAIN` is a function, named `module:function`, or a script. The arguments after `--` are passed to the script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from footplate.cli.arguments import Parser, add_backend, make_parser
from footplate.cli.formats import add_format, show_as
from footplate.core.errors import ConfigError, did_you_mean


def parser(name: str) -> Parser:
    """Make the parser of `scale`."""
    parser = make_parser(
        name,
        "Run the same training at several sizes, and write a table, JSON and a chart of time, throughput, efficiency and "
        "validation loss. The arguments after -- are passed to the script.",
    )
    parser.add_argument("train", nargs="?", help="a function, as module:function, or a script")
    parser.add_argument("--np", default="1,2,4", help="the sizes: numbers of processes, such as 1,2,4")
    add_backend(parser)
    parser.add_argument("--repeat", type=int, default=3, help="the number of trainings of each size")
    parser.add_argument(
        "--lr-rule",
        choices=("linear", "sqrt", "none"),
        default="linear",
        help="the learning rate with n processes: n times that of one process, √n times, or the same",
    )
    parser.add_argument(
        "--lr", type=float, help="the learning rate of one process; by default that of the training itself"
    )
    parser.add_argument(
        "--warmup",
        type=float,
        help="epochs in which the rate grows from that of one process; by default 1 for linear, else 0",
    )
    parser.add_argument("--monitor", default="val_loss", help="the name of the metric that is the validation loss")
    parser.add_argument("--output", help="the directory of the results")
    parser.add_argument("--experiment", default="scaling", help="the experiment in MLflow; null doesn't log to MLflow")
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Run a study; returns 0 if some training succeeded, else 1.

    Raises:
        FootplateError: a mistake in the arguments; the function, script or cluster doesn't exist.
        SystemExit: 143, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    args = parser(name).parse_args(argv[:end])
    if args.train is None:
        raise ConfigError("expected a function or a script: footplate scale train:fit --np 1,2")
    train = find(args.train, argv[end + 1 :])

    from footplate.scaling import report
    from footplate.scaling.study import scale

    study = scale(
        train, sizes(args.np),
        backend=args.backend,
        repeat=args.repeat,
        lr_rule=args.lr_rule,
        lr=args.lr,
        warmup=args.warmup,
        monitor=args.monitor,
        output=args.output,
        experiment=None if args.experiment == "null" else args.experiment,
    )  # fmt: skip
    show_as(args.format, report.to_dict(study), lambda: report.to_table(study))
    return 1 if study.failed else 0


def sizes(text: str) -> list[int]:
    """Parse the numbers of `1,2,4`.

    Raises:
        ConfigError: the text has another form.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--np={text}: expected numbers of processes, such as 1,2,4.") from None


def find(target: str, args: Sequence[str]) -> Callable[[], Any]:
    """Find the training: a script with its arguments, or a function.

    Raises:
        ConfigError: it doesn't exist, or a function was given arguments.
        Exception: the function's module raised it when it was imported.
    """
    from footplate.launch.script import Script

    module, colon, function = target.rpartition(":")
    if not colon:
        script = Script(target, tuple(args))
        if not Path(target).exists():
            raise ConfigError(
                f"{target}: there is no such script in {Path.cwd()}. A function is named as module:function."
            )
        return script
    if args:
        raise ConfigError(
            f"{target} {' '.join(args)}: a function is called without arguments. Name one that takes none, or, in Python, "
            "use footplate.scale(functools.partial(function, …))."
        )
    return _function(module, function)


def _function(module: str, name: str) -> Callable[[], Any]:
    import importlib
    import importlib.util

    sys.path.insert(0, str(Path.cwd()))
    # find_spec raises if a parent package doesn't exist, or the name is empty.
    try:
        exists = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        exists = False
    if not exists:
        raise ConfigError(f"{module}:{name}: there is no module {module!r} in sys.path or in {Path.cwd()}.")

    loaded = importlib.import_module(module)
    function = getattr(loaded, name, None)
    if not callable(function):
        names = [
            key for key, value in vars(loaded).items() if callable(value) and getattr(value, "__module__", "") == module
        ]
        raise ConfigError(f"{module}:{name}: {module} has no function of this name. {did_you_mean(name, names)}")
    return function
