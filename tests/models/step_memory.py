"""The memory of an eager step on the CPU, by torch's profiler."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import footplate as fp
from footplate.distributed.gradient_norm import local_part


def measured_peak(module: fp.Module, optimizer: torch.optim.Optimizer, example: Tensor, precision: str) -> int:
    """The most bytes that are alive in a step after the first, with state and batch; of a sharded module, this rank's."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = module.training_step(example, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # The profiler doesn't know tensors from before it, so no gradient may be among them.
    step()
    optimizer.zero_grad()
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    held = sum(local_part(tensor).nbytes for tensor in (*module.parameters(), *module.buffers(), *state, example))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        step()
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return held + max(itertools.accumulate(sizes))
