"""A module's own step, captured once as one functional graph.

    captured = capture_training(module, optimizer, batch)

What the user wrote stays as it is: `training_step`, `loss.backward()`, clipping and `optimizer.step()` run once, with
tensors that have a shape and no memory, and every operation that they reach is written down. The result is a graph with
no side effects, of ATen's core operations:

    (state, learning rates, key, batch) → (state, loss, logs)

    program.py          the capture itself
    captured.py         what comes back: the graph, and what must be known of it
    sequence.py         a training step in its order, with automatic and with manual optimisation
    attached.py         the module as its step sees it
    optimizers.py       what torch's optimizers remember from the beginning, and how their code is traced
    foreign.py          optimizers of other packages
    optimizer_replay.py an optimizer's step, traced once for each kind of parameter
    state.py            what a step reads and changes, by the module's and the optimizer's own names
    functional.py       all of torch's private interface that this needs, and nothing else
    attention.py        attention as one operation, whose backward pass computes its matrix again
    recurrence.py       GRU, LSTM and RNN as one operation for each layer, whatever the length
    shapes.py           functions whose result's shape their arguments say
    averaging.py        the one point at which several devices meet
    rng_ops.py          which random numbers a random operation draws, also when a layer is computed again
    symbolic_scalars.py numbers that change from step to step: inputs, or what decides which program it is
    arithmetic.py       what Python computes of them
    attribute_guards.py plain attributes that a step reads, and whether they are still what they were
    side_effects.py     plain attributes that a step changes, which would stand still
    refusals.py         what can't be captured, with the line of the user's code that asked for it

`docs/reference/xla-limits.md` says what is supported. Nothing here imports JAX; `step/lowering/` makes a program of the
graph.
"""

from footplate.step.xla.capture.captured_step import Captured
from footplate.step.xla.capture.refusals import CaptureError
from footplate.step.xla.capture.state import load_state, state_of
from footplate.step.xla.capture.tracing import capture_evaluation, capture_training

__all__ = ["CaptureError", "Captured", "capture_evaluation", "capture_training", "load_state", "state_of"]
