"""Read config.yaml as plain values, with the line of every key.

Mappings and sequences become dicts and lists, in a `Document` (document.py). JSON is YAML too.

Numbers are decimal. YAML 1.1 reads `010` as 8, `0x10` as 16 and `1:30` as 90. This module keeps them as text. A number
field then reads the first as 10, and refuses the others.

Tags, anchors and several documents are refused. A spec doesn't need them, and with them a small file can expand to a huge
one, or create Python objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import yaml

from footplate.core.errors import ConfigError
from footplate.jobs.spec.document import Document, Scalar
from footplate.jobs.spec.problems import Path, Problem

# Longer text would keep a server busy for long.
LONGEST = 2**18
MAX_DEPTH = 20
_CORE = "tag:yaml.org,2002:"
# Octal, binary, hexadecimal, or base 60.
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9box_]|.*:", re.IGNORECASE)


def load(path: str) -> Document:
    """Read a file.

    Raises:
        ConfigError: there is no such file, or it isn't text, or `parse` refuses it.
    """
    try:
        with File(path).open(encoding="utf-8-sig", newline="") as file:
            text = file.read(LONGEST + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} isn't UTF-8 text.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} can't be read as a configuration file: {_reason(error)}.") from None
    return parse(text, path)


def parse(text: str, name: str = "config.yaml") -> Document:
    """Parse the text of a file called `name`.

    Raises:
        ConfigError: the text isn't YAML, isn't a mapping, is too long, or uses a refused feature of YAML.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"{name} has more than {LONGEST:,} characters: expected a job's configuration.")
    try:
        _refuse_extras(text, name)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} isn't YAML: {_yaml_reason(error)}.") from None
    except _HalfCharacterError as error:
        text = (
            r"an escape (\u) for half of a character: write the character itself, or both halves, one after the other"
        )
        raise ConfigError(f"{name} line {error.line}: {text}.") from None
    document = Document(name, text, root, {})
    if root is None:
        return document
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}: expected keys with values, such as trainingInput:, found {_kind(root)}.")
    document.values.update(_mapping(root, (), document))
    return document


class _HalfCharacterError(Exception):
    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _Loader(yaml.SafeLoader):
    r"""Joins a pair of \u escapes, by which JSON writes a character above U+FFFF. PyYAML leaves the two apart."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _HalfCharacterError(node.start_mark.line + 1) from None
        return node


def _refuse_extras(text: str, name: str) -> None:
    """Refuse anchors, tags, further documents and deep nesting, before any code recurses into them."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(f"{name} line {line}: anchors (&) and aliases (*) aren't supported: write the value out.")
        if getattr(event, "tag", None) and not isinstance(event, yaml.DocumentStartEvent):
            raise ConfigError(f"{name} line {line}: tags (!) aren't supported: write a plain value.")
        if documents > 1:
            raise ConfigError(f"{name} line {line}: a second document begins here; expected one.")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name} line {line}: expected at most {MAX_DEPTH} levels of nesting.")


def _mapping(node: yaml.MappingNode, path: Path, document: Document) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise ConfigError(f"{document.name} line {line}: expected a word as key, found {_kind(key)}.")
        key_path = (*path, key.value)
        if key.value in mapping:
            first = document.lines[key_path]
            text = f"given twice; first in line {first}. Keep one."
            document.problems.append(Problem(key_path, text, f"{document.name} line {key.start_mark.line + 1}"))
            continue
        document.lines[key_path] = key.start_mark.line + 1
        mapping[key.value] = _value(value, key_path, document)
    return mapping


def _value(node: yaml.Node, path: Path, document: Document) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[*path, index] = item.start_mark.line + 1
        return [_value(item, (*path, index), document) for index, item in enumerate(node.value)]
    return _scalar(node)


def _scalar(node: yaml.Node) -> Any:
    text = node.value
    kind = node.tag.removeprefix(_CORE)
    if kind == "null":
        return None
    if kind == "bool" or (kind in ("int", "float") and not _NOT_DECIMAL.match(text)):
        make = getattr(yaml.constructor.SafeConstructor(), f"construct_yaml_{kind}")
        try:
            return Scalar(make(node), text)
        except ValueError:
            # The text only looks like a number, or has thousands of digits.
            return text
    return text


def nodes(root: yaml.Node, path: Path = ()) -> Iterator[tuple[Path, yaml.Node, yaml.Node]]:
    """Every key of the mappings in a document: its path, its node, and its value's node."""
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            key_path = (*path, key.value)
            yield key_path, key, value
            yield from nodes(value, key_path)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else f'"{str(node.value)[:40]}"'


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be read"
    position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{position}{' '.join(str(reason).split())}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
