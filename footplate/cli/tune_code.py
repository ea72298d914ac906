"""The program of a trial of `footplate tune`: `footplate fit`, with the code and the configuration of the submission.

A tuning may run for days, and meanwhile its user edits. So the submission makes a package of the Python and configuration
files below the current directory (`code_package`). A trial runs this module, which imports the user's modules from that
package, and reads the configuration files that are in it. The current directory is that of the submission, so relative
paths to data stay the same.

    python -m footplate.cli.tune_code --config run.yaml --model.lr=0.01 --job-dir runs/lr/7
    footplate fit --config CODE/run.yaml --model.lr=0.01 --trainer.default_root_dir runs/lr/7

Trials begin from forks of a process that has imported what they import (`jobs/fork_server`). `trial_imports` tells what
that is, since the source of this module doesn't.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from footplate.core.errors import ConfigError
from footplate.jobs.fork_server.imports import imported_names

MODULE = "footplate.cli.tune_code"
PACKAGE = "footplate_tuned"
VARIABLE = "FOOTPLATE_TRIAL_CODE"
_SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml")
_LEFT_OUT = (
    "runs", "mlruns", "wandb", "lightning_logs", "node_modules", "site-packages", "__pycache__", "build", "dist", ".*",
)  # fmt: skip
_MOST = 5_000
# What `footplate fit` imports until its first step.
_FIT = ("footplate.cli.main", "footplate.cli.fit", "footplate.Trainer", "torch._dynamo")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def code_package(directory: Path, into: Path) -> Path:
    """Make a package of the code below a directory.

    Args:
        directory: the directory of the submission.
        into: an empty folder for the package.

    Raises:
        ConfigError: there is too much code for a project.
    """
    package = into / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    for count, file in enumerate(_code_below(directory)):
        if count >= _MOST:
            raise ConfigError(
                f"more than {_MOST:,} files of code are below {directory}. Run footplate tune in your project's directory."
            )
        target = package / "files" / file.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return package


def trial_imports(directory: Path, configs: Sequence[str], words: Sequence[str]) -> list[str]:
    """The names that the trials import: those of `footplate fit`, and those of the user's modules that are named.

    Args:
        directory: the directory of the submission.
        configs: the configuration files, relative to it.
        words: the arguments of `footplate fit`.
    """
    texts = [*words, *((directory / path).read_text(errors="replace") for path in configs)]
    named = {word for text in texts for word in _DOTTED.findall(text)}
    modules = [
        module
        for word in sorted(named)
        for module in (word, word.rpartition(".")[0])
        if module and directory.joinpath(*module.split(".")).with_suffix(".py").is_file()
    ]
    return list(dict.fromkeys([*_FIT, *imported_names(modules, directory)]))


def fit_arguments(words: Sequence[str], code: Path) -> list[str]:
    """The arguments of `footplate fit` in a trial.

    Args:
        words: the arguments of the trial's process.
        code: the files of the package.
    """
    arguments = [_in_code(word, code) for word in words]
    at = arguments.index("--job-dir")
    return [*arguments[:at], "--trainer.default_root_dir", *arguments[at + 1 :]]


def main() -> int:
    """Run a trial. Returns the exit code of `footplate fit`."""
    from footplate.cli.main import main as footplate

    code = Path(importlib.import_module(PACKAGE).__path__[0]) / "files"
    os.environ[VARIABLE] = str(code)
    return footplate(["fit", *fit_arguments(sys.argv[1:], code)])


def _in_code(word: str, code: Path) -> str:
    """A configuration file as it was submitted; another word as it is."""
    option, sign, value = word.rpartition("=")
    path = Path(value)
    if not value.endswith(_SUFFIXES) or path.is_absolute() or not (code / path).is_file():
        return word
    return f"{option}{sign}{code / path}"


def _code_below(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(
            name
            for name in folders
            if not any(fnmatchcase(name, pattern) for pattern in _LEFT_OUT)
            and not (Path(folder) / name / "pyvenv.cfg").is_file()
        )
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(_SUFFIXES))


if __name__ == "__main__":
    sys.exit(main())
