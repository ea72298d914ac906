"""What pydantic finds wrong, in our words: an unknown key is answered with the nearest, or with where it belongs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from footplate.errors import did_you_mean
from footplate.jobs.spec.model import Job
from footplate.jobs.spec.problems import Path
from footplate.jobs.spec.schema import BaseModel, ValidationError


def keys_of(path: Iterable[str | int]) -> list[str]:
    """The keys of the mapping that a path leads to, for naming the nearest; empty when it leads to none."""
    kind: Any = Job
    for part in path:
        if isinstance(part, int):
            continue
        fields = {one.alias: one for one in kind.model_fields.values()} if _is_model(kind) else {}
        kind = _model_in(fields[part].annotation) if part in fields else None
    return [str(one.alias) for one in kind.model_fields.values()] if _is_model(kind) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _model_in(hint: Any) -> Any:
    """The model that a type is, is a list of, or may be."""
    if _is_model(hint):
        return hint
    return next((found for one in getattr(hint, "__args__", ()) if (found := _model_in(one))), None)


def mistakes(error: ValidationError) -> list[tuple[Path, str]]:
    """Each mistake that pydantic found: its path, and what is wrong in our words."""
    return [(_path(found["loc"]), _explain(found)) for found in error.errors(include_url=False)]


def _path(loc: tuple[int | str, ...]) -> Path:
    """The path of a mistake; a label's bad name has one more part, which is no key."""
    return tuple(part for part in loc if part != "[key]")


def _explain(found: Any) -> str:
    path, kind, context = _path(found["loc"]), found["type"], found.get("ctx", {})
    if kind == "mistake":
        return str(context["text"])
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return "missing."
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "expected keys with values below it."
    if kind == "list_type":
        return "expected a list: each item on a line of its own after a dash, or [a, b]."
    if kind == "too_long":
        return f"at most {context['max_length']} are taken."
    if kind == "too_short":
        return f"at least {context['min_length']} is needed."
    return f"{found['msg']}."


def _unknown(path: Path) -> str:
    key, home = str(path[-1]), path[:-1]
    known = keys_of(home)
    other = {"trainingInput": (), "": ("trainingInput",)}.get(".".join(map(str, home)))
    if other is not None and key in keys_of(other):
        return f"belongs {'under ' + other[0] if other else 'at the top, beside trainingInput'}, not here."
    hint = did_you_mean(key[:60], known)
    return f"there is no such key. {hint.partition('? ')[0]}?" if "? " in hint else f"there is no such key. {hint}"
