"""A trainer's call made in several processes, and its results brought back.

    trainer.fit(model, data)     in this process                        in rank 0, rank 1, …
                                 trainer's arguments, model, data  ──►  a trainer of its own; fit(model, data)
                                 weights, metrics, callbacks       ◄──  rank 0: the results

`footplate.launch` starts the processes and watches them. A call that fails is made again, and `fit` then continues from the
newest checkpoint. A rank that has failed gets a new process, and the other ranks keep theirs if they can (`reuse.py`). With
fewer ranks than before, global batches keep their size.

The results are the model's weights and buffers, the metrics, the progress, and the state of callbacks and loggers. Anything
else that your code keeps in objects is lost with the processes.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from footplate.core import rng
from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.core.profile_requests import VARIABLE
from footplate.distributed.meta_device import configure_layers
from footplate.hardware.transfer import to_device
from footplate.launch import Restarts, backends, launch, worker
from footplate.launch.backends import Backend, Local
from footplate.step.torch_internals import inside
from footplate.training.config import TrainerConfig
from footplate.training.reuse import TorchState
from footplate.training.status import running

if TYPE_CHECKING:
    from footplate.checkpoint.run_state import Progress
    from footplate.training.run import Run, Stage
    from footplate.training.trainer import Trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """A call of a trainer's method, with everything that a worker needs to make the trainer and the call.

    Attributes:
        launch_id: a restart finds the checkpoints of this call by it.
        job_fit: a later attempt of a job finds the checkpoints of this call by it.
        origin: the checkpoint of another training that this call begins from; None without one.
        config: the trainer's.
        callbacks: the trainer's.
        loggers: the trainer's.
        module: the user's.
        method: "fit", …
        arguments: of the method.
        log_level: of Footplate's logger in the calling process.
    """

    launch_id: str
    job_fit: str | None
    origin: str | None
    config: TrainerConfig
    callbacks: list[Any]
    loggers: list[Any]
    module: Any
    method: str
    arguments: Mapping[str, Any]
    log_level: int


@dataclass(frozen=True)
class RunResults:
    """What a trainer tells of a run after the call. For the attributes, see `Run`, and `Reports` for the last four."""

    stage: Stage | None
    should_stop: bool
    progress: Progress
    training_batches: float
    num_val_batches: list[float]
    num_test_batches: list[float]
    num_predict_batches: list[float]
    val_check_batches: float
    callback_metrics: dict[str, float]
    logged_metrics: dict[str, float]
    progress_metrics: dict[str, float]
    not_finite: tuple[str, int] | None

    @classmethod
    def of(cls, run: Run) -> RunResults:
        """Take them from a run."""
        return cls(
            run.stage, run.should_stop, run.progress, run.training_batches, run.num_val_batches, run.num_test_batches,
            run.num_predict_batches, run.val_check_batches, run.reports.callback, run.reports.logged,
            run.reports.progress, run.reports.not_finite,
        )  # fmt: skip

    def give_to(self, run: Run) -> None:
        """Set them in the run of the calling process."""
        run.stage, run.should_stop, run.progress = self.stage, self.should_stop, self.progress
        run.training_batches, run.val_check_batches = self.training_batches, self.val_check_batches
        run.num_val_batches, run.num_test_batches = self.num_val_batches, self.num_test_batches
        run.num_predict_batches = self.num_predict_batches
        run.reports.callback, run.reports.logged = self.callback_metrics, self.logged_metrics
        run.reports.progress, run.reports.not_finite = self.progress_metrics, self.not_finite


@dataclass(frozen=True)
class Outcome:
    """The results of rank 0. `weights` is None if the call doesn't change them."""

    returned: Any
    weights: dict[str, Any] | None
    run: RunResults
    callbacks: list[dict[str, Any]]
    loggers: list[dict[str, Any]]


def in_ranks(trainer: Trainer, method: str, module: Any, **arguments: Any) -> Any:
    """Make a call of a trainer in one process for each of its devices. Return what it returned on rank 0.

    Args:
        trainer: the trainer.
        method: the name of the call.
        module: as the user passed it. If it is compiled, each rank compiles it.
        **arguments: of the call.

    Raises:
        ConfigError: several nodes, and no cluster.
        LaunchError: an object that can't be sent to the processes, or a process was killed and no restart is left.
        Exception: what the call raised, as `footplate.launch.launch` does.
    """
    config = replace(trainer.config, seed=trainer.seed, default_root_dir=str(trainer.run_dir.absolute()))
    call = Call(
        uuid.uuid4().hex, trainer.run.job_fit, trainer.run.origin, config, trainer.own_callbacks, trainer.loggers, module,
        method, arguments, logging.getLogger("footplate").getEffectiveLevel(),
    )  # fmt: skip
    with running(trainer.run):
        outcome = launch(
            _make, call,
            world_size=trainer.ranks_asked,
            backend=_backend(trainer),
            restarts=Restarts(config.max_restarts, config.max_host_restarts, min_world_size=config.min_devices),
            name=f"trainer.{method}",
            env={VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else None,
            preload=("footplate.training.trainer", "footplate.distributed.ddp", "torch._dynamo"),
            heartbeat_timeout_s=config.heartbeat_timeout,
            hangs_dir=trainer.run_dir.absolute() / "hangs",
        )  # fmt: skip
    _take_home(trainer, inside(module), arguments.get("datamodule"), outcome)
    return outcome.returned


def _backend(trainer: Trainer) -> Backend:
    if trainer.nodes == 1:
        return Local()
    name = backends.connected_cluster()
    if name is None:
        raise ConfigError(
            f"num_nodes={trainer.nodes} needs a cluster, and this process is connected to none: Ray is not initialised, "
            "RAY_ADDRESS is not set, and there is no active Spark session. Connect first (ray.init(), SparkSession), "
            "or start your script on each machine (torchrun)."
        )
    return backends.named(name, {"num_gpus": 1} if trainer.accelerator.name == "cuda" else None)


def _make(call: Call) -> Outcome | None:
    """Make the call in a rank."""
    from footplate.training.trainer import Trainer

    state = TorchState()
    with warnings.catch_warnings():
        # The calling process has given these warnings already.
        warnings.simplefilter("ignore")
        trainer = Trainer(**vars(call.config))
    # torch keeps groups of sharded parameters. NCCL would have to be aborted.
    if trainer.accelerator.name == "cpu" and not trainer.parallel.sharded:
        worker.reusable(state.clean_up)
    trainer.run.launch_id, trainer.run.job_fit, trainer.run.origin = call.launch_id, call.job_fit, call.origin
    trainer.own_callbacks, trainer.loggers = call.callbacks, call.loggers
    trainer.show_callbacks(call.callbacks)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("footplate").setLevel(call.log_level if trainer.world.rank == 0 else logging.WARNING)
    rng.seed_globals(rng.mix(trainer.seed, trainer.run.data_world.rank))

    returned = getattr(trainer, call.method)(call.module, **call.arguments)
    if call.method == "predict" and isinstance(returned, list):
        of_ranks = trainer.group.gather_to_first(to_device(returned, CPU))[:: trainer.run.ranks_of_a_share]
        returned = _in_order(of_ranks, len(trainer.num_predict_batches))
    weights = None
    if call.method == "fit":
        weights = to_device(trainer.parallel.whole(trainer.parallel.state_dict(trainer.module)), CPU)
    if trainer.world.rank != 0:
        return None
    return Outcome(
        returned,
        weights,
        RunResults.of(trainer.run),
        [_portable(callback) for callback in trainer.own_callbacks],
        [_portable(logger) for logger in trainer.loggers],
    )


def _in_order(of_ranks: list[Any], loaders: int) -> list[Any]:
    """Return the predictions of all ranks, batch by batch in the order of the rows."""
    if not of_ranks:
        return []
    if loaders > 1:
        return [_in_order([of_rank[index] for of_rank in of_ranks], 1) for index in range(loaders)]
    batches = max(len(of_rank) for of_rank in of_ranks)
    return [of_rank[index] for index in range(batches) for of_rank in of_ranks if index < len(of_rank)]


def _take_home(trainer: Trainer, module: Any, datamodule: Any, outcome: Outcome) -> None:
    run = trainer.run
    run.module, run.datamodule = module, datamodule
    outcome.run.give_to(run)
    for parts, fields in ((trainer.own_callbacks, outcome.callbacks), (trainer.loggers, outcome.loggers)):
        for part, values in zip(parts, fields, strict=True):
            vars(part).update(values)
    trainer.show_callbacks(trainer.own_callbacks)
    if outcome.weights is not None:
        if overrides(module, "configure_model"):
            configure_layers(module)
        module.load_state_dict(outcome.weights)


def _portable(part: Any) -> dict[str, Any]:
    """Return what a callback or logger remembers, without anything that holds the trainer or module or can't be pickled."""
    values = {}
    for name, value in vars(part).items():
        try:
            _Portable(io.BytesIO()).dump(value)
        except Exception:
            # The user's class may raise any exception.
            continue
        values[name] = value
    return values


class _Portable(cloudpickle.Pickler):
    """Refuses the trainer and the module, which are brought back separately."""

    def persistent_id(self, obj: Any) -> None:
        from footplate.training.trainer import Trainer

        if isinstance(obj, (Trainer, torch.nn.Module)):
            raise pickle.PicklingError("not by this way")
