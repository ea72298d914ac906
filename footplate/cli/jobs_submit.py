"""`footplate jobs submit training NAME [options] -- ARGUMENTS`: gcloud's flags, and its config.yaml.

A flag overrides the file. Everything after `--` belongs to the program. For an option on the wrong side of `--`, the
message says where it belongs. The command returns when the job is in the queue; with `--stream-logs` it prints the job's
output, and returns when the job ends. `--dry-run` prints the job as it would be submitted, or the request that a service
would get.

This file turns words into a `Submission`, and prints the result; `footplate.jobs.submission` does the work.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.backend_options import add_backend, backend_options
from footplate.cli.formats import add_format
from footplate.core.errors import ConfigError
from footplate.jobs import process_env

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import RenderableType

    from footplate.jobs.spec.resolving import ResolvedJob
    from footplate.jobs.submission import PlannedJob

_FLAGS = {
    "module-name": "the module to run, such as trainer.task",
    "job-dir": "the directory for the job's outputs: gs://, s3://, abfss:// or a path; the program gets it as --job-dir",
    "region": "such as us-central1",
    "packages": "further packages to install, separated by commas",
    "scale-tier": "BASIC, STANDARD_1, PREMIUM_1, BASIC_GPU, BASIC_TPU or CUSTOM",
    "labels": "KEY=VALUE, separated by commas",
    "max-running-time": "end the job after this time, and count it as failed, such as 2h or 7200s",
    "max-wait-time": "cancel the job if it has not started after this time",
    "priority": "0 to 1000; a job with a higher priority starts earlier",
    "runtime-version": "AI Platform's runtime version; an image has its own",
    "python-version": "such as 3.11",
    "use-chief-in-tf-config": "true or false: TF_CONFIG calls the master chief",
    "network": "the network to peer the machines with",
    "service-account": "the account that the program runs as",
}
_ROLES = ("master", "worker", "parameter-server", "evaluator")
_ROLE_FLAGS = {
    "machine-type": "the machine type, such as n1-standard-8",
    "count": "the number of machines",
    "accelerator": "accelerators of each machine, such as count=4,type=nvidia-tesla-t4",
    "image-uri": "the container image",
}


def parser() -> Parser:
    """The parser of `jobs submit training`."""
    command = make_parser(
        "jobs submit training",
        "Submit a training job. An option overrides the file. Everything after -- belongs to the program.",
    )
    command.add_argument("name", help="the job's name: letters, digits and underscores, starting with a letter")
    command.add_argument("--config", help="a config.yaml: trainingInput: …")
    command.add_argument("--package-path", help="the directory of the program's package")
    for flag, about in _FLAGS.items():
        command.add_argument(f"--{flag}", help=about)
    for role in _ROLES:
        for option, about in _ROLE_FLAGS.items():
            if (role, option) != ("master", "count"):
                names = [f"--{role}-{option}", *_older(f"{role}-{option}")]
                command.add_argument(*names, help=f"{role}: {about}")
    command.add_argument(
        "--env",
        action="append",
        metavar="NAME[=VALUE]",
        help="a variable for the program, on this machine or on Slurm; without a value, that of this shell; repeatable",
    )
    command.add_argument("--modernize", action="store_true", help="replace machines that no longer exist")
    command.add_argument("--dry-run", action="store_true", help="check the job, and print it as it would be submitted")
    add_backend(command, "where the job runs: on this machine, a Ray or Slurm cluster, or Vertex AI")
    command.add_argument("--stream-logs", action="store_true", help="print the job's output until the job ends")
    command.add_argument(
        "--async", action="store_true", help="return when the job is in the queue; this is the default"
    )
    add_format(command, None)
    return command


def _older(flag: str) -> list[str]:
    from footplate.jobs.spec.flags import ALIASES

    return [f"--{old}" for old, new in ALIASES.items() if new == flag]


@functools.cache
def options() -> set[str]:
    """The options of `jobs submit training`."""
    return {option for action in parser()._actions for option in action.option_strings}


def refuse_unknown_options(words: Sequence[str]) -> None:
    """Refuse an unknown option before `--`: it is misspelt, or belongs to the program.

    Raises:
        ConfigError: there is an unknown option.
    """
    known = options()
    for word in words:
        option = word.partition("=")[0]
        if not option.startswith("-") or option in known or _is_number(option):
            continue
        from footplate.catalog.lookup import nearest
        from footplate.jobs.spec.flags import OF_GCLOUD

        if option.removeprefix("--") in OF_GCLOUD:
            raise ConfigError(f"{option} is an option of gcloud that jobs submit training doesn't have: leave it out.")
        hint = nearest(option, known)
        raise ConfigError(
            f"{option}: jobs submit training has no such option.{hint} If it belongs to your program, write it after --: "
            f"footplate jobs submit training … -- {word}"
        )


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdigit()


def run(parsed: Namespace, args: list[str]) -> int:
    """Submit a job. Returns 1 if `--stream-logs` waited for the job, and the job failed.

    Raises:
        FootplateError: the job can't be submitted as it is.
    """
    planned = _plan(parsed, args)
    for notice in planned.job.notices:
        print(f"{notice} --modernize does this." if "equivalent" in notice else notice, file=sys.stderr)
    return _dry_run(parsed, planned) if parsed.dry_run else _submit(parsed, planned)


def _plan(parsed: Namespace, args: list[str]) -> PlannedJob:
    """Translate the command line, and plan the job."""
    from footplate.jobs.spec import flags
    from footplate.jobs.spec.problems import SpecError
    from footplate.jobs.submission import PackageInput, Submission, plan

    _refuse_contradictions(parsed)
    document = None
    if parsed.config:
        # Import YAML here: a job made of flags doesn't need it.
        from footplate.jobs.spec.yamlfile import load

        document = load(parsed.config)
    named = {flag: value for flag in flags.KEYS if (value := getattr(parsed, flag.replace("-", "_"))) is not None}
    submission = Submission(
        name=parsed.name,
        package_input=PackageInput(
            (), "--package-path", "give its package with --package-path, or --packages, or an image."
        ),
        document=document,
        flags=named,
        args=args,
        package=Path(parsed.package_path) if parsed.package_path is not None else None,
        modernize=parsed.modernize,
        backend=parsed.backend,
        options=backend_options(parsed),
        variables=process_env.from_option(parsed.env or (), os.environ),
    )

    hints = misplaced(args, {f"--{flag}" for flag in named})
    try:
        planned = plan(submission)
    except SpecError as error:
        if not hints:
            raise
        raise ConfigError("\n".join([str(error), *hints])) from None
    for hint in hints:
        print(hint, file=sys.stderr)
    return planned


def _submit(parsed: Namespace, planned: PlannedJob) -> int:
    from footplate.cli.jobs_watch import stream, tell
    from footplate.jobs.operations import Jobs
    from footplate.jobs.submission import submit

    jobs = Jobs.from_env()
    for notice in submit(planned, jobs):
        print(notice, file=sys.stderr)
    if parsed.stream_logs:
        return stream(jobs, parsed.name)
    see = f"footplate jobs describe {parsed.name}\n  footplate jobs stream-logs {parsed.name}"
    tell(jobs, parsed, f"{parsed.name} is submitted. See it:\n  {see}")
    return 0


def _dry_run(parsed: Namespace, planned: PlannedJob) -> int:
    from footplate.cli.formats import show_as
    from footplate.jobs.submission import dry_run

    result = dry_run(planned)
    for notice in result.notices:
        print(notice, file=sys.stderr)
    job = planned.job
    described = {**job.to_dict(), "packagePath": parsed.package_path, "env": sorted(planned.variables)}
    show_as(parsed.format or "yaml", result.request or described, lambda: render(job))
    return 0


def _refuse_contradictions(parsed: Namespace) -> None:
    if vars(parsed)["async"] and parsed.stream_logs:
        raise ConfigError("--async returns at once, and --stream-logs waits until the job ends: give one of them.")
    if parsed.format and parsed.stream_logs:
        raise ConfigError("--format describes the job, and --stream-logs prints its output: give one of them.")


def misplaced(args: Sequence[str], named: set[str]) -> list[str]:
    """Hints about options of this command among the program's arguments.

    Args:
        args: the words after `--`.
        named: the options before `--`.

    Raises:
        ConfigError: `--job-dir` is among the arguments. The program gets it anyway.
    """
    words = list(dict.fromkeys(word.partition("=")[0] for word in args))
    if "--job-dir" in words:
        raise ConfigError(
            "--job-dir is after --, so it would be the program's own. Write it before --: then Footplate checks it, and "
            "still passes it to the program."
        )
    return [
        f"{word} is after --, so it belongs to the program. If it is meant for the job, write it before --."
        for word in words
        if word in options() - {"-h", "--help"} and word not in named
    ]


def render(job: ResolvedJob) -> RenderableType:
    """A resolved job for a terminal."""
    import shlex

    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    from footplate.catalog.rows import catalog
    from footplate.cli.formats import grid

    facts = Grid.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, value in {
        "job": job.name,
        "region": job.region,
        "job directory": job.job_dir,
        "scale tier": job.scale_tier,
        "runs": shlex.join(job.command),
        "at most": job.max_running_time,
        "labels": ", ".join(f"{key}={value}" for key, value in job.labels.items()),
    }.items():
        if value:
            facts.add_row(Text(name, style="cyan"), Text(value))
    rows = []
    for replica in job.replicas:
        machine = catalog().machines[replica.machine.machine]
        short = catalog().accelerators[replica.machine.accelerator].short if replica.machine.accelerator else ""
        rows.append(
            {
                "role": replica.role.replace("_", " "),
                "count": replica.count,
                "machine": machine.name,
                "vcpus": machine.vcpus,
                "memory_gb": machine.memory_gb,
                "accelerators": f"{replica.machine.count} {short}" if short else "",
                "image": replica.image_uri,
            }
        )
    columns = {
        "role": "role",
        "count": "machines",
        "machine": "machine type",
        "vcpus": "vCPU",
        "memory_gb": "GB",
        "accelerators": "accelerators",
        "image": "image",
    }
    return Group(facts, grid(rows, columns, "image"))
