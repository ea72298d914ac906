"""`footplate tune [NAME] --config run.yaml --param model.lr=log:1e-5..1e-1 --metric val_loss`: tune `footplate fit`.

The command submits a tuning, shows its trials until it ends, and prints the command that trains the best one again. Each
trial is a job of this machine or of a cluster, and runs `footplate fit` (`tune_code.py`). Ctrl-C ends the command, not the
tuning; `footplate tune --resume NAME` shows it again, and continues it if it was cancelled or has failed.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.cli.arguments import Parser, make_parser
from footplate.cli.backend_options import add_backend, backend_options
from footplate.cli.formats import add_format, show_as
from footplate.cli.variables import variable
from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from footplate.jobs.operations import Jobs
    from footplate.jobs.spec.resolving import ResolvedJob

ALGORITHMS = {"tpe": "ALGORITHM_UNSPECIFIED", "random": "RANDOM_SEARCH", "grid": "GRID_SEARCH"}
_SHOW_S = 1.0
_RECONCILE_S = 5.0


def parser(name: str) -> Parser:
    """Make the parser of `tune`."""
    command = make_parser(
        name, "Tune the hyperparameters of what footplate fit trains. Arguments after -- are passed to footplate fit."
    )
    command.add_argument(
        "name", nargs="?", help="the tuning's name: letters, digits and underscores; by default, the time"
    )
    command.add_argument("--config", action="append", default=[], help="a configuration of footplate fit; repeatable")
    command.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=SPACE",
        help="an option of footplate fit, and its values: 1..8, log:1e-5..1e-1, or 16,32,64; repeatable",
    )
    command.add_argument("--metric", help="the metric that decides, as the model logs it, such as val_loss")
    command.add_argument("--goal", choices=["minimize", "maximize"], default="minimize", help="which metric is better")
    command.add_argument("--trials", type=int, default=20, help="how many trials to make")
    command.add_argument("--parallel", type=int, default=1, help="how many trials may run at once")
    command.add_argument(
        "--max-failed",
        type=int,
        default=0,
        help="fail after this many failed trials; 0: if three fail and none succeeds",
    )
    command.add_argument("--algorithm", choices=list(ALGORITHMS), default="tpe", help="how to search")
    command.add_argument(
        "--stop-early",
        choices=["median", "asha", "hyperband", "pbt"],
        help="stop or pause unpromising trials; pbt: population-based training",
    )
    command.add_argument(
        "--perturbation-interval",
        type=int,
        metavar="N",
        help="with --stop-early pbt, compare the trials at every N-th value of the metric; by default at each",
    )
    command.add_argument(
        "--from-checkpoint",
        metavar="CKPT",
        help="begin all trials from this checkpoint, each with its own hyperparameters: a path or a URI",
    )
    command.add_argument("--seed", type=int, help="of the search, and of trainings that set none; drawn by default")
    command.add_argument("--job-dir", help="the directory of the trials' runs; by default runs/NAME")
    command.add_argument("--machine-type", help="the machine type that a trial needs; by default one core and 2 GB")
    command.add_argument("--accelerator", help="accelerators that a trial needs, such as count=1,type=nvidia-tesla-t4")
    add_backend(
        command, "where the trials run: on this machine, or on a Ray or Slurm cluster", ("local", "ray", "slurm")
    )
    command.add_argument(
        "--resume", metavar="NAME", help="show this tuning, and continue it if it was cancelled or failed"
    )
    add_format(command)
    return command


def run(name: str, argv: Sequence[str]) -> int:
    """Tune. Returns 1 if the tuning failed or was cancelled.

    Raises:
        FootplateError: the arguments are wrong, or the tuning can't be submitted as it is.
        KeyboardInterrupt: the user pressed Ctrl-C; the tuning goes on.
    """
    from footplate.jobs.operations import Jobs
    from footplate.jobs.states import State

    end = list(argv).index("--") if "--" in argv else len(argv)
    parsed = parser(name).parse_args(list(argv[:end]))
    arguments = list(argv[end + 1 :])
    _check(parsed, arguments)
    jobs = Jobs.from_env()
    tuning = parsed.resume or parsed.name or f"tune_{datetime.now():%Y%m%d_%H%M%S}"
    if parsed.resume is None:
        _submit(jobs, tuning, parsed, arguments)
    else:
        _resume(jobs, tuning)
    try:
        state = _watch(jobs, tuning, shows=parsed.format == "table")
    except KeyboardInterrupt:
        print(
            f"{tuning} goes on. Watch it again: footplate tune --resume {tuning}\n"
            f"End it: footplate jobs cancel {tuning}",
            file=sys.stderr,
        )
        raise
    _show_result(jobs, tuning, parsed)
    return int(state != State.SUCCEEDED)


def _check(parsed: Namespace, arguments: Sequence[str]) -> None:
    if parsed.resume is not None:
        if parsed.name or parsed.param or parsed.config or arguments:
            raise ConfigError("--resume NAME continues a tuning as it was submitted: leave out all else but --format.")
        return
    if not parsed.param:
        raise ConfigError("--param: not given. Name what to tune, such as --param model.lr=log:1e-5..1e-1")
    if parsed.metric is None:
        raise ConfigError("--metric: not given. Name the metric that decides, such as --metric val_loss")
    if parsed.from_checkpoint is not None and any(word.partition("=")[0] == "--ckpt_path" for word in arguments):
        raise ConfigError(
            "--ckpt_path resumes one training, and --from-checkpoint begins all trials. Give one of them."
        )
    if any(word.partition("=")[0] == "--trainer.default_root_dir" for word in arguments):
        raise ConfigError("--trainer.default_root_dir: each trial has a directory of its own. Give --job-dir to tune.")
    if parsed.perturbation_interval is not None:
        if parsed.stop_early != "pbt":
            raise ConfigError("--perturbation-interval is for --stop-early pbt.")
        if parsed.perturbation_interval < 1:
            raise ConfigError(f"--perturbation-interval {parsed.perturbation_interval}: expected 1 or more.")
    for path in parsed.config:
        if not Path(path).is_file():
            raise ConfigError(f"--config {path}: there is no such file.")


def _submit(jobs: Jobs, name: str, parsed: Namespace, arguments: Sequence[str]) -> None:
    import secrets

    from footplate.cli.tune_code import code_package, trial_imports
    from footplate.jobs.backends import destination
    from footplate.jobs.submission import PlannedJob, submit
    from footplate.jobs.tuning.submission import SEED

    seed = secrets.randbelow(2**31) if parsed.seed is None else parsed.seed
    resolved = _resolved(name, parsed, arguments)
    imports = trial_imports(Path.cwd(), parsed.config, arguments)
    checkpoint = "" if parsed.from_checkpoint is None else _start(parsed.from_checkpoint)
    options = {"seed": seed, "stop_early": parsed.stop_early or "", "imports": imports, "checkpoint": checkpoint}
    options["interval"] = parsed.perturbation_interval or 1
    place = destination(parsed.backend, backend_options(parsed), resolved.job_dir)
    # All trainings draw the same random numbers, unless their configuration sets a seed. A job keeps this variable of the
    # shell that submits it, on each backend.
    with tempfile.TemporaryDirectory() as folder, variable(SEED, str(seed)):
        package = code_package(Path.cwd(), Path(folder))
        planned = PlannedJob(resolved, package, parsed.backend, place, tuning_options=options)
        for notice in submit(planned, jobs)[1:]:
            print(notice, file=sys.stderr)
    print(f"{name} is submitted, with seed {seed}.", file=sys.stderr)


def _start(given: str) -> str:
    """Check the checkpoint from which the trials begin. Returns its own path, since a link may point to another later."""
    from footplate import checkpoint
    from footplate.checkpoint.storage import store_of, to_place
    from footplate.core.errors import CheckpointError

    place = to_place(given)
    try:
        if checkpoint.read_meta(place).get("weights_only"):
            raise ConfigError(
                f"--from-checkpoint {given}: it holds weights, and no state that training continues from."
            )
    except CheckpointError as error:
        raise ConfigError(f"--from-checkpoint: {error}") from None
    own = store_of(place).resolve(place)
    return str(own.absolute() if isinstance(own, Path) else own)


def _resolved(name: str, parsed: Namespace, arguments: Sequence[str]) -> ResolvedJob:
    """The job of the tuning."""
    from footplate.cli.tune_code import MODULE
    from footplate.cli.tune_space import parameter_spec
    from footplate.jobs.spec.draft import draft, put
    from footplate.jobs.spec.resolving import resolve

    flags = {"module-name": MODULE, "job-dir": parsed.job_dir or f"runs/{name}"}
    flags |= {} if parsed.machine_type is None else {"master-machine-type": parsed.machine_type}
    flags |= {} if parsed.accelerator is None else {"master-accelerator": parsed.accelerator}
    configs = [word for path in parsed.config for word in ("--config", path)]
    requested = draft(None, flags, [*configs, *arguments], name)
    spec = {
        "goal": parsed.goal.upper(),
        "hyperparameterMetricTag": parsed.metric,
        "maxTrials": parsed.trials,
        "maxParallelTrials": parsed.parallel,
        "maxFailedTrials": parsed.max_failed,
        "algorithm": ALGORITHMS[parsed.algorithm],
        "enableTrialEarlyStopping": parsed.stop_early is not None,
        "params": [parameter_spec(text) for text in parsed.param],
    }
    put(requested.values, ("trainingInput", "hyperparameters"), spec)
    return resolve(requested)


def _resume(jobs: Jobs, name: str) -> None:
    from footplate.jobs.states import State

    job = jobs.find(name)
    if job.plan.get("tuning") is None:
        raise ConfigError(f"{name} is no tuning. See: footplate jobs describe {name}")
    if job.state in (State.FAILED, State.CANCELLED):
        jobs.resubmit(name)


def _watch(jobs: Jobs, name: str, shows: bool) -> Any:
    """Wait for the end of a tuning. Returns its state. On a terminal, show a table; else a line for each event."""
    from footplate.jobs.supervision.follow import Line

    if shows and sys.stdout.isatty():
        return _watch_live(jobs, name)
    state = None
    for event in jobs.follow(name, lines=shows):
        if not isinstance(event, Line):
            state = event
        elif event.source == "tuning":
            print(event.text, end="", flush=True)
    return state


def _watch_live(jobs: Jobs, name: str) -> Any:
    from rich.live import Live
    from rich.text import Text

    from footplate.cli.trials import trial_lines
    from footplate.jobs.states import FINAL

    reconciled = time.monotonic()
    with Live(auto_refresh=False, transient=True) as live:
        while True:
            # The state is read first: after a final state, the trials don't change.
            state = jobs.store.state(name)
            width = shutil.get_terminal_size().columns
            live.update(Text("\n".join(trial_lines(_output(jobs, name), width))), refresh=True)
            if state is None or state in FINAL:
                return state
            time.sleep(_SHOW_S)
            if time.monotonic() - reconciled > _RECONCILE_S:
                reconciled = time.monotonic()
                jobs.reconcile()


def _show_result(jobs: Jobs, name: str, parsed: Namespace) -> None:
    from footplate.cli.trials import trial_lines

    job, output = jobs.store.find(name), _output(jobs, name)
    best = output["bestTrial"]
    command = None
    if best is not None:
        own = [f"--{parameter}={_text(value)}" for parameter, value in best["hyperparameters"].items()]
        words = shlex.join(["footplate", "fit", *job.spec["trainingInput"].get("args", ()), *own])
        variables = {"FOOTPLATE_SEED": output["seed"], "FOOTPLATE_FROM_CHECKPOINT": best["startCheckpoint"]}
        prefix = [f"{key}={shlex.quote(str(value))}" for key, value in variables.items() if value is not None]
        best["command"] = command = " ".join([*prefix, words])
    lines = ["", *trial_lines(output, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)]
    if command is not None:
        lines += ["Train it again:", f"  {command}"]
    if job.cause and best is None:
        lines.append(f"{name} is {job.state}: {job.cause}")
    shown = {"jobId": name, "state": str(job.state), "cause": job.cause, **output}
    show_as(parsed.format, shown, lambda: "\n".join(lines))


def _output(jobs: Jobs, name: str) -> dict[str, Any]:
    from footplate.jobs.tuning.results import training_output

    output = training_output(jobs.store, jobs.store.find(name))
    assert output is not None
    return output


def _text(value: Any) -> str:
    from footplate.jobs.tuning.space import to_text

    return to_text(value)
