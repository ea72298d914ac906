"""`footplate jobs submit training NAME [options] -- ARGUMENTS`: with gcloud's flags and its config.yaml.

Flags win over the file. What follows `--` is the program's; an option on the wrong side of it is answered with where it
belongs. It returns when the job is in the queue; with `--stream-logs` it shows what the job writes, and ends with it.
`--dry-run` shows the job as it would be submitted, or what a service would be asked.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.cli import plain
from footplate.cli.formats import add_format
from footplate.core.errors import ConfigError
from footplate.jobs import environment

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import RenderableType

    from footplate.jobs.spec.document import Document
    from footplate.jobs.spec.draft import Draft
    from footplate.jobs.spec.problems import Problem
    from footplate.jobs.spec.resolving import ResolvedJob

_FLAGS = {
    "module-name": "the module that is run, such as trainer.task",
    "job-dir": "where the job's outputs go: gs://, s3:// or a path; the program is given it as --job-dir",
    "region": "such as us-central1",
    "packages": "further packages to install, with commas between them",
    "scale-tier": "BASIC, STANDARD_1, PREMIUM_1, BASIC_GPU, BASIC_TPU or CUSTOM",
    "labels": "KEY=VALUE, with commas between them",
    "max-running-time": "after which the job is ended, and has failed, such as 2h or 7200s",
    "max-wait-time": "after which the job is cancelled when it has not begun",
    "priority": "from 0 to 1000; a higher one has its turn sooner",
    "runtime-version": "of AI Platform; an image has its own",
    "python-version": "such as 3.11",
    "use-chief-in-tf-config": "true or false: is the master the chief in TF_CONFIG",
    "network": "the network that the machines are peered with",
    "service-account": "which the program runs as",
}
_ROLES = ("master", "worker", "parameter-server", "evaluator")
_ROLE_FLAGS = {
    "machine-type": "such as n1-standard-8",
    "count": "how many machines",
    "accelerator": "for each machine, such as count=4,type=nvidia-tesla-t4",
    "image-uri": "the container image",
}


def parser(kind: Any = plain.Parser) -> Any:
    """The parser of `jobs submit training`."""
    from footplate.jobs.backends import OPTIONS

    made = plain.make(
        kind,
        "jobs submit training",
        "Submit a training job. Options win over the file; what follows -- is the program's.",
    )
    made.add_argument("name", help="the job's name: letters, digits and underscores, a letter first")
    made.add_argument("--config", help="a config.yaml: trainingInput: …")
    made.add_argument("--package-path", help="the directory of the program's package")
    for flag, about in _FLAGS.items():
        made.add_argument(f"--{flag}", help=about)
    for role in _ROLES:
        for what, about in _ROLE_FLAGS.items():
            if (role, what) != ("master", "count"):
                names = [f"--{role}-{what}", *_older(f"{role}-{what}")]
                made.add_argument(*names, help=f"of the {role}: {about}")
    made.add_argument(
        "--env",
        action="append",
        metavar="NAME[=VALUE]",
        help="a variable for the program, on this machine; without a value, that of this shell; may be repeated",
    )
    made.add_argument("--modernize", action="store_true", help="take today's machines for those that are gone")
    made.add_argument("--dry-run", action="store_true", help="check the job, and print it as it would be submitted")
    made.add_argument(
        "--backend",
        choices=list(OPTIONS),
        default="local",
        help="where it runs: on this machine, a Ray cluster, or Vertex AI",
    )
    for backend, place in OPTIONS.items():
        for option, about in place.items():
            made.add_argument(f"--{option}", help=f"for --backend {backend}: {about}")
    made.add_argument("--stream-logs", action="store_true", help="show what the job writes, until it ends")
    made.add_argument("--async", action="store_true", help="return when the job is in the queue; so it is by default")
    add_format(made, None)
    return made


def _older(flag: str) -> list[str]:
    from footplate.jobs.spec.flags import ALIASES

    return [f"--{old}" for old, new in ALIASES.items() if new == flag]


@functools.cache
def options() -> set[str]:
    """The options of `jobs submit training`."""
    return {option for action in parser()._actions for option in action.option_strings}


def refuse_strangers(ours: Sequence[str]) -> None:
    """Refuse options before `--` that are not ours: they are misspelt, or the program's.

    Raises:
        ConfigError: there is one.
    """
    known = options()
    for word in ours:
        option = word.partition("=")[0]
        if not option.startswith("-") or option in known or _is_number(option):
            continue
        from footplate.jobs.catalog.lookup import nearest
        from footplate.jobs.spec.flags import OF_GCLOUD

        if option.removeprefix("--") in OF_GCLOUD:
            raise ConfigError(f"{option} is gcloud's, and jobs submit training has no such option: leave it out.")
        hint = nearest(option, known)
        raise ConfigError(
            f"{option}: jobs submit training has no such option.{hint} If it is your program's, write it after --: "
            f"footplate jobs submit training … -- {word}"
        )


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdigit()


def run(given: Namespace, args: list[str]) -> int:
    """Submit a job; returns 1 when it was waited for, and has failed.

    Raises:
        FootplateError: the job can't be submitted as it is.
    """
    from footplate.cli.formats import show_as
    from footplate.jobs import backends
    from footplate.jobs.spec import flags
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.problems import SpecError
    from footplate.jobs.spec.resolving import problems, resolve

    _refuse_contradictions(given)
    variables = _variables(given)
    named = {flag: value for flag in flags.KEYS if (value := getattr(given, flag.replace("-", "_"))) is not None}
    asked = draft(_load(given.config) if given.config else None, named, args, given.name)
    found = [*problems(asked), *_package_problems(given.package_path, asked)]
    hints = misplaced(args, {f"--{flag}" for flag in named})
    if found:
        error = SpecError(found)
        raise SpecError(found) if not hints else ConfigError("\n".join([str(error), *hints]))
    for hint in hints:
        print(hint, file=sys.stderr)
    job = resolve(_modernized(asked) if given.modernize else asked)
    for notice in job.notices:
        print(f"{notice} --modernize takes it." if "equivalent" in notice else notice, file=sys.stderr)
    place = backends.located(given.backend, _place_options(given), job.job_dir)
    if not given.dry_run:
        return _enter(job, given, place, variables)
    package = Path(given.package_path) if given.package_path else None
    request, notices = backends.rehearse(given.backend, job, place, package)
    for notice in notices:
        print(notice, file=sys.stderr)
    shown = request or {**job.to_dict(), "packagePath": given.package_path, "env": sorted(variables)}
    show_as(given.format or "yaml", shown, lambda: render(job))
    return 0


def _load(config: str) -> Document:
    from footplate.jobs.spec.yamlfile import load  # with YAML, which a job of flags doesn't wait for

    return load(config)


def _modernized(asked: Draft) -> Draft:
    from footplate.jobs.spec.migration import apply

    return apply(asked)


def _place_options(given: Namespace) -> dict[str, str]:
    """The options that say where exactly. `--project` stands in most commands for gcloud, and is ignored elsewhere.

    Raises:
        ConfigError: one of them is another backend's.
    """
    from footplate.jobs.backends import OPTIONS

    named = {}
    for backend, place in OPTIONS.items():
        for option in place:
            value = getattr(given, option.replace("-", "_"))
            if value is not None and option == "project" and backend != given.backend:
                print(f"--project is ignored: it is for --backend {backend}.", file=sys.stderr)
                continue
            if value is not None and backend != given.backend:
                raise ConfigError(f"--{option} is for --backend {backend}: give that, too, or leave it out.")
            if value is not None:
                named[option] = value
    return named


def _variables(given: Namespace) -> dict[str, str]:
    """The variables of `--env`.

    Raises:
        ConfigError: one of them can't be given.
    """
    if given.env and given.backend != "local":
        raise ConfigError(
            f"--env is for jobs on this machine. On --backend {given.backend} a variable would be readable for others: let "
            "the program read it from a file or a secret manager."
        )
    return environment.given(given.env or (), os.environ)


def _enter(job: ResolvedJob, given: Namespace, place: Mapping[str, str], variables: Mapping[str, str]) -> int:
    from footplate.cli.jobs_watch import stream, tell
    from footplate.jobs.verbs import Jobs

    jobs = Jobs.from_env()
    package = Path(given.package_path) if given.package_path else None
    for notice in jobs.submit(job, package, given.backend, place, variables):
        print(notice, file=sys.stderr)
    if given.stream_logs:
        return stream(jobs, given.name)
    see = f"footplate jobs describe {given.name}\n  footplate jobs stream-logs {given.name}"
    tell(jobs, given, f"{given.name} is submitted. See it:\n  {see}")
    return 0


def _refuse_contradictions(given: Namespace) -> None:
    if vars(given)["async"] and given.stream_logs:
        raise ConfigError("--async returns at once, and --stream-logs waits for the job's end: give one of them.")
    if given.format and given.stream_logs:
        raise ConfigError(
            "--format is for what is said of the job, and --stream-logs shows what it writes: give one of them."
        )


def misplaced(args: Sequence[str], given: set[str]) -> list[str]:
    """Hints about options of ours among the program's arguments.

    Args:
        args: what follows `--`.
        given: the options before it.

    Raises:
        ConfigError: `--job-dir` is among them, which the program is given anyway.
    """
    words = list(dict.fromkeys(word.partition("=")[0] for word in args))
    if "--job-dir" in words:
        raise ConfigError(
            "--job-dir stands after --, where it is the program's own. Write it before --: it is checked, and the program "
            "is given it all the same."
        )
    return [
        f"{word} stands after --, so it is the program's. If it was meant for the job, write it before --."
        for word in words
        if word in options() - {"-h", "--help"} and word not in given
    ]


def _package_problems(path: str | None, asked: Draft) -> Iterator[Problem]:
    """What is wrong with the package on this machine: it isn't there, or has no such module."""
    from footplate.jobs.package.modules import no_module, no_package
    from footplate.jobs.spec.problems import Problem

    spec = asked.values.get("trainingInput")
    spec = spec if isinstance(spec, dict) else {}
    config, module = spec.get("masterConfig"), spec.get("pythonModule")
    if path is None:
        if not (spec.get("packageUris") or (isinstance(config, dict) and config.get("imageUri"))):
            yield Problem((), "no program: give its package with --package-path, or --packages, or an image.")
    elif text := no_package(Path(path)):
        yield Problem((), text, "--package-path")
    elif isinstance(module, str) and (text := no_module(Path(path), module)):
        yield asked.problem(("trainingInput", "pythonModule"), text)


def render(job: ResolvedJob) -> RenderableType:
    """A resolved job for a terminal."""
    import shlex

    from rich.console import Group
    from rich.table import Column
    from rich.table import Table as Grid
    from rich.text import Text

    from footplate.cli.formats import grid
    from footplate.jobs.catalog.rows import catalog

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
    for one in job.replicas:
        machine = catalog().machines[one.machine.machine]
        short = catalog().accelerators[one.machine.accelerator].short if one.machine.accelerator else ""
        rows.append(
            {
                "role": one.role.replace("_", " "),
                "count": one.count,
                "machine": machine.name,
                "vcpus": machine.vcpus,
                "memory_gb": machine.memory_gb,
                "accelerators": f"{one.machine.count} {short}" if short else "",
                "image": one.image_uri,
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
