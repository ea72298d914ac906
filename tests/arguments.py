"""The table of the Trainer's arguments in docs/reference/trainer.md, made from `TrainerConfig`.

After a change there, `make tables` writes the table into the page.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import docstring_parser
from models.table import with_table

from footplate.training.config import TrainerConfig

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "trainer.md"

MORE = {  # the page with details
    "accelerator": "accelerators.md",
    "devices": "../guide/distributed.md",
    "num_nodes": "../guide/machines.md",
    "strategy": "distributed.md",
    "logger": "../guide/tracking.md",
    "iterations_per_loop": "../guide/xla.md#several-steps-in-one-call",
    "default_root_dir": "../guide/jobs.md",
}


def render() -> str:
    """The table in Markdown."""
    described = {
        parameter.arg_name: parameter.description or ""
        for parameter in docstring_parser.parse(TrainerConfig.__doc__ or "").params
    }
    rows = [
        f"| `{field.name}` | {_default(field.default)} | {_meaning(field.name, described[field.name])} |"
        for field in dataclasses.fields(TrainerConfig)
    ]
    return "\n".join(["| argument | default | what |", "| --- | --- | --- |", *rows])


def filled(page: str) -> str:
    """The page with a new table."""
    return with_table(page, "arguments", render())


def _default(value: Any) -> str:
    if value is None:
        return ""
    return f'`"{value}"`' if isinstance(value, str) else str(value)


def _meaning(name: str, text: str) -> str:
    text = " ".join(text.split())
    parts = text.split("`")  # every second part is already code
    quoted = [re.sub(r'("[^"]+")', r"`\1`", part) if index % 2 == 0 else part for index, part in enumerate(parts)]
    more = f" More: [{Path(MORE[name].split('#')[0]).name}]({MORE[name]})" if name in MORE else ""
    return "`".join(quoted) + more
