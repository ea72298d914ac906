"""`footplate new DIR --recipe NAME`: copy a recipe, a small program that you change into your own.

The recipes are in `examples/recipes`. The wheel has them in `footplate/recipes`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import footplate
from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        help: what it trains, in one line.
        start: the command that makes its tables and trains.
    """

    help: str
    start: str


SCRIPT = "python data.py && python train.py"
CONFIG = "python data.py && footplate fit --config run.yaml"

RECIPES = {
    "tabular": Recipe("numbers and categories of a table, beside boosted trees of scikit-learn", SCRIPT),
    "image": Recipe("images, by a network of timm, torchvision or yours", CONFIG),
    "transfer": Recipe("few images, on a pretrained backbone", CONFIG),
    "two_tower": Recipe("recommendations from a table of purchases, with recall@k", SCRIPT),
    "time_series": Recipe("forecasts from windows of series, beside a seasonal naive forecast", SCRIPT),
    "language_model": Recipe(
        "a language model, fine-tuned with LoRA on a table of tokens",
        "python data.py && python base.py && footplate fit --config run.yaml",
    ),
}


def parser(name: str) -> Parser:
    """Make the parser of `new`."""
    parser = make_parser(name, "Copy a recipe into a new directory: a small program that you change into your own.")
    parser.add_argument("directory", nargs="?", help="the directory to make; it must be empty if it exists")
    parser.add_argument("--recipe", choices=list(RECIPES), help="the recipe to copy; --list describes them")
    parser.add_argument("--list", action="store_true", help="list the recipes")
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Copy a recipe, and print how to start it; returns the exit code.

    Raises:
        ConfigError: a mistake in the arguments; the directory isn't empty, or can't be written.
    """
    args = parser(name).parse_args(argv)
    if args.list:
        print("\n".join(f"{recipe:<16}{about.help}" for recipe, about in RECIPES.items()))
        return 0
    if args.directory is None:
        raise ConfigError("directory: not given. Name the directory to make: footplate new flowers --recipe image")
    if args.recipe is None:
        raise ConfigError(f"--recipe: not given. Expected one of: {', '.join(RECIPES)}.")

    copy(args.recipe, Path(args.directory))
    print(f"{args.directory} has the recipe {args.recipe}. Its README.md explains it. Next:")
    print(f"  cd {args.directory} && pip install -r requirements.txt")
    print(f"  {RECIPES[args.recipe].start}")
    return 0


def copy(recipe: str, directory: Path) -> None:
    """Copy a recipe into a directory that is empty or doesn't exist. A copy that fails leaves no file.

    Raises:
        ConfigError: the directory isn't empty, or can't be written.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            kind = "isn't empty" if directory.is_dir() else "is a file"
            raise ConfigError(f"directory={directory}: it {kind}. Name a directory that is empty or doesn't exist.")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".partial-") as partial:
            files = shutil.copytree(
                _recipes() / recipe, Path(partial) / recipe, ignore=shutil.ignore_patterns("__pycache__")
            )
            for path in files.iterdir():
                path.rename(directory / path.name)
    except OSError as error:
        raise ConfigError(f"directory={directory}: {error.strerror}. Name a directory that you can write.") from None


def _recipes() -> Path:
    """The directory of the recipes: in the installed package, or in a clone."""
    package = Path(footplate.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "examples" / "recipes"
