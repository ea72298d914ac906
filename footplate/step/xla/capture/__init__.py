"""A module's own step, captured once as one functional graph.

    captured = capture_training(module, optimizer, batch)

`training_step`, `loss.backward()`, clipping and `optimizer.step()` run once, with tensors that have a shape and no
memory, and every operation is recorded. The result is a graph of ATen's core operations, without side effects:

    (state, learning rates, key, batch) → (state, loss, logs)

    tracing.py            the capture itself
    captured_step.py      the result: the graph, and what its caller must know
    traced_step.py        the operations of `step/phases.py` with traced tensors
    module_view.py        the module as its step sees it
    torch_optimizers.py   the initial state of torch's optimizers, and how their code is traced
    other_optimizers.py   optimizers of other packages
    optimizer_replay.py   an optimizer's step, traced once for each kind of parameter
    state.py              the state of a step, under the module's and the optimizer's own names
    torch_tracing.py      the private names of torch that the capture uses
    eager_operations.py   notes at the nodes about the eager operations that they come from
    attention_op.py       attention as one operation, whose backward pass computes its matrix again
    attention_masks.py    attention masks that hold no data
    recurrence_op.py      GRU, LSTM and RNN as one operation for each layer, for any length
    replaced_functions.py the functions of torch that become others, such as these two
    averaging_op.py       the one operation at which several devices meet
    rng_ops.py            the random numbers of each operation, also when a layer is computed again
    symbolic_scalars.py   numbers that change from step to step: inputs, or decisions between programs
    arithmetic.py         Python's arithmetic with these numbers
    attribute_guards.py   plain attributes that a step reads, and checks that they are unchanged
    side_effects.py       plain attributes that a step changes, which would stay constant
    matrix_products.py    the matrix products in a graph
    needs.py              arithmetic, memory traffic and peak memory of a graph
    emptied.py            modules and batches without memory
    refusals.py           errors, with the line of the user's code

`docs/reference/xla-limits.md` says what is supported. Nothing here imports JAX. `step/xla/lowering/` makes a program of
the graph.
"""

from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.state import load_state, state_of
from footplate.step.xla.capture.tracing import capture_evaluation, capture_training

__all__ = ["CaptureError", "Captured", "capture_evaluation", "capture_training", "load_state", "state_of"]
