"""A model of a library as the subject of a plan: `--model torchvision.models:resnet50`.

A bare `nn.Module` (torchvision's, timm's, one of yours) has no training step. It gets the usual one, a classifier's: cross
entropy of what it answers with labels, AdamW; and the plan says that this was assumed.
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
    """Any model that answers with logits, (B, classes) or (B, T, classes), trained with cross entropy and AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of inputs and labels."""
        logits = answer_of(self.net(batch[0]))
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def answer_of(output: Any) -> Tensor:
    """The logits of what a model returned: a tensor, or what the transformers library calls `logits`."""
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ConfigError(f"the model returned a {type(output).__name__}: a plan by --model needs logits, as a tensor.")
    return found


def library_model(
    name: str, shape: str, batch_size: int | None, rows: int | None, epochs: int | None, precision: str
) -> Subject:
    """A model by `module:callable`, made without weights.

    Args:
        name: such as `torchvision.models:resnet50`.
        shape: of one input, such as `3x224x224`, or `1024:int64` for tokens.
        batch_size: the global batch; 64 by default.
        rows: of the data set.
        epochs: 1 by default.
        precision: see `subject.py`.

    Raises:
        ConfigError: there is no such thing, it makes no module, or none that answers such inputs.
    """
    inputs = _inputs(shape)
    net, assumed = _made(name)
    size = batch_size or 64
    if hasattr(net, "training_step"):
        raise ConfigError(
            f"--model {name} is a module with a training step of its own: plan it with fp.plan(model, batch, on=[…]), or "
            "by the configuration file of `footplate fit`."
        )
    logits = _answer(name, net, inputs)
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


def _made(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """A library's model without weights, and what was assumed; a class of transformers is given its usual configuration."""
    make = _found(name)
    configuration = getattr(make, "config_class", None)
    try:
        with torch.device("meta"):
            net = make(configuration()) if configuration else make()
    except Exception as error:
        raise ConfigError(f"--model {name} can't be made without arguments: {_said(error)}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"--model {name} made a {type(net).__name__}: expected a torch.nn.Module.")
    if next(net.parameters(), None) is None:
        raise ConfigError(f"--model {name} has no parameters to train.")
    return net, (f"{configuration.__name__}() as it comes.",) if configuration else ()


def _answer(name: str, net: nn.Module, inputs: Tensor) -> Tensor:
    """The logits of two inputs, without numbers."""
    try:
        with torch.no_grad():
            logits = answer_of(net(inputs.new_empty(2, *inputs.shape)))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--model {name} can't answer inputs of shape {tuple(inputs.shape)} that have no numbers: {_said(error)} "
            "Give the right --input, or plan it with fp.plan(module, batch, on=[…]), a module with a training_step."
        ) from error
    if logits.dim() < 2:
        raise ConfigError(
            f"--model {name} answers two inputs with a tensor of shape {tuple(logits.shape)}: expected logits, "
            "(B, classes) or (B, T, classes)."
        )
    return logits


def _said(error: Exception) -> str:
    """An error of somebody else's code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": .") + "."


def _found(name: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"--model {name}: expected module:callable, such as torchvision.models:resnet50.")
    try:
        module = _imported(module_name)
    except Exception as error:
        raise ConfigError(f"--model {name}: {module_name} can't be imported: {_said(error)}") from error
    if not callable(getattr(module, attribute, None)):
        names = [one for one in dir(module) if not one.startswith("_") and callable(getattr(module, one))]
        raise ConfigError(f"--model {name}: {module_name} has no {attribute}. {did_you_mean(attribute, names)[:200]}")
    return getattr(module, attribute)


def _imported(name: str) -> Any:
    """A module; torchvision, too, where its compiled part can't be loaded, as beside a torch for the CPU."""
    uses_torchvision = name.split(".")[0] in ("torchvision", "timm", "transformers")
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
    """One input without memory, of a shape such as `3x224x224` or `1024:int64`."""
    given = re.fullmatch(r"([1-9][0-9]{0,8}(?:x[1-9][0-9]{0,8}){0,7})(?::([a-z]+[0-9]*))?", shape)
    sizes = [int(part) for part in given[1].split("x")] if given else []
    dtype = getattr(torch, given[2] or "float32", None) if given else None
    if not sizes or math.prod(sizes) > 2**31 or not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"--input {shape[:60]}: expected sizes such as {IMAGE}, and a type after a colon, such as 1024:int64."
        )
    return torch.empty(sizes, dtype=dtype, device="meta")
