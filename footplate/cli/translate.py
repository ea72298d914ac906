"""`footplate jobs translate FILE --to SYSTEM [options] [-- ARGUMENTS]`: a job for another system.

The options are the job's options of `jobs submit training`, for keys that the file lacks. The other system accepts the
output as it is. Notes about it go to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.formats import add_format, write
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace


def parser(name: str = "jobs translate") -> Parser:
    """The parser of `jobs translate`."""
    from footplate.jobs.spec.flags import KEYS
    from footplate.jobs.spec.problems import dotted
    from footplate.jobs.translate import TARGETS

    command = make_parser(
        name,
        "Translate a job for another system. An option overrides the file; the program's arguments follow after --.",
    )
    command.add_argument("file", help="a config.yaml")
    command.add_argument("--to", choices=list(TARGETS), required=True, help="the other system")
    command.add_argument("--name", help="the job's name, if the file has none")
    add_format(command, None, ("json", "yaml"), "the output's format; by default the usual one of that system")
    for flag, path in KEYS.items():
        command.add_argument(f"--{flag}", help=dotted(path))
    return command


def run(parsed: Namespace, args: Sequence[str]) -> int:
    """Print the translation. Returns 0.

    Raises:
        FootplateError: the file or the options have a mistake, or the other system can't run the job.
    """
    from footplate.jobs.spec import flags
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.resolving import resolve
    from footplate.jobs.spec.yamlfile import load
    from footplate.jobs.translate import translate

    named = {flag: value for flag in flags.KEYS if (value := getattr(parsed, flag.replace("-", "_"))) is not None}
    job = resolve(draft(load(parsed.file), named, args, parsed.name, partial=True))
    translation = translate(job, parsed.to)
    if translation.form == "script":
        if parsed.format:
            raise ConfigError(
                f"--format {parsed.format}: for {parsed.to} the output is a script, which has one form. Leave it out."
            )
        print(translation.document, end="")
    else:
        print(write(translation.document, parsed.format or translation.form), end="")
    for note in (*job.notices, *translation.notes):
        print(note, file=sys.stderr)
    return 0
