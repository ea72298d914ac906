"""`footplate rows RUN --step N`: name the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from os.path import commonprefix
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format, show_as

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
    add_format(parser)
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Show the rows; returns the exit code.

    Raises:
        FootplateError: a mistake in the arguments; the run, its table or the step isn't known.
    """
    args = parser(name).parse_args(argv)

    from footplate.replaying.step_rows import rows

    step_rows = rows(args.run, args.step)
    if args.format == "table":
        print("\n".join(heading(step_rows)))
    show_as(args.format, asdict(step_rows), lambda: render(step_rows))
    return 0


def heading(step_rows: StepRows) -> list[str]:
    """Return lines about the step, its tables and its files, which have numbers in the table below.

    The names of a Delta table's files are too long for a column.
    """
    first, last = step_rows.batches[0], step_rows.batches[-1]
    batches = f"batch {first}" if first == last else f"batches {first} to {last}"
    ranks = "1 rank" if step_rows.ranks == 1 else f"{step_rows.ranks} ranks"
    lines = [
        f"step {step_rows.step:,}: {batches} of epoch {step_rows.epoch} (all from 0), {ranks}, {len(step_rows.rows):,} rows"
    ]
    tables = _tables_of(step_rows)
    for loader, (table, version) in tables.items():
        which = f"table of loader {loader}" if len(tables) > 1 else "table"
        lines.append(f"{which}: {table}" + ("" if version is None else f", version {version}"))
    files = _files_of(step_rows)
    folder = _folder_of(files)
    lines += [f"files in {folder}"] if folder else []
    lines += [f"file {number}: {file.removeprefix(folder)}" for number, file in enumerate(files)]
    return lines


def render(step_rows: StepRows) -> RenderableType:
    """Draw the rows as a table."""
    from rich import box
    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    several_loaders = len(_tables_of(step_rows)) > 1
    is_packed = any(row.sequence is not None for row in step_rows.rows)
    names = ["rank", "batch", *(["loader"] if several_loaders else []), *(["sequence"] if is_packed else [])]
    headings = ("file", "row group", "row", "row in file", *(["tokens"] if is_packed else []))
    numbers = [Column(name, justify="right", no_wrap=True) for name in headings]
    grid = Grid(*names, *numbers, box=box.SIMPLE_HEAD)
    number_of = {file: number for number, file in enumerate(_files_of(step_rows))}
    for row in step_rows.rows:
        loader = [str(row.loader)] if several_loaders else []
        place = [str(number) for number in (number_of[row.file], row.row_group, row.row, row.row_in_file)]
        sequence, tokens = _packed_cells(row) if is_packed else ([], [])
        grid.add_row(*map(Text, (str(row.rank), str(row.batch), *loader, *sequence, *place, *tokens)))
    planned = (
        "The newest checkpoint is older than this step: these are the rows that the step has by the order of the run."
    )
    return Group(grid, *([Text(planned)] if step_rows.planned else []))


def _tables_of(step_rows: StepRows) -> dict[int, tuple[str, int | None]]:
    """Return the name and the version of the table of each loader."""
    return {row.loader: (row.table, row.version) for row in step_rows.rows}


def _files_of(step_rows: StepRows) -> list[str]:
    """Return the files of the rows, each once."""
    return list(dict.fromkeys(row.file for row in step_rows.rows))


def _packed_cells(row: Row) -> tuple[list[str], list[str]]:
    """Return the cells of a packed document: its sequence, and its tokens there. They are empty for any other row."""
    return ([""], [""]) if row.sequence is None else ([str(row.sequence)], [f"{row.start} to {row.stop}"])


def _folder_of(files: Sequence[str]) -> str:
    """Return the folder that holds all files, with a slash at the end; empty if they have none in common."""
    # `commonpath` mends "s3://" to "s3:/", and refuses a URI beside a path.
    common = commonprefix(files)  # noqa: RUF071
    return common[: common.rfind("/") + 1]
