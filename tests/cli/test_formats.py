"""The format of results: each command that prints a result takes `--format`, and `--json` for short."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest
import yaml

from footplate.cli.commands import COMMANDS
from footplate.cli.formats import write
from footplate.demo import TABLES

# These write files, change something, or print text: the output of a program, stacks, a script for a shell, a path.
WITHOUT_A_RESULT = {
    *(
        "fit",
        "validate",
        "test",
        "predict",
        "run",
        "demo",
        "new",
        "server",
        "completion",
        "report",
        "stacks",
        "profile",
    ),
    *("lab up", "lab down", "lab exec", "lab boot", "lab partition", "lab shape", "lab firewall", "lab heal"),
    *("lab cut", "lab kill", "lab crash", "lab ps", "checkpoint convert", "jobs local-train", "jobs stacks"),
    *("jobs profile", "jobs stream-logs", "jobs delete", "jobs clean", "jobs daemon"),
}


def parsers(name: str, parser: Any) -> Iterator[tuple[str, Any]]:
    """The parsers that have no actions, by the names of their commands."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not actions:
        yield name, parser
    for action in actions:
        for inner, inner_parser in action.choices.items():
            yield from parsers(f"{name} {inner}", inner_parser)


def all_parsers() -> Iterator[tuple[str, Any]]:
    for command, about in COMMANDS.items():
        module = importlib.import_module(about.module)
        parser = module.parser(command)
        if hasattr(module, "add_actions"):
            module.add_actions(parser)
        yield from parsers(command, parser)


def form_of(parser: Any) -> str:
    """How a parser takes the format of its result."""
    options = {option: action for action in parser._actions for option in action.option_strings}
    if "--format" not in options and "--json" not in options:
        return "takes no format"
    if "--format" not in options or "--json" not in options:
        return "has only one of --format and --json"
    form, short = options["--format"], options["--json"]
    if not {"json", "yaml"} <= set(form.choices) <= {"table", "json", "yaml"}:
        return f"has --format {'|'.join(form.choices)}"
    if (short.dest, short.nargs, short.const) != (form.dest, 0, "json"):
        return "has a --json that isn't short for --format json"
    if short.help != argparse.SUPPRESS:
        return "lists --json in its help"
    return "takes --format and --json"


def test_every_command_with_a_result_takes_its_format_in_one_form():
    forms = {name: form_of(parser) for name, parser in all_parsers()}
    expected = {name: "takes no format" if name in WITHOUT_A_RESULT else "takes --format and --json" for name in forms}
    assert set(forms) >= WITHOUT_A_RESULT
    assert forms == expected


@pytest.mark.parametrize(
    "argv",
    [
        ["table", TABLES / "val"],
        ["catalog", "check", "n1-standard-8", "--accelerator", "count=2,type=v100"],
        ["jobs", "list"],
    ],
    ids=["table", "catalog", "jobs"],
)
def test_json_and_yaml_have_the_same_values(footplate, argv):
    values = json.loads(footplate(*argv, "--format", "json").out)
    assert json.loads(footplate(*argv, "--json").out) == values
    assert yaml.safe_load(footplate(*argv, "--format", "yaml").out) == values


def test_yaml_takes_every_value_that_json_takes():
    class Color(StrEnum):
        RED = "red"

    shared = [1, 2]
    text = write({"color": Color.RED, "pair": (1, 2), "one": shared, "other": shared}, "yaml")
    assert text == "color: red\npair:\n- 1\n- 2\none:\n- 1\n- 2\nother:\n- 1\n- 2\n"


def test_a_format_that_there_is_not_is_a_mistake(footplate):
    result = footplate("doctor", "--format", "xml")
    assert result.code == 2
    assert 'format="xml": expected "table" or "json" or "yaml".' in result.err
