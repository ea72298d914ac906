"""Library models as subjects of a plan: `--model torchvision.models:resnet50`.

A bare `nn.Module` (of torchvision, timm, or your own) has no training step. It gets that of a classifier: cross entropy of
its output with labels, and AdamW. The plan states this assumption.
"""

from __future__ import annotations

import importlib
import math
import re
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from footplate.core.errors import ConfigError, did_you_mean
from footplate.planning.subject import Subject
from footplate.training.module import Module

IMAGE = "3x224x224"


class Supervised(Module):
    """Trains any model that returns logits, (B, classes) or (B, T, classes), with cross entropy and AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of inputs and labels."""
        logits = logits_of(self.net(batch[0]))
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer, AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def logits_of(output: Any) -> Tensor:
    """Take the logits from the output of a model: a tensor, or the `logits` of the transformers library."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ConfigError(f"the model returned a {type(output).__name__}: a plan by --model needs logits, as a tensor.")
    return logits


def library_model(
    name: str, shape: str, batch_size: int | None, rows: int | None, epochs: int | None, precision: str
) -> Subject:
    """Make the subject of a library model, without weights.

    Args:
        name: the model as `module:callable`, such as `torchvision.models:resnet50`.
        shape: the shape of one input, such as `3x224x224`, or `1024:int64` for tokens.
        batch_size: the global batch size; 64 by default.
        rows: the number of rows of the data set.
        epochs: the number of epochs; 1 by default.
        precision: see `subject.py`.

    Raises:
        ConfigError: the callable doesn't exist, makes no module, or makes one that doesn't accept such inputs.
    """
    inputs = _inputs(shape)
    net, assumed = _make_net(name)
    size = batch_size or 64
    if hasattr(net, "training_step"):
        raise ConfigError(
            f"--model {name} is a module with its own training step. Plan it with fp.plan(model, batch, on=[…]), or with "
            "the configuration file of `footplate fit`."
        )
    logits = _example_logits(name, net, inputs)
    labels = torch.empty(size, *logits.shape[1:-1], dtype=torch.int64, device="meta")
    return Subject(
        name=name.rpartition(":")[2],
        module=Supervised(net),
        batch=(inputs.new_empty(size, *inputs.shape), labels),
        batch_size=size,
        precision=precision,
        rows=rows,
        epochs=epochs or 1,
        assumed=(*assumed, f"inputs of {shape}, cross entropy over {logits.shape[-1]} classes, AdamW."),
    )


def _make_net(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Make a library model without weights; returns it with the assumptions.

    A class of transformers gets its default configuration.
    """
    make = find_callable(name)
    configuration = getattr(make, "config_class", None)
    try:
        with torch.device("meta"):
            net = make(configuration()) if configuration else make()
    except Exception as error:
        raise ConfigError(f"--model {name} can't be made without arguments: {one_line(error)}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"--model {name} made a {type(net).__name__}: expected a torch.nn.Module.")
    if next(net.parameters(), None) is None:
        raise ConfigError(f"--model {name} has no parameters to train.")
    return net, (f"{configuration.__name__}() with its defaults.",) if configuration else ()


def _example_logits(name: str, net: nn.Module, inputs: Tensor) -> Tensor:
    """Run the model on two inputs on the meta device; returns the logits."""
    try:
        with torch.no_grad():
            logits = logits_of(net(inputs.new_empty(2, *inputs.shape)))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--model {name} fails on inputs of shape {tuple(inputs.shape)} on the meta device, which have no values: "
            f"{one_line(error)} Give the right --input, or plan a module with a training_step: fp.plan(module, batch, "
            "on=[…])."
        ) from error
    if logits.dim() < 2:
        raise ConfigError(
            f"--model {name} returns a tensor of shape {tuple(logits.shape)} for two inputs: expected logits, "
            "(B, classes) or (B, T, classes)."
        )
    return logits


def one_line(error: Exception) -> str:
    """Format an error of foreign code as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": .") + "."


def find_callable(name: str) -> Any:
    """Import a callable by its name, `module:callable`.

    Raises:
        ConfigError: there is no such module, or it has no such callable.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"--model {name}: expected module:callable, such as torchvision.models:resnet50.")
    try:
        module = _import_module(module_name)
    except Exception as error:
        raise ConfigError(f"--model {name}: {module_name} can't be imported: {one_line(error)}") from error
    if not callable(getattr(module, attribute, None)):
        names = [key for key in dir(module) if not key.startswith("_") and callable(getattr(module, key))]
        raise ConfigError(f"--model {name}: {module_name} has no {attribute}. {did_you_mean(attribute, names)[:200]}")
    return getattr(module, attribute)


def _import_module(name: str) -> Any:
    """Import a module.

    torchvision's compiled part can't be loaded beside another build of torch, such as one for the CPU. Its models work
    without it if two operations are declared.
    """
    uses_torchvision = name.split(".")[0] in ("torchvision", "timm", "transformers", "diffusers")
    if uses_torchvision and find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
                )
    return importlib.import_module(name)


def _inputs(shape: str) -> Tensor:
    """Make one input on the meta device, of a shape such as `3x224x224` or `1024:int64`."""
    match = re.fullmatch(r"([1-9][0-9]{0,8}(?:x[1-9][0-9]{0,8}){0,7})(?::([a-z]+[0-9]*))?", shape)
    sizes = [int(part) for part in match[1].split("x")] if match else []
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    if not sizes or math.prod(sizes) > 2**31 or not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"--input {shape[:60]}: expected sizes, such as {IMAGE}, or sizes and a type, such as 1024:int64."
        )
    return torch.empty(sizes, dtype=dtype, device="meta")
