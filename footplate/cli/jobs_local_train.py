"""`footplate jobs local-train --package-path DIR --module-name MODULE [options] -- ARGUMENTS`: run in the foreground.

The counterpart of `gcloud ai-platform local train`, to try a program before you submit it. The module runs in the
foreground, from the package's directory, with the interpreter of this command, and with the arguments, `--job-dir` and
`TF_CONFIG` of a job. There is no queue, no copy, no installation and no retry.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.cli.arguments import Parser, make_parser
from footplate.core.errors import ConfigError
from footplate.jobs import process_env

if TYPE_CHECKING:
    from argparse import Namespace


def parser() -> Parser:
    """The parser of `jobs local-train`."""
    command = make_parser(
        "jobs local-train",
        "Run a job's program on this machine, in the foreground. Everything after -- belongs to the program.",
    )
    command.add_argument("--package-path", required=True, help="the directory of the program's package")
    command.add_argument("--module-name", required=True, help="the module to run, such as trainer.task")
    command.add_argument(
        "--job-dir",
        help="the directory for outputs: gs://, s3://, abfss:// or a path; the program gets it as --job-dir",
    )
    command.add_argument(
        "--env",
        action="append",
        metavar="NAME[=VALUE]",
        help="a variable for the program; without a value, that of this shell; repeatable",
    )
    return command


def run(parsed: Namespace, args: list[str]) -> int:
    """Replace this process by the program, so that it ends with the program's exit code.

    Raises:
        ConfigError: the package or module doesn't exist, or the job directory can't be used.
    """
    from footplate.cli.jobs_submit import misplaced
    from footplate.jobs.backends.local import BACKEND
    from footplate.jobs.cluster_env import replica_ids, tf_config
    from footplate.jobs.execution import Execution
    from footplate.jobs.package.files import by_own_name
    from footplate.jobs.package.modules import module_problem, package_problem
    from footplate.jobs.spec.draft import draft
    from footplate.jobs.spec.resolving import resolve
    from footplate.launch.rendezvous import HOST, free_addresses

    package = Path(parsed.package_path)
    named = {"module-name": parsed.module_name, **({"job-dir": parsed.job_dir} if parsed.job_dir else {})}
    misplaced(args, set())
    job = resolve(draft(None, named, args, "local_train"))
    if text := package_problem(package) or module_problem(package, parsed.module_name):
        raise ConfigError(text)
    for notice in BACKEND.check(job, {}):
        print(notice, file=sys.stderr)
    variables = process_env.from_option(parsed.env or (), os.environ)
    execution = Execution.of(job, "", Path.cwd(), {})
    if execution.job_dir is not None and "://" not in execution.job_dir:
        Path(execution.job_dir).mkdir(parents=True, exist_ok=True)
    (replica,) = replica_ids(job)
    path = [str(by_own_name(package).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    described = tf_config(job, {replica: free_addresses(HOST, 1)[0]}, replica)
    ours = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "TF_CONFIG": _json(described)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-P", *execution.arguments], {**os.environ, **ours, **variables})


def _json(value: Any) -> str:
    import json

    return json.dumps(value)
