"""Short error messages for mistakes in the arguments of `fit`: the option, its value, and what was expected.

jsonargparse has no structured errors, only text. It tries every alternative of a type and lists why each failed. One entry
of that list is about what the user meant. There are few kinds of entries, and each has a pattern here. A message of another
kind is passed on unchanged.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from footplate.cli import arguments
from footplate.core.errors import did_you_mean

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":\s*(?P<body>.*)', re.S)
_GIVEN = re.compile(r"G(?:iven|ot) value: (?P<value>.*)\Z", re.S)
_NESTED = re.compile(r"NestedArg\(key='(?P<key>[^']*)', val=(?P<value>.*)\)\Z", re.S)
_CLASS = re.compile(
    r"Problem with given class_path '(?P<path>[^']+)':\n(?P<problem>.*?)(?=\n *- |\n *Given value|\Z)", re.S
)
_BASES = ("footplate.Callback", "footplate.DataModule", "footplate.Logger", "footplate.Module")
_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "NoneType": "null", "str": "text"}


def explain(message: str, options: Iterable[str], classes: Mapping[str, Sequence[str]]) -> str:
    """Turn a message of jsonargparse into one or two sentences.

    Args:
        message: the text of jsonargparse's error.
        options: all option strings, such as "--trainer.max_epochs", for suggestions.
        classes: for each option that takes a class, the short names that it accepts.
    """
    if match := re.match(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'", message):
        key = ".".join(filter(None, match.groups()))
        return f"{key}: there is no such setting.{arguments.nearest_option(key, arguments.option_names(options))}"
    if match := re.search(r"File does not exist: '?([^'\n]+)'?", message):
        return f'there is no configuration file "{match[1]}".'
    if match := re.match(r"Problems parsing config: (.*)", message, re.S):
        problem = _one_line(match[1]).replace('in "<unicode string>", ', "at ")
        return f"the configuration is no YAML: {problem}."
    if match := _KEY.match(message):
        return _explain_value(match["key"], match["body"], classes) or _one_line(message)
    return arguments.explain(message, options)


def _explain_value(key: str, body: str, classes: Mapping[str, Sequence[str]]) -> str | None:
    """Explain why a value doesn't fit `key`; None if the message has an unknown form."""
    value = match["value"].strip() if (match := _GIVEN.search(body)) else ""
    full_key = key
    if nested := _NESTED.match(value):
        full_key, value = f"{key}.{nested['key']}", nested["value"].strip("'\"")

    if match := _CLASS.search(body):
        return _explain_class(key, match["path"], match["problem"].strip(), value)
    if match := re.search(r"Expected a dot import path string: (\S+)", body):
        return f'{key}="{match[1]}": there is no class of that name. {_class_hint(match[1], classes.get(key, ()))}'

    expected = _expected(body)
    if "does not correspond to a subclass" in body and expected is not None:
        expected = expected.removesuffix(" or null")
    return None if expected is None else f'{full_key}="{value}": expected {expected}.'


def _explain_class(key: str, path: str, problem: str, value: str) -> str:
    """Explain why a class can't be used: it can't be found, or its arguments are wrong."""
    short = path.rpartition(".")[2]
    if match := re.match(r"Option '([^']+)' is not accepted", problem):
        if path in _BASES:
            return f"{key}.{match[1]}: of which class? Name it first, with --{key}."
        return f"{key}.{match[1]}: {short} has no such argument. {did_you_mean(match[1], _arguments(path))}"
    if match := re.search(r"arguments are required: (.+)", problem):
        return f"{key}: {short} needs {match[1]}. Give it with --{key}.{match[1].split(', ')[0]}."
    if match := re.search(r"No module named '([^']+)'", problem):
        return (
            f'{key}="{path}": there is no module "{match[1]}". Modules are looked for in the current directory and '
            "among the installed packages."
        )
    if match := re.search(r"module '([^']+)' has no attribute '([^']+)'", problem):
        hint = did_you_mean(match[2], _classes_of(match[1])).replace("There are:", "It has:")
        return f'{key}="{path}": {match[1]} has no class "{match[2]}". {hint}'
    if match := _KEY.match(problem):
        value = inner["value"].strip() if (inner := _GIVEN.search(match["body"])) else value
        if (expected := _expected(match["body"])) is not None:
            return f'{key}.{match["key"]}="{value}": expected {expected}.'
    return f"{key}: {_one_line(problem)}"


def _expected(body: str) -> str | None:
    """Describe the expected type in words."""
    if match := re.search(r"Subtypes: \[(.*?)\]\n", body):
        kinds = re.findall(r"<class '[^']+'>|typing\.Literal\[[^\]]*\]|[\w.]+\[[^\[\]]*\]|[\w.]+", match[1])
        return " or ".join(dict.fromkeys(map(_in_words, kinds)))
    if match := re.search(r"Expected a (<class '[^']+'>|typing\.Literal\[[^\]]*\]|[\w.]+\[[^\[\]]*\])", body):
        return _in_words(match[1])
    return None


def _in_words(kind: str) -> str:
    if kind.startswith("typing.Literal"):
        return " or ".join(f'"{value}"' for value in re.findall(r"'([^']*)'", kind))
    name = kind.removeprefix("<class '").removesuffix("'>")
    if name in _WORDS:
        return _WORDS[name]
    outer, bracket, inner = name.rstrip("]").partition("[")
    of = f" of {inner.rpartition('.')[2]}" if bracket else ""
    return f"a {outer.rpartition('.')[2]}{of}"


def _class_hint(name: str, known: Sequence[str]) -> str:
    own = "a path such as train.Net"
    return f"{did_you_mean(name, known)} One of your own has {own}." if known else f"Give {own}."


def _arguments(path: str) -> list[str]:
    """Names of the arguments of an importable class."""
    module, _, name = path.rpartition(".")
    class_type = getattr(importlib.import_module(module), name)
    return [argument for argument in inspect.signature(class_type).parameters if argument not in ("args", "kwargs")]


def _classes_of(module: str) -> list[str]:
    """Names of the classes that a module exports or defines."""
    loaded = sys.modules[module]
    exported = getattr(loaded, "__all__", None) or [
        name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module
    ]
    return [name for name in exported if name[:1].isupper() and not name.endswith("Error")]


def _one_line(message: str) -> str:
    return " ".join(message.split())
