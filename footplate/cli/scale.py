"""`footplate scale TRAIN [options] [-- ARGS]`: the same training at several sizes, and what adding devices brings.

`TRAIN` is a function, named `module:function`, or a script. What follows `--` is the script's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from footplate.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def parser(name: str) -> ArgumentParser:
    """The parser of `scale`."""
    from footplate.cli.parsing import add_backend, make_parser

    made = make_parser(
        name,
        "Run the same training at several sizes, and write a table, JSON and a chart of time, throughput, efficiency and "
        "validation loss. What follows -- is the script's.",
    )
    made.add_argument("train", type=str, nargs="?", help="a function, as module:function, or a script")
    made.add_argument("--np", type=str, default="1,2,4", help="the sizes: numbers of processes, such as 1,2,4")
    add_backend(made)
    made.add_argument("--repeat", type=int, default=3, help="how often each size is trained")
    made.add_argument(
        "--lr-rule",
        type=Literal["linear", "sqrt", "none"],
        default="linear",
        help="the learning rate with n processes: n times, √n times, or as it is",
    )
    made.add_argument("--lr", type=float | None, default=None, help="of one process; by default the training's own")
    made.add_argument(
        "--warmup",
        type=float | None,
        default=None,
        help="epochs in which the rate grows from that of one process; by default 1 for linear, else 0",
    )
    made.add_argument("--monitor", type=str, default="val_loss", help="the metric that is the validation loss")
    made.add_argument("--output", type=str | None, default=None, help="the directory of what is written")
    made.add_argument("--experiment", type=str | None, default="scaling", help="of MLflow; null not to log there")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


def run(name: str, argv: Sequence[str]) -> int:
    """Run a study; returns 0 when some training succeeded, else 1.

    Raises:
        FootplateError: a mistake in the arguments, no such function or script, no such cluster.
        SystemExit: 143, after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    from footplate.cli.parsing import parse

    end = list(argv).index("--") if "--" in argv else len(argv)
    ours, args = argv[:end], argv[end + 1 :]
    given = parse(parser(name), ours)
    if given.train is None:
        raise ConfigError("expected a function or a script: footplate scale train:fit --np 1,2")
    fn = find(given.train, args)
    from footplate.scaling import report
    from footplate.scaling.study import scale

    study = scale(
        fn, sizes(given.np),
        backend=given.backend,
        repeat=given.repeat,
        lr_rule=given.lr_rule,
        lr=given.lr,
        warmup=given.warmup,
        monitor=given.monitor,
        output=given.output,
        experiment=given.experiment,
    )  # fmt: skip
    if given.json:
        print(json.dumps(report.to_dict(study), indent=2))
    else:
        from footplate.cli.show import show

        show(report.to_table(study))
    return 1 if study.failed else 0


def sizes(text: str) -> list[int]:
    """The numbers in `1,2,4`.

    Raises:
        ConfigError: something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--np={text}: expected numbers of processes, such as 1,2,4.") from None


def find(target: str, args: Sequence[str]) -> Callable[[], Any]:
    """What is to be run: a script with its arguments, or a function.

    Raises:
        ConfigError: there is none of this name, or a function that is given arguments.
        Exception: what the function's module raised when it was imported.
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
    try:
        there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that isn't there, or no name at all
        there = False
    if not there:
        raise ConfigError(f"{module}:{name}: there is no module {module!r} in sys.path or in {Path.cwd()}.")
    home = importlib.import_module(module)
    found = getattr(home, name, None)
    if not callable(found):
        known = [
            one for one, value in vars(home).items() if callable(value) and getattr(value, "__module__", "") == module
        ]
        raise ConfigError(f"{module}:{name}: {module} has no function of this name. {did_you_mean(name, known)}")
    return found
