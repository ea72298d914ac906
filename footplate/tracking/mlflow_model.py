"""Logging the trained model to MLflow: the training process writes it to a folder, and the uploader logs it from there.

A model with an `example_input_array` of tensors is written as an exported program (see `footplate.checkpoint.export`). It
loads without the user's code and has a signature and an input example. Its batch dimension is free if the model allows it.
Any other model is pickled, as MLflow does it, and needs the user's code for loading.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

PROGRAM = "model.pt2"
PICKLE = "model.pkl"
LOGGED = "logged.txt"


def stage(module: nn.Module, directory: Path) -> None:
    """Write a model to `directory`. The module may be on any device and in any mode; it is not changed.

    Raises:
        ConfigError: the module holds a value that can't be copied or pickled.
    """
    import torch

    from footplate.checkpoint.export import cpu_copy, trace

    directory.mkdir(parents=True, exist_ok=True)
    example = getattr(module, "example_input_array", None)
    if _is_positional_tensors(example):
        try:
            torch.export.save(trace(module), directory / PROGRAM)
            return
        except ConfigError as error:
            log.warning("The model is logged to MLflow as a pickle, which needs your code to load: %s", error)

    import cloudpickle

    replica = cpu_copy(module).eval()
    try:
        (directory / PICKLE).write_bytes(cloudpickle.dumps(replica))
    except Exception as error:
        raise ConfigError(f"{type(module).__name__} can't be pickled: {error}") from error


def log_staged(directory: Path, run_id: str, step: int, register_as: str | None) -> None:
    """Log the model in `directory` to a run, register it on request, and remove the directory. May be repeated."""
    import mlflow

    if not directory.exists():
        return
    logged = directory / LOGGED
    if not logged.exists():
        logged.write_text(_log(directory, run_id, step))
    if register_as:
        mlflow.register_model(logged.read_text(), register_as)
    shutil.rmtree(directory)


def _log(directory: Path, run_id: str, step: int) -> str:
    """Log the model and return its URI."""
    import cloudpickle
    import mlflow
    import torch

    options: dict[str, Any]
    if (directory / PROGRAM).exists():
        program = torch.export.load(directory / PROGRAM)
        module = program.module()
        assert program.example_inputs is not None
        options = {"serialization_format": "pt2", **_signature(module, program.example_inputs[0])}
        needed = ("torch", "numpy")
    else:
        module = cloudpickle.loads((directory / PICKLE).read_bytes())
        options = {"serialization_format": "pickle"}
        needed = ("torch", "numpy", "cloudpickle", "footplate")
    requirements = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in needed]
    log_model = _mlflow_pytorch().log_model
    with mlflow.start_run(run_id=run_id, log_system_metrics=False):
        return log_model(module, name="model", step=step, pip_requirements=requirements, **options).model_uri


def _signature(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Make the signature and the input example of a model whose inputs are positional tensors."""
    import torch
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types import Schema, TensorSpec

    with torch.no_grad():
        output = module(*inputs)
    output = output.numpy() if isinstance(output, torch.Tensor) else None
    arrays = [tensor.numpy() for tensor in inputs]
    if len(arrays) == 1:
        return {"signature": infer_signature(arrays[0], output), "input_example": arrays[0]}
    specs: list[Any] = [TensorSpec(array.dtype, (-1, *array.shape[1:]), f"input_{i}") for i, array in enumerate(arrays)]
    outputs = infer_signature(arrays[0], output).outputs
    return {"signature": ModelSignature(Schema(specs), outputs), "input_example": inputs}


def _is_positional_tensors(example: Any) -> bool:
    """Return True if MLflow can describe the example: one or several tensors of types that NumPy has, too."""
    import torch

    tensors = example if isinstance(example, (tuple, list)) else (example,)
    return all(isinstance(tensor, torch.Tensor) and tensor.dtype is not torch.bfloat16 for tensor in tensors)


def _mlflow_pytorch() -> Any:
    """Import `mlflow.pytorch` without Lightning, which it would import for a callback."""
    hidden = sys.modules.get("pytorch_lightning")
    sys.modules["pytorch_lightning"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("mlflow.pytorch")
    finally:
        del sys.modules["pytorch_lightning"]
        if hidden is not None:
            sys.modules["pytorch_lightning"] = hidden
