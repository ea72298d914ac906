"""Logging the trained model to MLflow: the training process writes it to a folder, and the uploader logs it from there.

A model with an `example_input_array` of tensors is written as an exported program (see `footplate.checkpoint.export`). It
loads without the user's code and has a signature and an input example. Its batch dimension is free if the model allows it.
Any other model is pickled, as MLflow does it, and needs the user's code for loading.

The training process also writes the example and the model's output for it. So the uploader logs an exported program without
importing torch. `mlflow.pytorch.log_model` would load the program, export it again, and load it once more to try its
example, which takes seven seconds of processor time for a small model.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

log = logging.getLogger(__name__)

PROGRAM = "model.pt2"
EXAMPLE = "example.npz"
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
            program = trace(module)
            _write_example(program, directory / EXAMPLE)
            torch.export.save(program, directory / PROGRAM)
            return
        except ConfigError as error:
            log.warning("The model is logged to MLflow as a pickle, which needs your code to load: %s", error)

    import cloudpickle

    replica = cpu_copy(module).eval()
    try:
        (directory / PICKLE).write_bytes(cloudpickle.dumps(replica))
    except Exception as error:
        raise ConfigError(f"{type(module).__name__} can't be pickled: {error}") from error


def _write_example(program: ExportedProgram, path: Path) -> None:
    """Write the example inputs of a program as `input_0`, `input_1`, …, and the output for them, if it is one tensor."""
    import numpy as np
    import torch

    assert program.example_inputs is not None
    inputs = program.example_inputs[0]
    arrays = {f"input_{i}": tensor.numpy() for i, tensor in enumerate(inputs)}
    try:
        with torch.no_grad():
            output = program.module()(*inputs)
    except Exception as error:
        raise ConfigError(f"its exported program fails for the example: {error}") from error
    if isinstance(output, torch.Tensor) and output.dtype is not torch.bfloat16:
        arrays["output"] = output.numpy()
    np.savez(path, allow_pickle=False, **arrays)


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
    import mlflow
    from mlflow.models import Model

    with mlflow.start_run(run_id=run_id, log_system_metrics=False):
        if (directory / PROGRAM).exists():
            # MLflow would load the model to try its example.
            options: dict[str, Any] = {"name": "model", "step": step, "validate_serving_input": False}
            return Model.log(artifact_path=None, flavor=_Exported(directory), **options).model_uri

        import cloudpickle

        module = cloudpickle.loads((directory / PICKLE).read_bytes())
        options = {
            "serialization_format": "pickle",
            "pip_requirements": _pinned("torch", "numpy", "cloudpickle", "footplate"),
        }
        return _mlflow_pytorch().log_model(module, name="model", step=step, **options).model_uri


class _Exported:
    """A flavor that writes an exported program as `mlflow.pytorch` does, which also loads it."""

    # MLflow keeps this with the model.
    __name__ = "mlflow.pytorch"

    def __init__(self, directory: Path) -> None:
        import numpy as np

        self._program = directory / PROGRAM
        with np.load(directory / EXAMPLE, allow_pickle=False) as example:
            self._output = example.get("output")
            self._inputs = [example[name] for name in example.files if name != "output"]

    def save_model(self, path: str, mlflow_model: Any, **_: Any) -> None:
        """Write the model's folder. `Model.log` calls this."""
        from mlflow import pyfunc
        from mlflow.models.utils import _save_example
        from mlflow.utils.environment import _process_pip_requirements, _PythonEnv

        folder = Path(path)
        (folder / "data").mkdir(parents=True)
        shutil.copyfile(self._program, folder / "data" / PROGRAM)
        mlflow_model.signature = self._signature()
        mlflow_model.model_size_bytes = self._program.stat().st_size
        version = importlib.metadata.version("torch")
        mlflow_model.add_flavor("pytorch", model_data="data", pytorch_version=version, code=None)
        if len(self._inputs) == 1:
            _save_example(mlflow_model, self._inputs[0], path)
            pyfunc.add_to_model(
                mlflow_model, "mlflow.pytorch", data="data", pickle_module_name="mlflow.pytorch.pickle_module",
                conda_env="conda.yaml", python_env="python_env.yaml", model_config={"device": None},
            )  # fmt: skip
        mlflow_model.save(str(folder / "MLmodel"))

        conda, requirements, _constraints = _process_pip_requirements(None, _pinned("torch", "numpy"))
        (folder / "conda.yaml").write_text(json.dumps(conda, indent=2) + "\n")  # YAML, too
        (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
        _PythonEnv.current().to_yaml(str(folder / "python_env.yaml"))

    def _signature(self) -> Any:
        from mlflow.models import ModelSignature, infer_signature
        from mlflow.types import Schema, TensorSpec

        signature = infer_signature(self._inputs[0], self._output)
        if len(self._inputs) == 1:
            return signature
        specs: list[Any] = [
            TensorSpec(array.dtype, (-1, *array.shape[1:]), f"input_{i}") for i, array in enumerate(self._inputs)
        ]
        return ModelSignature(Schema(specs), signature.outputs)


def _pinned(*names: str) -> list[str]:
    """Pin packages at the versions of this environment, without the local part, which no index has."""
    return [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in names]


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
