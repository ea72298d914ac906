"""Lightning's strategy objects, as names or options of ours."""

from __future__ import annotations

from typing import Any

from footplate.core.errors import ConfigError
from footplate.distributed.fsdp_options import SHARDINGS, FSDPStrategy, LayerTypes
from footplate.distributed.model_parallel_options import ModelParallelStrategy
from footplate.distributed.strategies import Options

# Options of FSDPStrategy that say how Lightning's FSDP stores parameters. Ours stores them one by one.
_WITHOUT_EFFECT = ("use_orig_params",)


def our_strategy(strategy: Any) -> str | Options:
    """Return our name or options for one of Lightning's strategies: DDP, FSDP, model-parallel or single-device.

    Raises:
        ConfigError: another strategy, or an option that has no counterpart.
    """
    kind = type(strategy).__name__
    if kind == "FSDPStrategy":
        return _sharded(strategy)
    if kind == "ModelParallelStrategy":
        return _model_parallel(strategy)
    options = dict(getattr(strategy, "_ddp_kwargs", {}))
    unused = options.pop("find_unused_parameters", False)
    more = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "process_group_backend")
    options |= {name: True for name in more if getattr(strategy, f"_{name}", None) is not None}
    if kind not in ("DDPStrategy", "SingleDeviceStrategy") or options:
        shown = f" with {', '.join(options)}" if options else ""
        raise ConfigError(
            f'strategy={kind}(…){shown}: expected a name ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp", '
            '"replicas"), or a DDPStrategy, FSDPStrategy, ModelParallelStrategy or SingleDeviceStrategy of Lightning '
            "without other options than find_unused_parameters and those of footplate.FSDPStrategy."
        )
    if kind == "SingleDeviceStrategy":
        return "auto"
    return "ddp_find_unused_parameters_true" if unused else "ddp"


def _sharded(strategy: Any) -> FSDPStrategy:
    options = {name: value for name, value in strategy.kwargs.items() if name not in _WITHOUT_EFFECT}
    recomputed = dict(strategy._activation_checkpointing_kwargs)
    sharding, mesh = strategy.sharding_strategy.name, options.pop("device_mesh", None)
    if strategy.cpu_offload is not None and strategy.cpu_offload.offload_params:
        raise _refused("cpu_offload", "parameters stay on the device")
    if strategy.mixed_precision is not None:
        raise _refused(
            "mixed_precision", "it is FSDP1's. Leave it out, or use footplate.FSDPStrategy(mixed_precision=…)"
        )
    if sharding not in SHARDINGS:
        raise _refused(f'sharding_strategy="{sharding}"', f'expected {", ".join(SHARDINGS)}, or strategy="ddp"')
    if mesh is not None and not isinstance(mesh, (tuple, list)):
        raise _refused("device_mesh", "expected two counts, (groups, ranks of a group)")
    units = _types("auto_wrap_policy", options.pop("auto_wrap_policy", None))
    layers = _types("activation_checkpointing_policy", recomputed.pop("auto_wrap_policy", None))
    if options or recomputed:
        raise _refused(", ".join({**options, **recomputed}), "footplate.FSDPStrategy has no such option")
    return FSDPStrategy(units, layers, sharding, None if mesh is None else tuple(mesh))  # type: ignore[arg-type]


def _model_parallel(strategy: Any) -> ModelParallelStrategy:
    for option, usual in (("save_distributed_checkpoint", True), ("process_group_backend", None)):
        if getattr(strategy, f"_{option}") != usual:
            raise ConfigError(
                f"ModelParallelStrategy({option}=…) of Lightning can't run here: ranks write their shards themselves, and "
                "the accelerator chooses the backend. Leave it out."
            )
    return ModelParallelStrategy(strategy._data_parallel_size, strategy._tensor_parallel_size)


def _types(option: str, policy: Any) -> LayerTypes:
    types = getattr(policy, "_module_classes", None)
    if policy is not None and types is None:
        raise _refused(option, "expected a set of layer types")
    return types


def _refused(option: str, why: str) -> ConfigError:
    return ConfigError(f"FSDPStrategy({option}) of Lightning can't run here: {why}.")
