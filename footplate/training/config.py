"""The arguments of a trainer: names, types, defaults, meanings and checks. Each is written once, here.

    Trainer(max_epochs=3)  →  TrainerConfig(max_epochs=3)  →  trainer.config

`Trainer` has the signature of `TrainerConfig`. The command line's `--trainer.NAME`, the variables `PL_TRAINER_NAME`, the
table of arguments in the docs and the comparison between ranks come from its fields too.

To add an argument, add a field, and describe it under `Args`. Read it as `run.config.NAME` (or `trainer.config.NAME`) in
the code that it affects, and run `make tables`. If a program may assign it between two calls, add a `Setting` to
`trainer_attributes.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from footplate.callbacks.base import Callback
from footplate.callbacks.timer import Duration
from footplate.core.errors import ConfigError
from footplate.distributed.fsdp_options import FSDPStrategy
from footplate.distributed.model_parallel_options import ModelParallelStrategy
from footplate.hardware.base import Accelerator, Devices
from footplate.tracking.base import Logger
from footplate.training import argument_checks, env_arguments

Check = Callable[[str, Any], Any]
Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner")
T = TypeVar("T")


def argument(default: Any, check: Check | None = None, same_on_all_ranks: bool = False) -> Any:
    """Return a field of `TrainerConfig`.

    Args:
        default: the argument's default.
        check: called with the argument's name and value. Raises a ConfigError if the value can't be used.
        same_on_all_ranks: ranks with different values refuse to train.
    """
    return dataclasses.field(default=default, metadata={"check": check, "same_on_all_ranks": same_on_all_ranks})


def count(at_least: int, or_none: bool = False) -> Check:
    """Return a check for an integer."""
    return functools.partial(argument_checks.check_count, least=at_least, none=or_none)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The arguments of a `Trainer`.

    Args:
        accelerator: "auto" (the best that is usable here), the name of an accelerator ("cpu", "cuda", "gpu", "tpu" and
            others), or an `Accelerator`.
        devices: "auto" (one device), a count, a list of indices, or text such as "0,2". Each device gets its own process.
            With "tpu" and "xla", one process drives all devices. Processes that torchrun has started take one device each.
        num_nodes: how many machines, with this number of devices each. More than one needs a cluster that this process is
            connected to (Ray, Spark), which chooses the machines. In processes that are started already, it must match
            their number.
        strategy: how several processes train one model. "auto" or "ddp": each holds the whole model. "fsdp": each holds a
            part; an `FSDPStrategy` has its options. A `ModelParallelStrategy`: the ranks of a group share the work on each
            layer. "ddp_find_unused_parameters_true": as "ddp", for models whose steps use only some parameters.
            "replicas": one process, with a thread for each device.
        logical_ranks: cut each global batch into this number of shares, whatever the number of processes, so that training
            gives the same bits on any number up to it. See docs/guide/logical-ranks.md. Default: a share for each process.
        precision: "32-true" (default), "bf16-mixed", "16-mixed", "bf16-true", "16-true" or "64-true", if the accelerator
            supports it.
        logger: a logger or several. True or None: `CSV`. False: none.
        callbacks: a callback or several. Callbacks for checkpoints, progress and the model's summary are added if missing.
        fast_dev_run: run one batch (True) or this number of batches of every loader, without saving or logging, to see
            that everything works.
        max_epochs: stop after this number of epochs; -1 for no limit. Default: 1000 if nothing else limits the run.
        min_epochs: don't stop early before this number of epochs.
        max_steps: stop after this number of optimizer steps; -1 for no limit.
        min_steps: don't stop early before this number of optimizer steps.
        max_time: stop after this time, over all attempts together: "DD:HH:MM:SS", a timedelta or a dict of its arguments.
        limit_train_batches: how many batches of a training epoch to run: a number, or a share as a float. Default: all.
        limit_val_batches: the same for each validation loader.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each prediction loader.
        overfit_batches: train and validate on the same few batches, unshuffled: a number, or a share of the training
            batches as a float. 0.0 for all batches.
        val_check_interval: validate after this number of training batches, this share of an epoch (a float), or this time
            ("HH:MM:SS", "DD:HH:MM:SS", a timedelta or a dict of its arguments; rank 0's clock counts). Default: at the end
            of an epoch.
        check_val_every_n_epoch: validate only in each n-th epoch. None counts the batches of `val_check_interval` over
            epochs.
        num_sanity_val_steps: how many validation batches to try before training; -1 for all.
        log_every_n_steps: read metrics from the device and report them every this number of steps.
        enable_checkpointing: save after each epoch or validation if no `ModelCheckpoint` is among the callbacks.
        save_frozen_weights: save all weights. False leaves out frozen ones that nothing has changed, such as the base of
            adapters; see docs/guide/lora.md.
        enable_progress_bar: show a bar in a terminal, and a line from time to time elsewhere.
        enable_model_summary: show the layers before training.
        enable_monitor: measure where the time of a training goes, and give advice at its end; see docs/guide/monitor.md.
        accumulate_grad_batches: sum the gradients of this number of batches before an optimizer step.
        gradient_clip_val: clip gradients to this norm, or to this value.
        gradient_clip_algorithm: "norm" (default) or "value".
        deterministic: use only deterministic algorithms; "warn" warns of the others. Default: torch's own setting.
        benchmark: let cuDNN find its fastest algorithms for the shapes of this run. Default: torch's own setting.
        sync_batchnorm: batch norm uses the batches of all processes (on GPUs) or all devices ("tpu", "xla").
        use_distributed_sampler: share the rows of a torch `DataLoader` out among the processes. False uses its own sampler
            in each process.
        reload_dataloaders_every_n_epochs: ask the module or data module for its loaders again in each n-th epoch; 0 never
            does. A loader may depend on `trainer.current_epoch`, the global generators and what it reads, and on nothing
            else, so that a resumed run makes the same loader.
        profiler: "torch" records steps 10 to 19 with torch.profiler, or with JAX's profiler on XLA; `Profiler("100:110")`
            records other steps. "simple", "advanced", "pytorch" or "xla": Lightning's profiler of that name. Or an object
            with `start(action)` and `stop(action)`.
        max_restarts: with several devices: how often to restart failed processes, from the newest checkpoint.
        max_host_restarts: the same for lost machines and for agents that fail.
        min_devices: with several devices: go on with as few as this if some fail for good. Global batches keep their
            size. Default: all devices are needed.
        heartbeat_timeout: with several devices: a process counts as frozen after this number of seconds without a
            heartbeat.
        inference_mode: run `validate`, `test` and `predict` under `torch.inference_mode` rather than `torch.no_grad`.
            Validation inside `fit` always runs under `torch.no_grad`.
        detect_anomaly: find the operation that made a NaN in the backward pass; slow.
        compile: True compiles the layers with `torch.compile`; a dict gives its options. "step" compiles `training_step`,
            clipping and optimizer as a whole, and makes them one CUDA graph on a GPU. "cudagraphs" makes a graph of the
            eager step. `fit(torch.compile(module))` compiles `forward` as well.
        iterations_per_loop: with "tpu" and "xla": how many steps one call of the compiled program makes, if nothing is due
            between them. The hooks of these steps run after the call.
        seed: of all randomness; checkpoints keep it. Default: the seed of `seed_everything`, or a random one.
        default_root_dir: the run's directory on this machine, for checkpoints, metrics and logs. Default: a new one in
            `runs/`; in a job, the job's directory.
        gpus: the older spelling of `accelerator="cuda", devices=…`.
        tpu_cores: the older spelling of `accelerator="tpu", devices=…`.

    Raises:
        ConfigError: an argument that can't be used. The error names it and tells what to write instead.
    """

    accelerator: str | Accelerator = argument("auto")
    devices: Devices = argument("auto")
    num_nodes: int = argument(1, count(at_least=1))
    strategy: str | FSDPStrategy | ModelParallelStrategy = argument("auto")
    logical_ranks: int | None = argument(None, count(at_least=1, or_none=True), same_on_all_ranks=True)
    precision: str | int | None = argument(None)
    logger: Logger | Iterable[Logger] | bool | None = argument(None)
    callbacks: Callback | list[Callback] | None = argument(None)
    fast_dev_run: int | bool = argument(False, argument_checks.check_dry_run, same_on_all_ranks=True)
    max_epochs: int | None = argument(None, count(at_least=-1, or_none=True), same_on_all_ranks=True)
    min_epochs: int | None = argument(None, count(at_least=0, or_none=True), same_on_all_ranks=True)
    max_steps: int = argument(-1, count(at_least=-1), same_on_all_ranks=True)
    min_steps: int | None = argument(None, count(at_least=0, or_none=True), same_on_all_ranks=True)
    max_time: Duration | None = argument(None)
    limit_train_batches: int | float | None = argument(None, argument_checks.check_limit)
    limit_val_batches: int | float | None = argument(None, argument_checks.check_limit)
    limit_test_batches: int | float | None = argument(None, argument_checks.check_limit)
    limit_predict_batches: int | float | None = argument(None, argument_checks.check_limit)
    overfit_batches: int | float = argument(0.0, argument_checks.check_limit)
    val_check_interval: int | float | Duration | None = argument(
        None, argument_checks.check_validation_interval, same_on_all_ranks=True
    )
    check_val_every_n_epoch: int | None = argument(1, count(at_least=1, or_none=True), same_on_all_ranks=True)
    num_sanity_val_steps: int = argument(2, count(at_least=-1), same_on_all_ranks=True)
    log_every_n_steps: int = argument(50, count(at_least=1), same_on_all_ranks=True)
    enable_checkpointing: bool = argument(True)
    save_frozen_weights: bool = argument(True, argument_checks.check_flag, same_on_all_ranks=True)
    enable_progress_bar: bool = argument(True)
    enable_model_summary: bool = argument(True)
    enable_monitor: bool = argument(True, argument_checks.check_flag, same_on_all_ranks=True)
    accumulate_grad_batches: int = argument(1, count(at_least=1), same_on_all_ranks=True)
    gradient_clip_val: float | None = argument(None, argument_checks.check_clip_val, same_on_all_ranks=True)
    gradient_clip_algorithm: Literal["norm", "value"] | None = argument(
        None, argument_checks.check_clip_algorithm, same_on_all_ranks=True
    )
    deterministic: bool | Literal["warn"] | None = argument(None, argument_checks.check_deterministic)
    benchmark: bool | None = argument(None)
    sync_batchnorm: bool = argument(False, argument_checks.check_flag)
    use_distributed_sampler: bool = argument(True, argument_checks.check_flag)
    reload_dataloaders_every_n_epochs: int = argument(0, count(at_least=0))
    profiler: Any = argument(None)
    max_restarts: int = argument(3, count(at_least=0))
    max_host_restarts: int = argument(10, count(at_least=0))
    min_devices: int | None = argument(None, count(at_least=1, or_none=True))
    heartbeat_timeout: float = argument(30.0, argument_checks.check_seconds)
    inference_mode: bool = argument(True)
    detect_anomaly: bool = argument(False)
    compile: bool | dict[str, Any] | Literal["step", "cudagraphs"] = argument(False, argument_checks.check_compile)
    iterations_per_loop: int = argument(1, count(at_least=1))
    seed: int | None = argument(None, count(at_least=0, or_none=True))
    default_root_dir: str | Path | None = argument(None, argument_checks.check_local_directory)
    gpus: int | str | list[int] | None = argument(None)
    tpu_cores: int | str | list[int] | None = argument(None)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.metadata["check"] is not None:
                field.metadata["check"](field.name, getattr(self, field.name))

    def with_dry_run(self) -> TrainerConfig:
        """Return the same config with the values that `fast_dev_run` sets."""
        batches = int(self.fast_dev_run)
        if not batches:
            return self
        return dataclasses.replace(
            self, max_steps=batches, max_epochs=1, num_sanity_val_steps=0, val_check_interval=None,
            check_val_every_n_epoch=1, limit_train_batches=batches, limit_val_batches=batches,
            limit_test_batches=batches, limit_predict_batches=batches,
        )  # fmt: skip

    @property
    def compile_options(self) -> dict[str, Any] | str | None:
        """The options of `torch.compile` for the layers; "step" or "cudagraphs"; None if nothing is compiled."""
        return {} if self.compile is True else self.compile or None

    def limit(self, stage: str) -> int | float | None:
        """Return the `limit_…_batches` of "fit", "validate", "test" or "predict"."""
        return {
            "fit": self.limit_train_batches,
            "validate": self.limit_val_batches,
            "test": self.limit_test_batches,
            "predict": self.limit_predict_batches,
        }[stage]


NAMES = tuple(field.name for field in dataclasses.fields(TrainerConfig))
COMPARED = tuple(field.name for field in dataclasses.fields(TrainerConfig) if field.metadata["same_on_all_ranks"])


def configured(
    config_type: Callable[Arguments, TrainerConfig], refuse: Callable[[dict[str, Any]], None]
) -> Callable[[Callable[[Owner, TrainerConfig], None]], Callable[Concatenate[Owner, Arguments], None]]:
    """Let an `__init__` that takes a `TrainerConfig` be called with its fields as arguments.

    Args:
        config_type: `TrainerConfig`.
        refuse: called with arguments that it doesn't have.
    """

    def decorate(init: Callable[[Owner, TrainerConfig], None]) -> Callable[Concatenate[Owner, Arguments], None]:
        @functools.wraps(init)
        def from_arguments(self: Owner, **arguments: Any) -> None:
            arguments = {**env_arguments.arguments(os.environ, set(NAMES)), **arguments}
            unknown = {name: arguments.pop(name) for name in arguments.keys() - set(NAMES)}
            if unknown:
                refuse(unknown)
            init(self, TrainerConfig(**arguments))

        owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(config_type)
        parameters = [owner, *signature.parameters.values()]
        from_arguments.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return from_arguments  # type: ignore[return-value]

    return decorate


class Fixed:
    """An argument that counts when the trainer is made. It can't be assigned. Some are attributes of other libraries.

    Args:
        name: of the argument.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        # Lets `Trainer.__getattr__` answer, which knows the attributes of other libraries.
        raise AttributeError(self.name)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise ConfigError(
            f"trainer.{self.name} = {value!r}: this argument counts when a trainer is made. Make another one with "
            f"{self.name}={value!r}."
        )


class Setting(Generic[T]):
    """An argument of the trainer as an attribute. An assigned value is checked, and counts for later calls.

    Args:
        read: converts the argument to the attribute's value. By default the value is the argument.
    """

    def __init__(self, read: Callable[[Any], T] | None = None) -> None:
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, trainer: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, trainer: Any, owner: type) -> T: ...
    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        value = getattr(trainer.config, self.name)
        return value if self.read is None else self.read(value)

    def __set__(self, trainer: Any, value: Any) -> None:
        trainer.config = dataclasses.replace(trainer.config, **{self.name: value})
