"""The trainer's step on XLA: it runs compiled programs.

- The weights are on the devices (`weights.py`). After somebody may have changed them, the next step checks that its
  programs still hold (`program_cache.py`).
- Dropout draws from the seed that the loop gives to torch's generator before each batch, so a resumed run draws the
  same numbers.
- A call of several steps gets the learning rates that the schedulers will have set by then, and returns the results of
  each step. The outcome equals that of single steps.
- Batches are moved to the devices by `batch_placement.py`.
- Several processes, each with its own devices, run the same programs on all devices. Each brings its own rows
  (`batch_exchange.py`), and evaluates alone, on its own devices.

The step never waits for the devices. The exception is virtual devices: they share one pool of threads, and run one step
at a time.

What the host does counts as `transfer`, `communication` and `dispatch` only where the devices wait for it. To make a
program counts as `compilation`. All other time is that of the step: the devices compute.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.core.errors import ConfigError
from footplate.core.rng import mix
from footplate.hardware.transfer import batch_rows
from footplate.hardware.xla import cache_directory
from footplate.step.base import Step, StepSpec
from footplate.step.eager import EagerStep
from footplate.step.xla.capture import Captured
from footplate.step.xla.capture.arithmetic import Present
from footplate.step.xla.capture.module_view import reduction_of
from footplate.step.xla.capture.torch_optimizers import constants_reader, rates_of
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.step.xla.lowering.arrays import to_tensor
from footplate.step.xla.lowering.data_parallel import mesh_of
from footplate.step.xla.runtime import sharding
from footplate.step.xla.runtime.batch_exchange import BatchExchange
from footplate.step.xla.runtime.batch_placement import BatchPlacement, Placed
from footplate.step.xla.runtime.device_values import OnDevice
from footplate.step.xla.runtime.program_cache import Compilation, Program, ProgramCache, trained_by
from footplate.step.xla.runtime.sharding import Flat
from footplate.step.xla.runtime.support import check_module, check_processes
from footplate.step.xla.runtime.weights import Weights

_CAPTURED = "training_step is a compiled program: only training_step itself can call this."


def make_step(spec: StepSpec) -> Step:
    """Make the step on all requested devices. Compiled programs are kept on disk."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        config.update("jax_compilation_cache_dir", str(cache_directory(os.environ)))
    check_processes(spec)

    by_process = [
        [device for device in jax.devices() if device.process_index == process]
        for process in range(jax.process_count())
    ]
    return XLAStep(spec, [devices[index] for devices in by_process for index in spec.device_ids])


class XLAStep(Step):
    """The step on some devices of JAX.

    Args:
        spec: the parts and settings of the step.
        devices: JAX's devices. All run the same program.
    """

    def __init__(self, spec: StepSpec, devices: Sequence[Any]) -> None:
        super().__init__(spec)
        check_module(spec)
        self.chunk_size = spec.iterations_per_loop
        self._mesh = mesh_of(devices)
        self._local_mesh = mesh_of([device for device in devices if device.process_index == jax.process_index()])
        self._several = self._mesh.size > self._local_mesh.size
        self._on_cpu = devices[0].platform == "cpu"
        self._virtual = len(devices) > 1 and self._on_cpu
        self._optimizers = trained_by(spec)
        # Stages whose programs are known to hold: no user code has run since the check.
        self._checked: set[str] = set()
        self._programs = ProgramCache(spec, self._mesh, self._local_mesh)
        self._placement = BatchPlacement(spec, self._programs)
        self._weights = Weights(spec, self._mesh, self._local_mesh)
        self._constants = constants_reader(self._optimizers)
        self._settings = self._constants()
        self._shows_loss = bool(spec.hooks.weight_readers("on_train_batch_end"))
        # The loss of the newest step.
        self._last: Any = None
        self._exchange = BatchExchange(spec)
        self._weights.begin_alike()

    @property
    def compilations(self) -> list[Compilation]:
        """The compiled programs, in order."""
        return self._programs.compilations

    @property
    def captured(self) -> dict[str, Captured]:
        """The captured steps of the current programs, by the programs' names."""
        return self._programs.captured

    def flops(self) -> float | None:
        return self._programs.flops()

    # Training

    def train(self, batches: Sequence[Any], batch_idx: int, last: bool, epoch: int) -> Iterator[Any]:
        """Train on each batch when its output is asked for. A whole chunk trains when the first output is."""
        seed = torch.default_generator.initial_seed()
        if 1 < len(batches) == self.chunk_size:
            chunk = self._chunk(batches, seed, batch_idx)
            if chunk is not None:
                yield from chunk
                return
        for index, batch in enumerate(batches, batch_idx):
            ends_epoch = last and index == batch_idx + len(batches) - 1
            ends_window = ends_epoch or (index + 1) % self.spec.accumulate_grad_batches == 0
            yield self._single(batch, seed + index - batch_idx, ends_window, epoch, index)

    def _single(self, batch: Any, seed: int, ends_window: bool, epoch: int, batch_idx: int) -> Any:
        with self._unless_busy("transfer"):
            placed, share = self._placement.take("training", batch), 1.0
        if self._several:
            with self._unless_busy("communication"):
                placed, share, seed = self._shared(placed, batch_idx, seed)
        present = Present(self.spec.module, batch_idx)
        with self._dispatching(), self._placement.numbers():
            program = self._ready(placed.batch, present, ends_window)
            with self._programs.noted(program, placed.batch):
                rates = np.array([*rates_of(self._optimizers), *program.captured.counted.values(present)])
                loss, logs = self._call(program, program.one_step, rates, _words(seed), placed.arrays)
        output = self._finished(program, batch, loss, logs, None, share)
        if program.captured.skips and ends_window:
            self.finish_window(epoch, batch_idx)
        return output

    def _shared(self, placed: Placed, batch_idx: int, seed: int) -> tuple[Placed, float, int]:
        """Agree with the other processes on a batch.

        Returns:
            The batch on the devices of all processes, the share of its rows that this process brings, and the common seed.
        """
        alike, seed = self._exchange.agree([placed.own], batch_idx, placed.arrays is not None, seed)
        if alike:
            return placed, 1 / self._programs.processes, seed
        everyones, share = self._exchange.exchange(placed.own, batch_idx)
        return self._placement.place_all(placed.source, placed.own, everyones), share, seed

    def _chunk(self, batches: Sequence[Any], seed: int, batch_idx: int) -> Iterator[Any] | None:
        """Train on all batches in one call; return None if they differ, or if a step would take another path."""
        count, module = len(batches), self.spec.module
        with self._unless_busy("transfer"):
            flat = [self._placement.flat(batch) for batch in batches]
        everyones = sharding.of_all(flat[0], self._programs.processes)
        alike = all(batch.alike(flat[0]) for batch in flat) and self._programs.divides(self._programs.parts(everyones))
        if self._several:
            with self._unless_busy("communication"):
                alike, seed = self._exchange.agree(flat, batch_idx, alike, seed)
        if not alike:
            return None
        with self._dispatching(), self._placement.numbers():
            program = self._ready(everyones, Present(module, batch_idx))
            captured = program.captured
            presents = [Present(module, batch_idx + index, index * captured.steps) for index in range(count)]
            if any(captured.counted.broken(present) for present in presents):
                return None
            with self._unless_busy("transfer"):
                placed = self._placement.place_together(flat, program.parts)
            with self._programs.noted(program, everyones, count):
                each = zip(self.spec.rates_ahead(count), presents, strict=True)
                rates = np.array([[*rates, *captured.counted.values(present)] for rates, present in each])
                keys = np.stack([_words(seed + index) for index in range(count)])
                losses, logs = self._call(program, program.several_steps(count), rates, keys, placed)
        share = 1 / self._programs.processes
        return (self._finished(program, batch, losses, logs, index, share) for index, batch in enumerate(batches))

    def _ready(self, batch: Flat, present: Present, ends_window: bool = True) -> Program:
        """The program for a batch. The state is copied to the devices if it isn't there."""
        now = self._constants()
        if "training" not in self._checked or now != self._settings:
            self._check("training")
            self._constants = constants_reader(self._optimizers)
            self._settings = self._constants()
        program = self._programs.training(batch, present, ends_window)
        self._weights.put()
        return program

    def _call(self, program: Program, run: Callable[..., Any], *inputs: Any) -> tuple[Any, Any]:
        if self._several:
            inputs = (*sharding.place(self._mesh, inputs[:-1], sharding.WHOLE), inputs[-1])
        loss, logs = self._weights.change(program.captured.paths, lambda state: run(state, *inputs))
        if not program.captured.skips:
            self._weights.summed = 0 if program.ends_window else self._weights.summed + 1
        self._last = loss
        if self._virtual:
            with self.spec.times.during("step"):
                jax.block_until_ready(self._weights.put() if loss is None else loss)
        return loss, logs

    @contextlib.contextmanager
    def _unless_busy(self, cause: str) -> Iterator[None]:
        """A context whose time has this cause, unless the devices still compute at its end: then they haven't waited."""
        times = self.spec.times
        with times.during(cause):
            yield
            if not self.idle():
                times.cause = "step"

    @contextlib.contextmanager
    def _dispatching(self) -> Iterator[None]:
        """The context in which the host starts a program. If the devices computed before, they don't wait for it."""
        times = self.spec.times
        with times.during("dispatch" if self.idle() else "step"):
            yield
            if self._on_cpu and self.idle():
                # JAX computes small programs on the CPU in the call itself.
                times.cause = "step"

    def _finished(self, program: Program, batch: Any, loss: Any, logs: Any, index: int | None, share: float) -> Any:
        """Count the optimizer steps of one step, and record its logs; of a sum, this process's share."""
        for _ in range(program.captured.steps):
            self.spec.on_optimizer_step()
        noted = {
            name: OnDevice(value, index, share if share < 1 and reduction_of(options) == "sum" else 1.0)
            for (name, options), value in zip(program.captured.logs.items(), logs, strict=True)
        }
        self._record(program, batch, noted)
        if loss is None:
            return None
        value = OnDevice(loss, index)
        if not self._shows_loss:
            return value
        return pytree.tree_unflatten([torch.tensor(float(value))], program.captured.output)

    def _record(self, program: Program, batch: Any, values: dict[str, OnDevice]) -> None:
        """Record values as the step gave them to `self.log`. A batch size that it gave is the size of a batch's part."""
        for name, options in program.captured.logs.items():
            if (program.parts > 1 or self._several) and options.get("batch_size") and program.captured.trains:
                options = {**options, "batch_size": batch_rows(batch)}
            self.spec.record(batch, name, values[name], options)

    # Evaluation

    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        """The output of the step as tensors on the host; None if nobody uses it."""
        placed = self._placement.take(stage, batch)
        with self._placement.numbers():
            if stage not in self._checked:
                self._check(stage)
            present = Present(self.spec.module, batch_idx)
            program = self._programs.evaluation(stage, placed.batch, present, dataloader_idx)
            state, captured = self._weights.local_state(), program.captured
            rates = np.array(captured.counted.values(present))
            key = _words(mix(torch.default_generator.initial_seed(), batch_idx, dataloader_idx or 0))
            with self._programs.noted(program, placed.batch):
                arrays = tuple(state[path] for path in captured.paths)
                outputs, logs = program.evaluation(arrays, rates, key, placed.arrays)
            if self._virtual:
                jax.block_until_ready(logs)
        self._record(program, batch, {name: OnDevice(value) for name, value in zip(captured.logs, logs, strict=True)})
        if stage != "predict" and not self.spec.hooks.weight_readers(f"on_{stage}_batch_end"):
            return None
        with torch.inference_mode(False):
            return pytree.tree_unflatten(_tensors(program, outputs), captured.output)

    # The weights

    def fetch_weights(self, may_change: bool = False) -> None:
        with self._placement.numbers():
            self._weights.fetch(may_change)
        if may_change:
            self._checked.clear()

    def gather(self, stage: str) -> None:
        """Gather sharded weights on the devices of this process, and on the host if a hook may read them there."""
        if any(self.spec.hooks.weight_readers(f"on_{stage}_batch_{moment}") for moment in ("start", "end")):
            self.fetch_weights()
        with self._placement.numbers():
            self._weights.gather()

    def leave(self) -> None:
        self._weights.alone = True

    def begin_epoch(self) -> None:
        self._checked.discard("training")
        self._placement.forget("training")

    def release(self) -> None:
        self.fetch_weights(may_change=True)

    def state_dict(self) -> dict[str, Any]:
        return self._weights.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights.load_state_dict(state)

    def _check(self, stage: str) -> None:
        self._programs.check(stage)
        self._checked.add(stage)

    def finish_window(self, epoch: int, batch_idx: int) -> None:
        """Step with an unfinished window. There is no program for it, so torch steps on the host."""
        if self._weights.summed and self._optimizers is not None:
            self.fetch_weights(may_change=True)
            eager = EagerStep(self.spec)
            eager.load_state_dict(self.state_dict())
            eager.finish_window(epoch, batch_idx)
            self._weights.summed = 0

    # Manual optimisation is part of the program

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(_CAPTURED)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **arguments: Any) -> Any:
        raise ConfigError(_CAPTURED)

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str) -> None:
        raise ConfigError(_CAPTURED)

    # Batches

    def mover(self, stage: str) -> Callable[[Any], Any] | None:
        return self._placement.mover(stage)

    def idle(self) -> bool:
        return self._last is None or self._last.is_ready()


def _words(seed: int) -> np.ndarray:
    """The two 32-bit words of a key, from a seed."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def _tensors(program: Program, outputs: Sequence[Any]) -> list[Any]:
    """The outputs of an evaluation as tensors, in torch's types."""
    last = list(program.captured.graph.graph.nodes)[-1]
    nodes = last.args[0][: len(outputs)]
    return [
        None if output is None else to_tensor(output, node.meta["val"].dtype)
        for node, output in zip(nodes, outputs, strict=True)
    ]
