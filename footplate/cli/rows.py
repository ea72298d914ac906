"""`footplate rows RUN --step N`: name the rows of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from os.path import commonpath
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from footplate.replaying.step_rows import Row, StepRows


def parser(name: str) -> Parser:
    """Make the parser of `rows`."""
    parser = make_parser(
        name,
        "Show which rows of a table a step of a training had: table, version, file and row, for each rank. They follow "
        "from the run's checkpoint, so nothing has to be logged.",
    )
    parser.add_argument("run", help="the directory of a run, or one of its checkpoints; a path or a URI")
    parser.add_argument("--step", type=int, required=True, help="the optimizer step; the first one is 1")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Show the rows; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; the run, its table or the step isn't known.
    """
    args = parser(name).parse_args(argv)

    from footplate.replaying.step_rows import rows

    found = rows(args.run, args.step)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        from footplate.cli.formats import show

        show(render(found))
    return 0


def render(found: StepRows) -> RenderableType:
    """Draw the rows as a table, below one line about the step."""
    from rich import box
    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    tables = {row.loader: (row.table, row.version) for row in found.rows}
    several_loaders = len(tables) > 1
    is_packed = any(row.sequence is not None for row in found.rows)
    names = ["rank", "batch", *(["loader"] if several_loaders else []), *(["sequence"] if is_packed else [])]
    headings = ("row group", "row", "row in file", *(["tokens"] if is_packed else []))
    numbers = [Column(name, justify="right", no_wrap=True) for name in headings]
    grid = Grid(*names, Column("file", overflow="fold"), *numbers, box=box.SIMPLE_HEAD)
    folder = _folder_of(found.rows)
    for row in found.rows:
        loader = [str(row.loader)] if several_loaders else []
        place = [row.file.removeprefix(folder), str(row.row_group), str(row.row), str(row.row_in_file)]
        sequence, tokens = _packed_cells(row) if is_packed else ([], [])
        grid.add_row(*map(Text, (str(row.rank), str(row.batch), *loader, *sequence, *place, *tokens)))

    first, last = found.batches[0], found.batches[-1]
    batches = f"batch {first}" if first == last else f"batches {first} to {last}"
    ranks = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks"
    title = f"step {found.step:,}: {batches} of epoch {found.epoch} (all from 0), {ranks}, {len(found.rows):,} rows"
    planned = (
        "The newest checkpoint is older than this step: these are the rows that the step has by the order of the run."
    )
    lines = [title]
    for loader, (table, version) in tables.items():
        which = f"table of loader {loader}" if several_loaders else "table"
        lines.append(f"{which}: {table}" + ("" if version is None else f", version {version}"))
    lines += [f"files in {folder}"] if folder else []
    return Group(*map(Text, lines), grid, *([Text(planned)] if found.planned else []))


def _packed_cells(row: Row) -> tuple[list[str], list[str]]:
    """Return the cells of a packed document: its sequence, and its tokens there. They are empty for any other row."""
    return ([""], [""]) if row.sequence is None else ([str(row.sequence)], [f"{row.start} to {row.stop}"])


def _folder_of(rows: Sequence[Row]) -> str:
    """Return the folder that holds the files of all rows, with a slash at the end; empty if they have none in common."""
    folder = commonpath([row.file for row in rows])
    return folder[: folder.rfind("/") + 1]
