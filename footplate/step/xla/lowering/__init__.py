"""A captured step as a JAX function: each operation of ATen through a table, all compiled by XLA as one program.

    captured = capture_training(module, optimizer, batch)
    step = jax.jit(lower(captured), donate_argnums=0)
    state = arrays_of(state_of(module, optimizer))
    state, loss, logs = step(state, rates_of(optimizer), jax.random.key(0), batch_arrays(captured, batch))
    load_state(module, optimizer, tensors_like(state_of(module, optimizer), state))

    table.py            how to enter an operation, and its context
    pointwise.py        operations on each element
    reductions.py       many elements to fewer; softmax, order
    shapes.py           views, slices, joins
    linalg.py           products of matrices
    attention.py        attention, some queries at a time
    recurrence.py       recurrent layers, one time step after the other
    convolution.py      convolution and pooling; cpu_convolution.py has the forms that are fast on a CPU
    sampling.py         images resized, or sampled at points
    fourier.py          Fourier transforms, and complex numbers
    normalisation.py    batch, layer and group normalisation
    indexing.py         elements by indices
    creation.py         tensors made of numbers alone
    random.py           random numbers, from keys
    interpret.py        a graph, node by node; missing operations
    arrays.py           tensors to arrays and back
    state_function.py   a captured step as a function of its state
    data_parallel.py    the same on several devices

This package needs the extra `xla`. Importing it imports JAX.
"""

from importlib import import_module

from footplate.core.optional import require

require("jax", "xla", "A step compiled by XLA")

from footplate.step.xla.capture.torch_optimizers import rates_of  # noqa: E402
from footplate.step.xla.lowering.interpret import MissingOp, MissingOperation, interpret, missing_ops  # noqa: E402
from footplate.step.xla.lowering.state_function import arrays_of, batch_arrays, lower, tensors_like  # noqa: E402
from footplate.step.xla.lowering.table import LOWERINGS  # noqa: E402

__all__ = [
    "LOWERINGS", "MissingOp", "MissingOperation", "arrays_of", "batch_arrays", "interpret", "lower", "missing_ops",
    "rates_of", "supported_ops", "tensors_like",
]  # fmt: skip

FAMILIES = (
    "pointwise",
    "reductions",
    "shapes",
    "linalg",
    "attention",
    "recurrence",
    "convolution",
    "sampling",
    "fourier",
    "normalisation",
    "indexing",
    "creation",
    "random",
    "data_parallel",
)


def _filled() -> dict[str, list[str]]:
    """Import every family; return the operations of each."""
    families, known = {}, set(LOWERINGS)
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
        families[family] = sorted(str(operation).removeprefix("aten.") for operation in set(LOWERINGS) - known)
        known = set(LOWERINGS)
    return families


_OPERATIONS = _filled()


def supported_ops() -> dict[str, list[str]]:
    """The operations of the table by family, as `docs/reference/xla-operations.md` lists them."""
    return _OPERATIONS
