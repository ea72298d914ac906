"""`footplate jobs local-train --package-path DIR --module-name MODULE [options] -- ARGUMENTS`: the program, here and now.

The counterpart of `gcloud ai-platform local train`: it tries a program before it is submitted. The module runs in the
foreground from the package's directory as it is, with the interpreter of this command, with the arguments, `--job-dir` and
`TF_CONFIG` that it would get in a job. There is no queue, no copy, no installation and no second attempt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.cli import plain
from footplate.core.errors import ConfigError
from footplate.jobs import process_env

if TYPE_CHECKING:
    from argparse import Namespace


def parser(kind: Any = plain.Parser) -> Any:
    """The parser of `jobs local-train`."""
    made = plain.make(
        kind, "jobs local-train", "Run a job's program here, in the foreground. What follows -- is the program's."
    )
    made.add_argument("--package-path", required=True, help="the directory of the program's package")
    made.add_argument("--module-name", required=True, help="the module that is run, such as trainer.task")
    made.add_argument(
        "--job-dir", help="where outputs go: gs://, s3:// or a path; the program is given it as --job-dir"
    )
    made.add_argument(
        "--env",
        action="append",
        metavar="NAME[=VALUE]",
        help="a variable for the program; without a value, that of this shell; may be repeated",
    )
    return made


def run(given: Namespace, args: list[str]) -> int:
    """Become the program: this process runs it, and ends with its exit code.

    Raises:
        ConfigError: there is no such package or module, or the job directory can't be used.
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

    package = Path(given.package_path)
    named = {"module-name": given.module_name, **({"job-dir": given.job_dir} if given.job_dir else {})}
    misplaced(args, set())
    job = resolve(draft(None, named, args, "local_train"))
    if text := package_problem(package) or module_problem(package, given.module_name):
        raise ConfigError(text)
    for notice in BACKEND.check(job, {}):
        print(notice, file=sys.stderr)
    variables = process_env.given(given.env or (), os.environ)
    plan = Execution.of(job, "", Path.cwd(), {})
    if plan.job_dir is not None and "://" not in plan.job_dir:
        Path(plan.job_dir).mkdir(parents=True, exist_ok=True)
    (replica,) = replica_ids(job)
    path = [str(by_own_name(package).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    described = tf_config(job, {replica: free_addresses(HOST, 1)[0]}, replica)
    ours = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "TF_CONFIG": _json(described)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-P", *plan.arguments], {**os.environ, **ours, **variables})


def _json(value: Any) -> str:
    import json

    return json.dumps(value)
