"""`footplate checkpoint inspect PATH` and `footplate checkpoint convert SOURCE TARGET`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
    from rich.console import RenderableType

    from footplate.checkpoint.inspection import CheckpointInfo


def parser(name: str) -> ArgumentParser:
    """The parser of `checkpoint`, without its actions."""
    from footplate.cli.parsing import make_parser

    return make_parser(name, "Look into checkpoints, and write them in other forms.")


def add_actions(made: ArgumentParser) -> None:
    """Add `inspect` and `convert` to the parser."""
    from footplate.cli.parsing import make_parser

    name = "checkpoint"
    inspect = make_parser(
        f"{name} inspect", "Show what is in a checkpoint, or in all of a run, and whether it is whole."
    )
    inspect.add_argument("path", type=str, help="a checkpoint, or a directory that holds some; a path or a URI")
    inspect.add_argument("--verify", action="store_true", help="read all of it, and compare the checksums")
    inspect.add_argument("--json", action="store_true", help="print all as JSON")

    convert = make_parser(f"{name} convert", "Write a checkpoint in another form, which the target's suffix names.")
    convert.add_argument("source", type=str, help="a checkpoint of Footplate's, or a .ckpt file of Lightning's")
    convert.add_argument(
        "target",
        type=str,
        help="NAME.safetensors: the weights; NAME.pt: a torch file, which Lightning reads too; NAME.ckpt: a checkpoint",
    )
    convert.add_argument("--force", action="store_true", help="replace what is there")

    commands = made.add_subcommands(dest="action")
    commands.add_subcommand("inspect", inspect, help="what is in a checkpoint, and is it whole")
    commands.add_subcommand("convert", convert, help="to plain weights, a torch file, or from Lightning")


def run(name: str, argv: Sequence[str]) -> int:
    """Inspect or convert; returns 1 when a checkpoint is not whole, else 0.

    Raises:
        FootplateError: a mistake in the arguments; there is no checkpoint; it can't be written so.
    """
    from footplate.cli.parsing import parse

    made = parser(name)
    add_actions(made)
    given = parse(made, argv)
    if given.action == "inspect":
        return _inspect(given.inspect.path, given.inspect.verify, given.inspect.json)
    return _convert(given.convert.source, given.convert.target, given.convert.force)


def _inspect(path: str, verify: bool, as_json: bool) -> int:
    from footplate.checkpoint.inspection import inspect
    from footplate.cli.show import show

    found = inspect(path, verify)
    if as_json:
        print(json.dumps([asdict(info) for info in found], indent=2))
    else:
        show(render(found[0]) if len(found) == 1 else render_all(found))
    return int(any(info.fault for info in found))


def _convert(source: str, target: str, force: bool) -> int:
    from footplate.checkpoint.conversion import convert

    lacks = convert(source, target, force)
    print(f"Wrote {target}. {lacks}".rstrip())
    return 0


def render(info: CheckpointInfo) -> RenderableType:
    """One checkpoint for a terminal."""
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    facts = Grid.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, value in {
        info.kind: info.path,
        "whole": info.fault or ("yes: sizes and checksums are right" if info.verified else "yes"),
        "module": info.module,
        "made by": ", ".join(
            f"{name} {value}" for name, value in info.versions.items() if name in ("footplate", "torch")
        )
        if info.kind == "checkpoint"
        else info.versions.get("made_by"),
        "converted from": info.versions.get("made_by") if info.kind == "checkpoint" else None,
        "when": _when(info),
        "epoch": None if info.epoch is None else f"{info.epoch} (from 0), {_place(info)}",
        "step": None if info.global_step is None else f"{info.global_step:,}",
        "metrics": "  ".join(f"{name} {value:.6g}" for name, value in info.metrics.items()),
        "size": None if info.nbytes is None else _size(info.nbytes),
        "weights": ", ".join(f"{count:,} {dtype}" for dtype, count in info.weights.items()),
        "position": "  ".join(f"{name} {value}" for name, value in info.position.items()),
        "resuming": "no: it holds weights only" if info.weights_only else None,
    }.items():
        if value:
            facts.add_row(Text(name, style="cyan"), Text(value))
    for part, nbytes in info.parts.items():
        facts.add_row(Text(part, style="cyan"), Text(_size(nbytes) if nbytes else "plain values"))
    return facts


def render_all(found: list[CheckpointInfo]) -> RenderableType:
    """The checkpoints of a run for a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(Column("checkpoint", overflow="fold"), "when", "epoch", "step", "size", "whole", box=box.SIMPLE_HEAD)
    for info in found:
        name = info.path.rpartition("/")[2] + (" (newest)" if info.newest else "")
        said = "" if info.epoch is None else str(info.epoch)
        step = "" if info.global_step is None else f"{info.global_step:,}"
        size = "" if info.nbytes is None else _size(info.nbytes)
        whole = "no" if info.fault else "verified" if info.verified else "yes"
        grid.add_row(*map(Text, (name, _when(info), said, step, size, whole)))
    return Group(grid, *(Text(info.fault) for info in found if info.fault))


def _place(info: CheckpointInfo) -> str:
    return f"{info.batch_idx:,} batches of it done" if info.batch_idx else "none of its batches done"


def _when(info: CheckpointInfo) -> str:
    return "" if info.created is None else f"{datetime.fromtimestamp(info.created):%Y-%m-%d %H:%M:%S}"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
