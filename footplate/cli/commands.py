"""The commands: their names, modules and one-line descriptions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        module: the module that has the command's `parser(name)` and `run(name, argv)`.
        help: the description of the command, in one line.
    """

    module: str
    help: str


COMMANDS = {
    "fit": Command("footplate.cli.fit", "train a model, or continue its training"),
    "validate": Command("footplate.cli.fit", "evaluate a model on its validation data"),
    "test": Command("footplate.cli.fit", "evaluate a model on its test data"),
    "predict": Command("footplate.cli.fit", "write a model's predictions as a table"),
    "tune": Command("footplate.cli.tune", "tune hyperparameters: trials of a training, and the best of them"),
    "run": Command("footplate.cli.run", "run a script in several processes, here or on a cluster"),
    "scale": Command("footplate.cli.scale", "run the same training at several sizes, and compare speed and loss"),
    "plan": Command("footplate.cli.plan", "predict memory, step time and price of a training on other hardware"),
    "jobs": Command("footplate.cli.jobs", "submit, check and watch training jobs"),
    "server": Command("footplate.cli.server", "serve jobs over HTTP, with a web page to watch them"),
    "stacks": Command("footplate.cli.stacks", "show where a training on this machine is now, and which ranks wait"),
    "profile": Command("footplate.cli.profile", "profile the next steps of a training on this machine"),
    "catalog": Command("footplate.cli.catalog", "show machine types, accelerators and regions, and which fit together"),
    "demo": Command("footplate.cli.demo", "train an image classifier on a table that comes with Footplate"),
    "new": Command("footplate.cli.new", "copy a recipe: a small program that you change into your own"),
    "doctor": Command("footplate.cli.doctor", "show the accelerators of this machine, and problems with them"),
    "table": Command("footplate.cli.table", "show a table: its columns, its size and its first rows"),
    "goodput": Command("footplate.cli.goodput", "show how much of a run's time trained, and the causes of the rest"),
    "rows": Command("footplate.cli.rows", "show which rows of a table a training step had"),
    "replay": Command("footplate.cli.replay", "train a step of a run again: its batch, loss and gradients"),
    "verify": Command("footplate.cli.verify", "train a part of a run again, and compare its states"),
    "report": Command("footplate.cli.report", "write a report about runs as one HTML file"),
    "checkpoint": Command("footplate.cli.checkpoint", "show the content of a checkpoint, or convert it"),
    "lab": Command("footplate.cli.lab", "several machines on this one, to see what a broken network does"),
    "completion": Command("footplate.cli.completion", "print a script that completes these commands in a shell"),
}


def overview() -> str:
    """Write the text of `footplate --help`."""
    lines = [f"  {name:<12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: footplate COMMAND [arguments]",
            "",
            "Train PyTorch models straight from lakehouse tables. A training that is killed goes on, bit for bit.",
            "",
            "commands:",
            *lines,
            "",
            "  --version   print the version",
            "  -h, --help  print this; `footplate COMMAND --help` describes a command",
        ]
    )
