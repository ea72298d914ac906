"""The module on its device, prepared for the strategy, and the step that trains it."""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from footplate.core.errors import ConfigError
from footplate.distributed.activation_checkpointing import checkpoint_activations
from footplate.distributed.fsdp_options import layers_of
from footplate.distributed.strategies import name_of, options_of
from footplate.hardware.base import Accelerator
from footplate.hardware.transfer import to_device
from footplate.step.base import Step, StepSpec
from footplate.step.optimizers import StepOptimizer
from footplate.training.metrics.torchmetrics_objects import gather_over, gather_over_all
from footplate.training.multi_step import between_any_two, rates_ahead
from footplate.training.profiling import profile_step, recorder
from footplate.training.rank_checks import check_model

if TYPE_CHECKING:
    from footplate.training.run import Run

log = logging.getLogger(__name__)


def prepare_module(run: Run) -> None:
    """Convert the module to the run's precision, move it to its device, and prepare it for its strategy."""
    check_model(run)
    run.precision.convert_module(run.module)
    if run.placement.sync_batchnorm:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(run.module, run.placement.data_group.devices)
    options = options_of(run.config.strategy)
    if options.activation_checkpointing_policy is not None:
        # In the order of the model.
        layers = layers_of(run.module, options, "activation_checkpointing_policy")[::-1]
        checkpoint_activations(layers, options.activation_checkpointing_mode)
    run.parallel.place(run.module, run.device)
    run.parallel.prepare(run.module)
    if run.placement.data_group.devices is not None:
        gather_over(run.module, run.placement.data_group.devices)


def leave_device(run: Run) -> None:
    """Move the module and the state of its optimizers to the CPU, as Lightning does at the end of a call.

    A sharded module stays, and so do weights that an accelerator keeps itself.
    """
    if run.placement.data_group.devices is not None:
        gather_over_all(run.module, run.placement.data_group.devices)
    if run.device.type == "cpu" or run.parallel.sharded:
        return
    cpu = torch.device("cpu")
    run.module.to(cpu)
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            state.update({name: to_device(value, cpu) for name, value in state.items() if isinstance(value, Tensor)})
    if run.device.type == "cuda":
        # Other processes may use the memory.
        torch.cuda.empty_cache()


def build_step(run: Run) -> None:
    """Build the step of a run from its module and its optimizers."""
    config, single_controller = run.config, run.accelerator.single_controller
    spec = StepSpec(
        module=run.module,
        optimizers=run.optimizers,
        hooks=run.hooks,
        device=run.device,
        precision=run.precision,
        accumulate_grad_batches=config.accumulate_grad_batches,
        gradient_clip_val=config.gradient_clip_val,
        gradient_clip_algorithm=config.gradient_clip_algorithm or "norm",
        compile=config.compile_options,
        on_optimizer_step=functools.partial(_count_step, run),
        strategy=run.parallel,
        group=run.group,
        weight=functools.partial(_weight_of, run) if run.stage == "fit" and run.data_ranks > 1 else None,
        device_ids=run.placement.device_ids,
        iterations_per_loop=_steps_per_call(run),
        sync_batchnorm=config.sync_batchnorm and single_controller,
        sharded=name_of(config.strategy) == "fsdp" and single_controller,
        record=functools.partial(_record, run),
        rates_ahead=functools.partial(rates_ahead, run),
        times=run.monitor.times,
    )

    if run.logical is None and run.stage == "fit" and isinstance(config.compile, str):
        run.step = _compiled_step(run, spec)
    elif run.logical is None:
        run.step = pkgutil.resolve_name(run.accelerator.step)(spec)
    else:
        # Imported here, since it imports torch's DistributedDataParallel.
        from footplate.step.logical_step import LogicalStep

        run.step = LogicalStep(spec, functools.partial(run.logical.enter_step, run))
    profile = recorder(run.profiler)
    if profile is not None:
        profile_step(run, profile)
    run.step_optimizers = [StepOptimizer(optimizer, run.step.optimizer_step) for optimizer in run.optimizers]


def _compiled_step(run: Run, spec: StepSpec) -> Step:
    """Build the step of `compile="step"` and `compile="cudagraphs"`."""
    if run.accelerator.step != Accelerator.step:
        raise ConfigError(
            f'compile="{spec.compile}": accelerator="{run.accelerator.name}" has a step of its own. Use compile=True, or '
            "leave it out."
        )
    # Imported here, since it imports torch's compiler.
    from footplate.step.compiled_step import CompiledStep

    return CompiledStep(spec)


def _steps_per_call(run: Run) -> int:
    """Return `iterations_per_loop`, or 1 if something must happen between any two steps."""
    steps = run.config.iterations_per_loop
    if steps == 1 or run.stage != "fit":
        return steps
    # A callback on one rank counts for all ranks.
    reasons = run.group.gather(between_any_two(run))
    reason = next((answer for answer in reasons if answer is not None), None)
    if reason is None:
        return steps
    log.warning("iterations_per_loop=%d: one step at a time, since %s.", steps, reason)
    return 1


def _count_step(run: Run) -> None:
    run.progress.global_step += 1


def _weight_of(run: Run, batch: int) -> float:
    """Return the weight of a batch of the training loader."""
    weight = None if run.loop is None else run.loop.weight
    return 1.0 if weight is None else weight(batch)


def _record(run: Run, batch: Any, name: str, value: Any, options: Mapping[str, Any]) -> None:
    """Log a value that a compiled step has computed, as if the module logged it now."""
    run.metrics.batch = batch
    run.module.log(name, value, **options)
