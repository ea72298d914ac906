"""`footplate replay RUN --step N`: train a step of a run again, and show its batch, loss and gradients."""

from __future__ import annotations

import bdb
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format, show_as
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from footplate.replaying.replay import Replay


def parser(name: str) -> Parser:
    """Make the parser of `replay`."""
    parser = make_parser(
        name,
        "Train a step of a run of `footplate fit` again, bit for bit, from the newest checkpoint before it. Start it where "
        "the run was started. The run's directory stays as it is.",
    )
    parser.add_argument("run", help="the directory of a run, or the checkpoint to begin from")
    parser.add_argument("--step", type=int, required=True, help="the optimizer step; the first one is 1")
    parser.add_argument("--debug", action="store_true", help="enter the debugger in training_step, at that step")
    parser.add_argument("--output", help="write the batches, losses and gradients to this file, for torch.load")
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Replay the step; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; the run can't be rebuilt, or doesn't reach the step.
    """
    args = parser(name).parse_args(argv)
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"--output={args.output}: its directory doesn't exist.")

    from footplate.replaying.replay import replay

    # What the program of the run prints doesn't belong to JSON or YAML.
    try:
        with contextlib.nullcontext() if args.format == "table" else contextlib.redirect_stdout(sys.stderr):
            replayed = replay(args.run, args.step, debug=args.debug)
    except bdb.BdbQuit:
        return 0
    if args.output is not None:
        _write(replayed, args.output)
    show_as(args.format, summary(replayed), lambda: render(replayed))
    return 0


def _write(replayed: Replay, path: str) -> None:
    import torch

    names = ("step", "epoch", "batch_indices", "batches", "losses", "gradients")
    torch.save({name: getattr(replayed, name) for name in names}, path)


def summary(replayed: Replay) -> dict[str, Any]:
    """Describe a replayed step in plain values. Numbers are given exactly, as hexadecimal floats too."""
    return {
        "step": replayed.step,
        "epoch": replayed.epoch,
        "batch_indices": replayed.batch_indices,
        "checkpoint": replayed.checkpoint,
        "first_step": replayed.first_step,
        "begins_inside": replayed.begins_inside,
        "batches": [[dict(_tensors(batch)) for batch in of_rank] for of_rank in replayed.batches],
        "losses": [[None if loss is None else float(loss) for loss in of_rank] for of_rank in replayed.losses],
        "losses_hex": [
            [None if loss is None else float(loss).hex() for loss in of_rank] for of_rank in replayed.losses
        ],
        "gradients": {name: _figures(gradient) for name, gradient in replayed.gradients.items()},
    }


def _tensors(batch: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path, type and shape of each tensor of a batch."""
    import torch

    if isinstance(batch, torch.Tensor):
        yield path or "batch", f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    elif isinstance(batch, Mapping):
        for name, value in batch.items():
            yield from _tensors(value, f"{path}.{name}" if path else str(name))
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from _tensors(value, f"{path}[{index}]")
    else:
        yield path or "batch", type(batch).__name__


def _figures(gradient: Tensor) -> dict[str, Any]:
    values = gradient.double() if gradient.is_floating_point() else gradient.abs().double()
    finite = values.isfinite()
    return {
        "shape": list(gradient.shape),
        "norm": float(values.norm()),
        "largest": float(values[finite].abs().max()) if bool(finite.any()) else None,
        "not_finite": int((~finite).sum()),
    }


def render(replayed: Replay) -> RenderableType:
    """Draw the batches, the losses and a table of the gradients."""
    from rich import box
    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    begin = "the beginning of the run" if replayed.checkpoint is None else replayed.checkpoint
    again = replayed.step - 1 - replayed.first_step
    steps = "1 step" if again == 1 else f"{again:,} steps"
    lines = [f"step {replayed.step:,} of epoch {replayed.epoch}, {steps} after {begin}"]
    if replayed.begins_inside:
        lines.append("That checkpoint is between two batches of the step: only the later batches are here.")
    for rank, (batches, losses) in enumerate(zip(replayed.batches, replayed.losses, strict=True)):
        for index, batch, loss in zip(replayed.batch_indices, batches, losses, strict=True):
            content = ", ".join(f"{name} {kind}" for name, kind in _tensors(batch))
            value = "skipped" if loss is None else f"loss {float(loss)!r}"
            lines.append(f"rank {rank}, batch {index}: {value}; {content}")

    columns = [Column(name, justify="right") for name in ("norm", "largest", "not finite")]
    grid = Grid(Column("gradient", overflow="fold"), "shape", *columns, box=box.SIMPLE_HEAD)
    for name, gradient in replayed.gradients.items():
        figures = _figures(gradient)
        largest = "" if figures["largest"] is None else f"{figures['largest']:.6g}"
        shape = str(tuple(figures["shape"]))
        grid.add_row(*map(Text, (name, shape, f"{figures['norm']:.6g}", largest, f"{figures['not_finite']:,}")))
    return Group(*map(Text, lines), grid)
