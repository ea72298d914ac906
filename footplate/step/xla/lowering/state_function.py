"""A captured step as a function of its state.

The state is a dictionary of arrays under the captured names (`capture/state.py`). The batch is a tuple of arrays in the
order of its leaves. JAX knows both forms, whatever classes the batch has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.state import Path, State
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.step.xla.lowering.arrays import array_type, to_array, to_tensor
from footplate.step.xla.lowering.interpret import interpret, require_ops

Arrays = dict[Path, jax.Array]


def lower(captured: Captured, platform: str | None = None) -> Callable[..., Any]:
    """Lower a captured step to a pure function for `jax.jit`.

    Args:
        captured: the step.
        platform: the platform to compile for, as JAX names it ("cpu", "tpu", …); by default JAX's own here.

    Returns:
        For training, `(state, rates, key, batch) → (state, loss, logs)`, and for an evaluation `(state, key, batch,
        rates=()) → (outputs, logs)`, with the outputs as a tuple of leaves (`captured.output` is their tree).

    Raises:
        MissingOperation: the graph has operations that the table lacks.
    """
    require_ops(captured.name, captured.graph)
    names = tuple(captured.logs)

    def run(state: Arrays, rates: Sequence[Any], key: jax.Array, batch: Sequence[Any]) -> list[Any]:
        rates = [jnp.asarray(rate, array_type(torch.float64)) for rate in rates]
        inputs = [*(state[path] for path in captured.paths), *rates, *batch]
        return interpret(captured.graph, inputs, key, platform or jax.default_backend())

    def train(
        state: Arrays, rates: Sequence[Any], key: jax.Array, batch: Sequence[Any]
    ) -> tuple[Arrays, Any, dict[str, Any]]:
        outputs = run(state, rates, key, batch)
        after, (loss, *logged) = outputs[: len(captured.paths)], outputs[len(captured.paths) :]
        return dict(zip(captured.paths, after, strict=True)), loss, dict(zip(names, logged, strict=True))

    def evaluate(
        state: Arrays, key: jax.Array, batch: Sequence[Any], rates: Sequence[Any] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        outputs = run(state, rates, key, batch)
        count = len(outputs) - len(names)
        return tuple(outputs[:count]), dict(zip(names, outputs[count:], strict=True))

    return train if captured.trains else evaluate


def arrays_of(state: State) -> Arrays:
    """A state of tensors as arrays."""
    return {path: to_array(tensor) for path, tensor in state.items()}


def tensors_like(state: State, arrays: Mapping[Path, Any]) -> State:
    """Arrays as tensors of the types that they have in `state`."""
    return {path: to_tensor(arrays[path], tensor.dtype) for path, tensor in state.items()}


def batch_arrays(captured: Captured, batch: Any, devices: int = 1) -> tuple[jax.Array, ...]:
    """The tensors of a batch as arrays, in the step's order.

    Args:
        captured: the step.
        batch: a batch of the form that was captured, `devices` times as long in its tensors' first dimension.
        devices: the number of devices that share it.

    Raises:
        CaptureError: the batch has another form than the captured one.
    """
    leaves, tree = pytree.tree_flatten(batch)
    form = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), None) for leaf in leaves)
    tree_then, form_then = captured.batch
    if (tree, form) != (
        tree_then,
        tuple(((shape[0] * devices, *shape[1:]) if devices > 1 else shape, dtype) for shape, dtype in form_then),
    ):
        raise CaptureError(
            f"{captured.name} was captured for batches of {form_then} and is given one of {form} for {devices} device(s): "
            "a program holds for one form. Capture the step again for this form."
        )
    return tuple(to_array(leaf) for leaf in leaves)
