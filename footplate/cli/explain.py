"""What jsonargparse, or argparse, says of a mistake, said shortly: the option, what was given, what was expected.

jsonargparse tries every alternative of a type and lists why each failed. Only one entry of such a list is about what the
user meant; the kinds of entries are few, and each has a pattern here. A message of another kind is passed on as it is.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from footplate.core.errors import did_you_mean

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":\s*(?P<body>.*)', re.S)
_GIVEN = re.compile(r"G(?:iven|ot) value: (?P<value>.*)\Z", re.S)
_NESTED = re.compile(r"NestedArg\(key='(?P<key>[^']*)', val=(?P<value>.*)\)\Z", re.S)
_CLASS = re.compile(
    r"Problem with given class_path '(?P<path>[^']+)':\n(?P<problem>.*?)(?=\n *- |\n *Given value|\Z)", re.S
)
_BASES = ("footplate.Callback", "footplate.DataModule", "footplate.Logger", "footplate.Module")
MANY = 4  # choices, beyond which the nearest is named
_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "NoneType": "null", "str": "text"}


def explain(message: str, options: Iterable[str], classes: Mapping[str, Sequence[str]]) -> str:
    """One or two sentences for a message of jsonargparse.

    Args:
        message: what jsonargparse said.
        options: all option strings, such as "--trainer.max_epochs".
        classes: for options that take classes, the short names they know.
    """
    names = sorted({option.strip("-+") for option in options if option.startswith("--")})
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        return _unknown_option(found[1], names)
    if found := re.match(r"Group '([^']+)' does not accept option '([^']+)'", message):
        return _unknown_setting(f"{found[1]}.{found[2]}", names)
    if found := re.match(r"Option '([^']+)' is not accepted", message):
        return _unknown_setting(found[1], names)
    if found := re.match(r"the following arguments are required: (.+)", message):
        return _missing(found[1].split(", ")[0], names)
    if found := re.search(r"File does not exist: '?([^'\n]+)'?", message):
        return f'there is no configuration file "{found[1]}".'
    if found := re.match(r"Problems parsing config: (.*)", message, re.S):
        said = _tidy(found[1]).replace('in "<unicode string>", ', "at ")
        return f"the configuration is no YAML: {said}."
    if found := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)\Z", message, re.S):
        return _no_choice(found[1].lstrip("-"), found[2], re.findall("'([^']*)'", found[3]))
    if found := re.match(r"argument (\S+): invalid int value: '(.*)'\Z", message, re.S):
        return f'{found[1].lstrip("-")}="{found[2]}": expected an integer.'
    if found := _KEY.match(message):
        return _explain_value(found["key"], found["body"], classes) or _tidy(message)
    return _tidy(message).removeprefix("argument ")


def _unknown_option(given: str, names: list[str]) -> str:
    if not given.startswith("-"):
        return f'"{given}" follows no option. See --help.'
    option = given.partition("=")[0].strip("-+")
    return f"--{option}: there is no such option.{_nearest(option, names, '--')}"


def _unknown_setting(key: str, names: list[str]) -> str:
    return f"{key}: there is no such setting.{_nearest(key, names)}"


def _no_choice(name: str, given: str, choices: list[str]) -> str:
    if len(choices) > MANY:
        return f'"{given}" is none of the choices of {name}. {did_you_mean(given, choices)}'
    quoted = [f'"{choice}"' for choice in choices]
    return f'{name}="{given}": expected {" or ".join(quoted)}.'


def _missing(name: str, names: list[str]) -> str:
    if name in names:
        return f"{name}: not given. Give it with --{name}, or in a configuration file."
    return f"{name}: not given. See --help."


def _nearest(name: str, names: list[str], dashes: str = "") -> str:
    """The option nearest to `name` in its group, without the list of all, which is long."""
    group, dot, own = name.rpartition(".")
    prefix = group + dot
    siblings = [one.removeprefix(prefix) for one in names if one.startswith(prefix)]
    hint = did_you_mean(own, siblings)
    if not hint.startswith("Did you mean"):
        return " See --help."
    nearest = hint.split('"')[1]
    return f' Did you mean "{dashes}{prefix}{nearest}"?'


def _explain_value(key: str, body: str, classes: Mapping[str, Sequence[str]]) -> str | None:
    """The message for a value that doesn't fit `key`; None where the pattern is not known."""
    given = found["value"].strip() if (found := _GIVEN.search(body)) else ""
    full_key = key
    if nested := _NESTED.match(given):
        full_key, given = f"{key}.{nested['key']}", nested["value"].strip("'\"")
    if found := _CLASS.search(body):
        return _explain_class(key, found["path"], found["problem"].strip(), given)
    if found := re.search(r"Expected a dot import path string: (\S+)", body):
        return f'{key}="{found[1]}": there is no class of that name. {_class_hint(found[1], classes.get(key, ()))}'
    expected = _expected(body)
    if "does not correspond to a subclass" in body and expected is not None:
        expected = expected.removesuffix(" or null")
    return None if expected is None else f'{full_key}="{given}": expected {expected}.'


def _explain_class(key: str, path: str, problem: str, given: str) -> str:
    """The message for a class that can't be found, or for its arguments."""
    short = path.rpartition(".")[2]
    if found := re.match(r"Option '([^']+)' is not accepted", problem):
        if path in _BASES:
            return f"{key}.{found[1]}: of which class? Name it first, with --{key}."
        return f"{key}.{found[1]}: {short} has no such argument. {did_you_mean(found[1], _arguments(path))}"
    if found := re.search(r"arguments are required: (.+)", problem):
        return f"{key}: {short} needs {found[1]}. Give it with --{key}.{found[1].split(', ')[0]}."
    if found := re.search(r"No module named '([^']+)'", problem):
        return (
            f'{key}="{path}": there is no module "{found[1]}". Modules are looked for in the current directory and '
            "among the installed packages."
        )
    if found := re.search(r"module '([^']+)' has no attribute '([^']+)'", problem):
        hint = did_you_mean(found[2], _classes_of(found[1])).replace("There are:", "It has:")
        return f'{key}="{path}": {found[1]} has no class "{found[2]}". {hint}'
    if found := _KEY.match(problem):
        value = inner["value"].strip() if (inner := _GIVEN.search(found["body"])) else given
        if (expected := _expected(found["body"])) is not None:
            return f'{key}.{found["key"]}="{value}": expected {expected}.'
    return f"{key}: {_tidy(problem)}"


def _expected(body: str) -> str | None:
    """The type that was wanted, in words."""
    if found := re.search(r"Subtypes: \[(.*?)\]\n", body):
        kinds = re.findall(r"<class '[^']+'>|typing\.Literal\[[^\]]*\]|[\w.]+\[[^\[\]]*\]|[\w.]+", found[1])
        return " or ".join(dict.fromkeys(map(_in_words, kinds)))
    if found := re.search(r"Expected a (<class '[^']+'>|typing\.Literal\[[^\]]*\]|[\w.]+\[[^\[\]]*\])", body):
        return _in_words(found[1])
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
    """The names of the arguments of a class, which can be imported."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    return [one for one in inspect.signature(kind).parameters if one not in ("args", "kwargs")]


def _classes_of(module: str) -> list[str]:
    """The names of the classes that a module defines, or offers."""
    found = sys.modules[module]
    offered = getattr(found, "__all__", None) or [
        name for name, value in vars(found).items() if getattr(value, "__module__", None) == module
    ]
    return [name for name in offered if name[:1].isupper() and not name.endswith("Error")]


def _tidy(message: str) -> str:
    return " ".join(message.split())
