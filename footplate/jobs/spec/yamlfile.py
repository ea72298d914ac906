"""config.yaml as plain values, with the line of every key.

Mappings and sequences become dicts and lists; what they become is in document.py. JSON is YAML too.

A number is decimal. YAML 1.1 reads `010` as 8, `0x10` as 16 and `1:30` as 90. Here these stay text: a field for numbers
reads the first as 10 and refuses the others.

A spec needs neither tags, nor anchors, nor several documents, and a file that has them is refused: with them a small
file can stand for a huge one, or for objects of Python.
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

LONGEST = 2**18  # characters: more would keep a server busy for long
MAX_DEPTH = 20
_CORE = "tag:yaml.org,2002:"
_NOT_DECIMAL = re.compile(r"[-+]?0[0-9box_]|.*:", re.IGNORECASE)  # octal, binary, hexadecimal, to the base of 60


def load(path: str) -> Document:
    """Read a file.

    Raises:
        ConfigError: there is none, or it is no text, or `parse` refuses it.
    """
    try:
        with File(path).open(encoding="utf-8-sig", newline="") as file:
            text = file.read(LONGEST + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} can't be read as a configuration file: {_reason(error)}.") from None
    return parse(text, path)


def parse(text: str, name: str = "config.yaml") -> Document:
    """Parse the text of a file called `name`.

    Raises:
        ConfigError: it is no YAML, no mapping, or uses what a spec doesn't need; it is too long.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"{name} has more than {LONGEST:,} characters: that is no job's configuration.")
    try:
        _refuse_extras(text, name)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {_yaml_reason(error)}.") from None
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
    """Joins the two escapes by which JSON writes a character beyond U+FFFF, and YAML leaves apart."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _HalfCharacterError(node.start_mark.line + 1) from None
        return node


def _refuse_extras(text: str, name: str) -> None:
    """Refuse anchors, tags, further documents and deep nesting, before anything recurses into them."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(f"{name} line {line}: anchors (&) and aliases (*) are not taken: write the value out.")
        if getattr(event, "tag", None) and not isinstance(event, yaml.DocumentStartEvent):
            raise ConfigError(f"{name} line {line}: tags (!) are not taken: write a plain value.")
        if documents > 1:
            raise ConfigError(f"{name} line {line}: a second document begins; a job has one.")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name} line {line}: nested more than {MAX_DEPTH} deep; no job needs that.")


def _mapping(node: yaml.MappingNode, path: Path, document: Document) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise ConfigError(f"{document.name} line {line}: expected a word as key, found {_kind(key)}.")
        here = (*path, key.value)
        if key.value in found:
            first = document.lines[here]
            text = f"given twice; first in line {first}. Keep one."
            document.problems.append(Problem(here, text, f"{document.name} line {key.start_mark.line + 1}"))
            continue
        document.lines[here] = key.start_mark.line + 1
        found[key.value] = _value(value, here, document)
    return found


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
        except ValueError:  # what only looks like a number, or has thousands of digits
            return text
    return text


def nodes(root: yaml.Node, path: Path = ()) -> Iterator[tuple[Path, yaml.Node, yaml.Node]]:
    """Every key of the mappings in a document: its path, its own node, its value's."""
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            here = (*path, key.value)
            yield here, key, value
            yield from nodes(value, here)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else f'"{str(node.value)[:40]}"'


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or "it can't be read"
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{place}{' '.join(str(said).split())}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
