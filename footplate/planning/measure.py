"""`footplate plan --measure`: run a few steps on this machine's CPU, and compare them with the plan.

The program for `cpu` is compiled again in the compiler's process and runs there on random numbers. That separates its
memory from that of the plan. Eager torch runs in this process. Both begin with a step that isn't counted.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from footplate.core.hooks import step_arguments
from footplate.hardware.transfer import map_tensors
from footplate.planning.choices import Choice, Measured
from footplate.planning.program_client import PlanError, compiled_program
from footplate.planning.serialized_step import serialize
from footplate.planning.subject import Subject, captured, prepared
from footplate.step.optimizers import configure
from footplate.step.precision import Precision
from footplate.step.xla.capture.emptied import empty_copy, resized_leaf
from footplate.step.xla.capture.torch_tracing import pytree

STEPS = 5


def measure(subject: Subject, choice: Choice) -> Measured:
    """Run some steps of a planned training.

    Args:
        subject: the training.
        choice: the plan for `cpu`.

    Raises:
        PlanError: a step doesn't fit into this machine's memory.
    """
    if not choice.fits or choice.memory.peak is None or choice.roofline.step_s is None:
        raise PlanError("--measure: this machine doesn't have enough memory for a step.")
    step = serialize(captured(subject, subject.batch_size, averages=False))
    program = compiled_program(step, choice.target, STEPS)
    assert program.measured is not None
    return Measured(
        predicted_peak_bytes=choice.memory.peak,
        peak_bytes=program.measured["peak_bytes"],
        least_step_s=choice.roofline.step_s,
        xla_step_s=program.measured["step_s"],
        xla_fastest_step_s=program.measured["fastest_s"],
        eager_step_s=_eager_step_s(subject),
    )


def _eager_step_s(subject: Subject) -> float:
    """Time a step of eager torch: forward, backward and the optimizer, without a trainer."""
    module = empty_copy(prepared(subject), "cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        _fill(tensor.data)
    (optimizer,), _ = configure(module)
    batch = map_tensors(
        pytree.tree_map(lambda leaf: resized_leaf(leaf, subject.batch_size, subject.precision), subject.batch),
        lambda tensor: _fill(torch.empty_like(tensor, device="cpu")),
    )
    module.log = module.log_dict = lambda *_, **__: None

    precision, seconds = Precision.parse(subject.precision), []
    for number in range(STEPS + 1):
        begun = time.perf_counter()
        arguments = (batch, number, 0)[: step_arguments(module.training_step, "training_step")]
        with precision.forward_context(torch.device("cpu")):
            output: Any = module.training_step(*arguments)
        optimizer.zero_grad()
        (output["loss"] if isinstance(output, dict) else output).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)

    # The first step also allocates memory and starts threads.
    return statistics.median(seconds[1:])


def _fill(tensor: Tensor) -> Tensor:
    """Fill a tensor with small positive numbers; integers, which are classes or tokens, with zeros."""
    return tensor.uniform_(0.0, 0.02) if tensor.is_floating_point() else tensor.zero_()
