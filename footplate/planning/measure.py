"""`footplate plan --measure`: a few steps on this machine's CPU, beside what the plan says of it.

The program that was planned for `cpu` is compiled again in the compiler's process and run there on made-up numbers, so that
its memory can be told from everything else's; eager torch runs in this process. Both begin with a step that isn't counted.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from footplate.core.hooks import step_arguments
from footplate.hardware.transfer import map_tensors
from footplate.planning import subject
from footplate.planning.choices import Choice
from footplate.planning.compiled import PlanError, program
from footplate.planning.plainform import plain
from footplate.planning.subject import Subject
from footplate.step.optimizers import configure
from footplate.step.precision import Precision
from footplate.step.xla.capture.torch_tracing import pytree

STEPS = 5


@dataclass(frozen=True)
class Measured:
    """What was predicted for this machine, and what was found.

    Attributes:
        predicted_peak_bytes: memory, as the plan has it.
        peak_bytes: state and batch, and how much the process that ran the program grew at most within a step.
        least_step_s: the roofline.
        xla_step_s: the median of some steps of XLA's program.
        xla_fastest_step_s: the fastest of them.
        eager_step_s: the median of as many with eager torch.
    """

    predicted_peak_bytes: int
    peak_bytes: int
    least_step_s: float
    xla_step_s: float
    xla_fastest_step_s: float
    eager_step_s: float


def measure(about: Subject, choice: Choice) -> Measured:
    """Run steps of the training that `choice` is a plan of.

    Args:
        about: what was planned.
        choice: the plan for `cpu`.

    Raises:
        PlanError: it doesn't fit here.
    """
    if not choice.fits or choice.memory.peak is None or choice.roofline.step_s is None:
        raise PlanError("--measure: this machine hasn't enough memory for a step.")
    made = program(plain(subject.captured(about, about.batch_size, averages=False)), choice.target, STEPS)
    assert made.measured is not None
    return Measured(
        predicted_peak_bytes=choice.memory.peak,
        peak_bytes=made.measured["peak_bytes"],
        least_step_s=choice.roofline.step_s,
        xla_step_s=made.measured["step_s"],
        xla_fastest_step_s=made.measured["fastest_s"],
        eager_step_s=_eager(about),
    )


def _eager(about: Subject) -> float:
    """Seconds of a step: forward, backward, the optimizer; without a trainer around it."""
    module = subject.empty_copy(subject.prepared(about), "cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        _fill(tensor.data)
    (optimizer,), _ = configure(module)
    batch = map_tensors(
        pytree.tree_map(lambda leaf: subject.resized_leaf(leaf, about.batch_size, about.precision), about.batch),
        lambda tensor: _fill(torch.empty_like(tensor, device="cpu")),
    )
    module.log = module.log_dict = lambda *_, **__: None
    precision, seconds = Precision.parse(about.precision), []
    for number in range(STEPS + 1):
        begun = time.perf_counter()
        arguments = (batch, number, 0)[: step_arguments(module.training_step, "training_step")]
        with precision.forward_context(torch.device("cpu")):
            output: Any = module.training_step(*arguments)
        optimizer.zero_grad()
        (output["loss"] if isinstance(output, dict) else output).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def _fill(tensor: Tensor) -> Tensor:
    """Small positive numbers, zeros for integers: a class, a token."""
    return tensor.uniform_(0.0, 0.02) if tensor.is_floating_point() else tensor.zero_()
