"""Settings and modules that XLA can't train, refused before any work begins."""

from __future__ import annotations

from typing import Any

from footplate.core.errors import ConfigError
from footplate.core.hooks import overrides
from footplate.distributed.consistency import check_alike
from footplate.step.base import StepSpec

_INSIDE = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_MODES = ("on_validation_model_eval", "on_test_model_eval", "on_predict_model_eval")


def check_module(spec: StepSpec) -> None:
    """Refuse a module or callbacks that replace a phase of the step which can't be compiled.

    Raises:
        ConfigError: names the method and the alternative.
    """
    module, module_name = spec.module, type(spec.module).__name__
    for name, parameter in module.named_parameters():
        if type(parameter).__module__.startswith("bitsandbytes."):
            raise ConfigError(
                f"{name} is a {type(parameter).__name__}: only the kernels of bitsandbytes read its quantized weights, and "
                'XLA compiles without them. Use accelerator="cpu" or "cuda", or a base that is not quantized.'
            )
    if not spec.optimizers:
        for name in _MODES:
            _refuse_mode(module, name)
        return
    if module.automatic_optimization and len(spec.optimizers) > 1:
        raise ConfigError(
            f"{module_name}.configure_optimizers() returned {len(spec.optimizers)} optimizers: with several, set "
            "self.automatic_optimization = False and call backward and step yourself in training_step."
        )
    if overrides(module, "optimizer_step"):
        raise ConfigError(
            f"{module_name} overrides optimizer_step(), which takes a closure and can't be compiled: use "
            'accelerator="cpu" or "cuda".'
        )
    for name in _INSIDE:
        for callback in spec.hooks.callbacks_with(name):
            raise ConfigError(
                f"{callback} overrides {name}(), which would run inside the compiled step, where tensors have no "
                f"values: use the module's own {name}(), which is compiled with it."
            )
    for name in _MODES:
        _refuse_mode(module, name)


def _refuse_mode(module: Any, name: str) -> None:
    if overrides(module, name):
        raise ConfigError(
            f"{type(module).__name__} overrides {name}(): a compiled step always evaluates in evaluation mode. "
            'Use accelerator="cpu" or "cuda".'
        )


def check_processes(spec: StepSpec) -> None:
    """Check that all processes make the same programs, and fetch sharded weights at the same times.

    Raises:
        ConfigError: something differs.
    """
    settings = {
        "devices": list(spec.device_ids),
        "strategy": "fsdp" if spec.sharded else "auto",
        "sync_batchnorm": spec.sync_batchnorm,
        "iterations_per_loop": spec.iterations_per_loop,
    }
    if spec.sharded:
        settings["callbacks that may look at the weights"] = ", ".join(spec.hooks.looking) or "none"
    check_alike(spec.group, settings, "Give every process the same.")
