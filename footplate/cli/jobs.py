"""`footplate jobs submit training NAME [options] -- ARGUMENTS`, `footplate jobs check FILE`, and the other actions.

Submitting takes gcloud's flags and its config.yaml, as people have them from AI Platform Training. Flags win over the file.
What follows `--` is the program's; an option on the wrong side of it is answered with where it belongs.

`submit` returns when the job is in the queue; with `--stream-logs` it shows what the job writes, and ends with it.
`--dry-run` shows the job as it would be submitted. What can be done with a job after that is in `jobs_watch.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from footplate.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace
    from rich.console import RenderableType

    from footplate.jobs.spec.resolving import ResolvedJob

_FLAGS = {
    "module-name": "the module that is run, such as trainer.task",
    "job-dir": "where the job's outputs go: gs://, s3:// or a path; the program is given it as --job-dir",
    "region": "such as us-central1",
    "packages": "further packages to install, with commas between them",
    "scale-tier": "BASIC, STANDARD_1, PREMIUM_1, BASIC_GPU, BASIC_TPU or CUSTOM",
    "labels": "KEY=VALUE, with commas between them",
    "max-running-time": "after which the job is cancelled, such as 2h or 7200s",
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


def parser(name: str) -> ArgumentParser:
    """The parser of `jobs`, without its actions."""
    from footplate.cli.parsing import make_parser

    return make_parser(name, "Submit training jobs, and check their configuration.")


def add_actions(made: ArgumentParser, only: str | None = None) -> None:
    """Add `submit training`, `check` and the others to the parser; of those that take time to make, perhaps only one."""
    from footplate.cli import jobs_watch, translate
    from footplate.cli.formats import add_format
    from footplate.cli.parsing import make_parser

    submit = make_parser("jobs submit", "Submit a job.")
    check = make_parser("jobs check", "Say all that is wrong with a job's config.yaml. Exit code 1 if something is.")
    check.add_argument("file", type=str, help="a config.yaml")
    check.add_argument(
        "--modernize", action="store_true", help="rewrite the file: today's machines for those that are gone"
    )
    add_format(check)
    commands = made.add_subcommands(dest="action")
    commands.add_subcommand("submit", submit, help="submit a job")
    commands.add_subcommand("check", check, help="is a job's config.yaml right")
    if only in (None, "translate"):
        commands.add_subcommand("translate", translate.parser(), help="say a job in another system's words")
    jobs_watch.add_to(commands, only)
    if only in (None, "submit"):
        submit.add_subcommands(dest="kind").add_subcommand("training", _training(), help="a training job")


def _training() -> ArgumentParser:
    from footplate.cli.formats import add_format
    from footplate.cli.parsing import make_parser

    made = make_parser(
        "jobs submit training", "Submit a training job. Options win over the file; what follows -- is the program's."
    )
    made.add_argument("name", type=str, help="the job's name: letters, digits and underscores, a letter first")
    made.add_argument("--config", type=str | None, default=None, help="a config.yaml: trainingInput: …")
    made.add_argument("--package-path", type=str | None, default=None, help="the directory of the program's package")
    for flag, about in _FLAGS.items():
        made.add_argument(f"--{flag}", type=str | None, default=None, help=about)
    for role in _ROLES:
        for what, about in _ROLE_FLAGS.items():
            if (role, what) != ("master", "count"):
                names = [f"--{role}-{what}", *_older(f"{role}-{what}")]
                made.add_argument(*names, type=str | None, default=None, help=f"of the {role}: {about}")
    made.add_argument("--modernize", action="store_true", help="take today's machines for those that are gone")
    made.add_argument("--dry-run", action="store_true", help="check the job, and print it as it would be submitted")
    made.add_argument("--backend", type=Literal["local"], default="local", help="where it runs: on this machine")
    made.add_argument("--stream-logs", action="store_true", help="show what the job writes, until it ends")
    made.add_argument("--async", action="store_true", help="return when the job is in the queue; so it is by default")
    add_format(made, "yaml")
    return made


def _older(flag: str) -> list[str]:
    from footplate.jobs.spec.flags import ALIASES

    return [f"--{old}" for old, new in ALIASES.items() if new == flag]


def run(name: str, argv: Sequence[str]) -> int:
    """Submit, check or another action; returns 1 when a checked file has problems, or a job that was waited for failed.

    Raises:
        FootplateError: a mistake in the arguments; the job can't be submitted as it is.
    """
    from footplate.cli import jobs_watch, translate
    from footplate.cli.parsing import parse

    made = parser(name)
    end = list(argv).index("--") if "--" in argv else len(argv)
    ours, args = list(argv[:end]), list(argv[end + 1 :])
    add_actions(made, ours[0] if ours and ours[0] in ("submit", "translate", *jobs_watch.ACTIONS) else None)
    if ours[:2] == ["submit", "training"]:
        _refuse_strangers(ours[2:])
    elif args and ours[:1] != ["translate"]:
        raise ConfigError(f'-- {" ".join(args)}: only "jobs submit training" passes arguments on to a program.')
    given = parse(made, ours)
    if given.action == "translate":
        return translate.run(given.translate, args)
    if given.action == "check":
        return _check(given.check.file, given.check.modernize, given.check.format)
    if given.action in jobs_watch.ACTIONS:
        return jobs_watch.run(given.action, given[given.action])
    return _submit(given.submit.training, args)


@functools.cache
def options() -> set[str]:
    """The options of `jobs submit training`."""
    return {option for action in _training()._actions for option in action.option_strings}


def _refuse_strangers(ours: Sequence[str]) -> None:
    """Refuse options before `--` that are not ours: they are misspelt, or the program's."""
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


def _submit(given: Namespace, args: list[str]) -> int:
    from footplate.cli.formats import show_as
    from footplate.jobs.spec import flags
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.modernizing import apply
    from footplate.jobs.spec.problems import SpecError
    from footplate.jobs.spec.resolving import problems, resolve
    from footplate.jobs.spec.yamlfile import load

    named = {flag: value for flag in flags.KEYS if (value := given[flag.replace("-", "_")]) is not None}
    asked = draft(load(given.config) if given.config else None, named, args, given.name)
    found = [*problems(asked), *_package_problems(given, named.get("module-name"), asked.values)]
    hints = misplaced(args, {f"--{flag}" for flag in named})
    if found:
        error = SpecError(found)
        raise SpecError(found) if not hints else ConfigError("\n".join([str(error), *hints]))
    for hint in hints:
        print(hint, file=sys.stderr)
    job = resolve(apply(asked) if given.modernize else asked)
    for notice in job.notices:
        print(f"{notice} --modernize takes it." if "equivalent" in notice else notice, file=sys.stderr)
    if not given.dry_run:
        return _run(job, given)
    shown = {**job.to_dict(), "packagePath": given.package_path}
    show_as(given.format, shown, lambda: render(job))
    return 0


def _run(job: ResolvedJob, given: Namespace) -> int:
    from footplate.cli.jobs_watch import stream
    from footplate.jobs.verbs import Jobs

    if given["async"] and given.stream_logs:
        raise ConfigError("--async returns at once, and --stream-logs waits for the job's end: give one of them.")
    jobs = Jobs.here()
    for notice in jobs.submit(job, Path(given.package_path) if given.package_path else None):
        print(notice, file=sys.stderr)
    if given.stream_logs:
        return stream(jobs, given.name)
    print(
        f"{given.name} is submitted. See it:\n  footplate jobs describe {given.name}\n"
        f"  footplate jobs stream-logs {given.name}"
    )
    return 0


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


def _package_problems(given: Namespace, module: str | None, values: dict[str, Any]) -> list[Any]:
    """What is wrong with the package on this machine: it isn't there, or has no such module."""
    from footplate.jobs.spec.problems import Problem

    spec = values.get("trainingInput")
    spec = spec if isinstance(spec, dict) else {}
    if given.package_path is None:
        config = spec.get("masterConfig")
        if spec.get("packageUris") or (isinstance(config, dict) and config.get("imageUri")):
            return []
        return [Problem((), "no program: give its package with --package-path, or --packages, or an image.")]
    path = Path(given.package_path)
    try:
        there = (path / "__init__.py").is_file()
    except ValueError:  # a NUL in it
        there = False
    if not there:
        text = f"{given.package_path!r} is no package: expected a directory with an __init__.py."
        return [Problem((), text, "--package-path")]
    module = module or spec.get("pythonModule")
    if not isinstance(module, str):
        return []
    package, _, rest = module.partition(".")
    inside = path.joinpath(*rest.split(".")) if rest else path / "__main__"
    if package != path.resolve().name or not all(part.isidentifier() for part in rest.split(".") if rest):
        return []  # a module of another package, or no module at all, of which the spec tells
    if inside.with_suffix(".py").is_file() or (inside / "__main__.py").is_file():
        return []
    text = f"{given.package_path} has no module {module}: expected {inside.with_suffix('.py')}."
    return [Problem((), text, "--module-name" if given.module_name else "")]


def _check(file: str, modernize: bool, form: Any) -> int:
    from footplate.cli.formats import show_as
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.modernizing import rewrite
    from footplate.jobs.spec.problems import dotted
    from footplate.jobs.spec.resolving import problems, resolve
    from footplate.jobs.spec.yamlfile import load

    document = load(file)
    asked = draft(document, partial=True)
    found = problems(asked)
    job = None if found else resolve(asked)
    notices = list(job.notices) if job else []
    changed: list[str] = []
    if modernize and not found:
        text, made = rewrite(document)
        if made:
            _replace(Path(file), text)
        changed, notices = [str(change) for change in made], []
    answer = {
        "file": file,
        "valid": not found,
        "problems": [{"key": dotted(one.path), "place": one.place, "problem": one.text} for one in found],
        "notices": notices,
        "changed": changed,
    }
    lines = [*map(str, found), *notices] or [f"{file}: nothing is wrong with it."]
    if modernize and not found:
        lines = [f"{file}: changed", *(f"  {one}" for one in changed)] if changed else [f"{file}: is of today already."]
    show_as(form, answer, lambda: "\n".join(lines))
    return int(bool(found))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, with the permissions that it has."""
    import os
    import tempfile

    path = path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(name).chmod(path.stat().st_mode)
        Path(name).replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from None


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
