"""`footplate checkpoint inspect PATH` and `footplate checkpoint convert SOURCE TARGET`: show or convert checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import Format, add_format, show_as

if TYPE_CHECKING:
    from rich.console import RenderableType

    from footplate.checkpoint.inspection import CheckpointInfo


def parser(name: str) -> Parser:
    """Make the parser of `checkpoint`, without its actions."""
    return make_parser(name, "Show the content of checkpoints, and convert them.")


def add_actions(parser: Parser) -> None:
    """Add `inspect` and `convert` to the parser."""
    name = "checkpoint"
    inspect = make_parser(
        f"{name} inspect", "Show the content of a checkpoint, or of all checkpoints of a run, and check for damage."
    )
    inspect.add_argument("path", help="a checkpoint, or a directory of checkpoints; a path or a URI")
    inspect.add_argument("--verify", action="store_true", help="read every byte, and compare the checksums")
    add_format(inspect)

    convert = make_parser(f"{name} convert", "Convert a checkpoint. The suffix of the target chooses the format.")
    convert.add_argument("source", help="a checkpoint of Footplate, or a .ckpt file of Lightning")
    convert.add_argument(
        "target",
        help="NAME.safetensors: the weights; NAME.pt: a torch file, which Lightning reads too; NAME.ckpt: a checkpoint",
    )
    convert.add_argument("--force", action="store_true", help="replace an existing target")

    actions = parser.add_subcommands(dest="action")
    actions.add_subcommand("inspect", inspect, help="show the content of a checkpoint, and check for damage")
    actions.add_subcommand("convert", convert, help="write plain weights or a torch file, or read Lightning's")


def run(name: str, argv: Sequence[str]) -> int:
    """Inspect or convert; returns 1 if a checkpoint is damaged or incomplete, else 0.

    Raises:
        FootplateError: a mistake in the arguments; the checkpoint doesn't exist, or can't be converted to this format.
    """
    checkpoint_parser = parser(name)
    add_actions(checkpoint_parser)
    args = checkpoint_parser.parse_args(argv)
    if args.action == "inspect":
        return _inspect(args.path, args.verify, args.format)
    return _convert(args.source, args.target, args.force)


def _inspect(path: str, verify: bool, form: Format) -> int:
    from footplate.checkpoint.inspection import inspect

    infos = inspect(path, verify)
    descriptions = [asdict(info) for info in infos]
    show_as(form, descriptions, lambda: render(infos[0]) if len(infos) == 1 else render_all(infos))
    return int(any(info.fault for info in infos))


def _convert(source: str, target: str, force: bool) -> int:
    from footplate.checkpoint.conversion import convert

    missing = convert(source, target, force)
    print(f"Wrote {target}. {missing}".rstrip())
    return 0


def render(info: CheckpointInfo) -> RenderableType:
    """Draw the facts of one checkpoint."""
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    facts = Grid.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, value in {
        info.kind: info.path,
        "whole": info.fault or ("yes: sizes and checksums are correct" if info.verified else "yes"),
        "module": info.module,
        "made by": ", ".join(
            f"{name} {value}" for name, value in info.versions.items() if name in ("footplate", "torch")
        )
        if info.kind == "checkpoint"
        else info.versions.get("made_by"),
        "converted from": info.versions.get("made_by") if info.kind == "checkpoint" else None,
        "when": _when(info),
        "epoch": None if info.epoch is None else f"{info.epoch} (from 0), {_batches_done(info)}",
        "step": None if info.global_step is None else f"{info.global_step:,}",
        "metrics": "  ".join(f"{name} {value:.6g}" for name, value in info.metrics.items()),
        "size": None if info.nbytes is None else _size(info.nbytes),
        "weights": ", ".join(f"{count:,} {dtype}" for dtype, count in info.weights.items()),
        "left out": f"{info.frozen_weights} frozen weights" if info.frozen_weights else None,
        "position": "  ".join(f"{name} {value}" for name, value in info.position.items()),
        "resuming": "no: it has only weights" if info.weights_only else None,
    }.items():
        if value:
            facts.add_row(Text(name, style="cyan"), Text(value))
    for part, nbytes in info.parts.items():
        facts.add_row(Text(part, style="cyan"), Text(_size(nbytes) if nbytes else "plain values"))
    return facts


def render_all(infos: list[CheckpointInfo]) -> RenderableType:
    """Draw a table of the checkpoints of a run."""
    from rich import box
    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(Column("checkpoint", overflow="fold"), "when", "epoch", "step", "size", "whole", box=box.SIMPLE_HEAD)
    for info in infos:
        name = info.path.rpartition("/")[2] + (" (newest)" if info.newest else "")
        epoch = "" if info.epoch is None else str(info.epoch)
        step = "" if info.global_step is None else f"{info.global_step:,}"
        size = "" if info.nbytes is None else _size(info.nbytes)
        whole = "no" if info.fault else "verified" if info.verified else "yes"
        grid.add_row(*map(Text, (name, _when(info), epoch, step, size, whole)))
    return Group(grid, *(Text(info.fault) for info in infos if info.fault))


def _batches_done(info: CheckpointInfo) -> str:
    return f"{info.batch_idx:,} batches of it done" if info.batch_idx else "none of its batches done"


def _when(info: CheckpointInfo) -> str:
    return "" if info.created is None else f"{datetime.fromtimestamp(info.created):%Y-%m-%d %H:%M:%S}"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
