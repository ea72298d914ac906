"""`footplate jobs translate FILE --to vertex|ray|kubeflow|slurm [options] [-- ARGUMENTS]`: a job in another system's words.

The options are those of `jobs submit training` that say something of the job, for what the file leaves open. What is
printed can be given to that system as it is; notes about it go to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from footplate.cli import plain
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace


def parser(name: str = "jobs translate", kind: Any = plain.Parser) -> Any:
    """The parser of `jobs translate`."""
    from footplate.jobs.spec.flags import KEYS
    from footplate.jobs.spec.problems import dotted

    made = plain.make(
        kind,
        name,
        "Say a job in another system's words. Options win over the file; after -- come the program's arguments.",
    )
    made.add_argument("file", help="a config.yaml")
    made.add_argument("--to", choices=["vertex", "ray", "kubeflow", "slurm"], required=True, help="the other system")
    made.add_argument("--name", help="the job's name, if the file has none")
    made.add_argument(
        "--format",
        choices=["json", "yaml"],
        help="how to print it; by default as that system likes it",
    )
    for flag, path in KEYS.items():
        made.add_argument(f"--{flag}", help=dotted(path))
    return made


def run(given: Namespace, args: Sequence[str]) -> int:
    """Print the translation; returns 0.

    Raises:
        FootplateError: a mistake in the file or the options; the other system can't run the job.
    """
    from footplate.jobs.spec import flags
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.resolving import resolve
    from footplate.jobs.spec.yamlfile import load
    from footplate.jobs.translate import translate

    named = {flag: value for flag in flags.KEYS if (value := getattr(given, flag.replace("-", "_"))) is not None}
    job = resolve(draft(load(given.file), named, args, given.name, partial=True))
    made = translate(job, given.to)
    form = given.format or made.form
    if isinstance(made.document, str):
        if given.format:
            raise ConfigError(
                f"--format {given.format}: for {given.to} it is a script, which has one form. Leave it out."
            )
        print(made.document, end="")
    elif form == "json":
        print(json.dumps(made.document, indent=2, ensure_ascii=False))
    else:
        import yaml

        print(yaml.safe_dump(made.document, sort_keys=False, allow_unicode=True, width=120), end="")
    for note in (*job.notices, *made.notes):
        print(note, file=sys.stderr)
    return 0
