"""Which commands there are, and the module of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        module: the module with its `parser(name)` and `run(name, argv)`.
        help: what it does, in one line.
    """

    module: str
    help: str


COMMANDS = {
    "fit": Command("footplate.cli.fit", "train a model, or continue training it"),
    "validate": Command("footplate.cli.fit", "run a model over its validation data"),
    "test": Command("footplate.cli.fit", "run a model over its test data"),
    "predict": Command("footplate.cli.fit", "write a model's predictions as a table"),
    "run": Command("footplate.cli.run", "run a script in several processes, here or on a cluster"),
    "scale": Command("footplate.cli.scale", "run the same training at several sizes: what does adding devices bring?"),
    "plan": Command(
        "footplate.cli.plan", "what a training needs on hardware that isn't here: fits? how long? how much?"
    ),
    "jobs": Command("footplate.cli.jobs", "submit training jobs, check them, watch them"),
    "server": Command("footplate.cli.server", "serve jobs over HTTP, with a page to watch them on"),
    "catalog": Command("footplate.cli.catalog", "show machine types, accelerators and regions, and what fits together"),
    "demo": Command("footplate.cli.demo", "train an image classifier on a table that comes with Footplate"),
    "doctor": Command("footplate.cli.doctor", "show what this machine can train on, and what it lacks"),
    "table": Command("footplate.cli.table", "show a table: its columns, its size and its first rows"),
    "checkpoint": Command("footplate.cli.checkpoint", "show what is in a checkpoint, or write it in another form"),
    "completion": Command("footplate.cli.completion", "print a script that completes these commands in a shell"),
}


def overview() -> str:
    """What `footplate --help` prints."""
    lines = [f"  {name:<12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: footplate COMMAND [arguments]",
            "",
            "Train PyTorch models on any hardware, straight from lakehouse tables.",
            "",
            "commands:",
            *lines,
            "",
            "  --version   print the version",
            "  -h, --help  print this; `footplate COMMAND --help` describes a command",
        ]
    )
