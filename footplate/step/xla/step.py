"""The step of the trainer, by programs of XLA.

Where the weights are. On the devices, as the state of the programs; the module's own tensors on the host are older, until
somebody may look at them:

    show()     the host has what the devices have          before a checkpoint is written
    lend()     … and from then on it is the host's         before a hook of somebody who may look or write

After `lend`, the next step puts the module's and the optimizer's tensors onto the devices again, whatever was done to
them, and checks that its programs still hold (`programs.py`). At the end of training the weights are lent for good.

What dropout draws comes from the seed that the loop gives to torch's generator before each batch, so that a run that
continues draws what it would have drawn. A call of several steps is given the learning rates that the schedulers will have
set by then, and returns everything for each of its steps: what follows it is as if they had run one by one.

Nothing waits for the devices, except that virtual devices, which share one pool of threads, run one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from footplate.errors import CheckpointError, ConfigError, DataError
from footplate.metrics import batch_rows
from footplate.rng import mix
from footplate.step.base import Step, StepSpec
from footplate.step.capture import load_state, state_of
from footplate.step.capture.functional import pytree
from footplate.step.capture.state import State
from footplate.step.eager import EagerStep
from footplate.step.lowering import rates_of, tensors_like
from footplate.step.lowering.arrays import to_tensor
from footplate.step.lowering.parallel import mesh_of
from footplate.step.xla import sharing
from footplate.step.xla.programs import Compilation, Program, Programs, settings_of, trained_by
from footplate.step.xla.support import check_module
from footplate.step.xla.values import OnDevice

_CAPTURED = "training_step is a program: this is called where it is captured, and nowhere else."


class XLAStep(Step):
    """See the module's docstring.

    Args:
        spec: what the step is made of.
        devices: JAX's, which all run the same program.
    """

    def __init__(self, spec: StepSpec, devices: Sequence[Any]) -> None:
        super().__init__(spec)
        check_module(spec)
        self.chunk_size = spec.iterations_per_loop
        self._mesh = mesh_of(devices)
        self._virtual = len(devices) > 1 and devices[0].platform == "cpu"
        self._wide = spec.precision.name == "64-true"
        self._optimizers = trained_by(spec)
        self._accumulates = spec.accumulate_grad_batches != 1
        self._summed = 0  # batches of the window so far, whose gradients are in the state
        self._like = self._host_state()
        self._state: dict[Any, jax.Array] | None = None
        self._ahead = False  # the devices' weights are newer than the module's
        self._lost = False  # a step failed when it had taken the state's memory
        self._checked: set[str] = set()  # the stages whose programs hold, no one's code having run since
        self._programs = Programs(spec, self._mesh)
        self._settings = settings_of(spec.optimizers)
        self._shows_loss = bool(spec.hooks.lookers("on_train_batch_end"))

    @property
    def compilations(self) -> list[Compilation]:
        """The programs that were compiled, in order."""
        return self._programs.made

    # Training

    def train(self, batches: Sequence[Any], batch_idx: int, last: bool, epoch: int) -> Iterator[Any]:
        """Train on each batch when its output is asked for; on a whole chunk when that of the first one is."""
        seed = torch.default_generator.initial_seed()
        if 1 < len(batches) == self.chunk_size:
            flat = [self._flat(batch) for batch in batches]
            if all(self._alike(one, flat[0]) for one in flat):
                yield from self._chunk(batches, flat, seed)
                return
        for index, batch in enumerate(batches):
            ends_epoch = last and index == len(batches) - 1
            ends_window = ends_epoch or (batch_idx + index + 1) % self.spec.accumulate_grad_batches == 0
            yield from self._single(batch, seed + index, ends_window)

    def _single(self, batch: Any, seed: int, ends_window: bool) -> Iterator[Any]:
        leaves, tree = self._flat(batch)
        with self._numbers():
            program = self._ready(leaves, tree, ends_window)
            given = sharing.place(self._mesh, self._arrays(leaves, program), program.spec(sharing.ROWS))
            with self._programs.noted(program, leaves, tree):
                rates = np.array(rates_of(self._optimizers), np.float64)
                loss, logs = self._call(program, program.one, rates, _words(seed), given)
        yield self._finished(program, batch, loss, logs, None)

    def _chunk(self, batches: Sequence[Any], flat: list[Any], seed: int) -> Iterator[Any]:
        leaves, tree = flat[0]
        count = len(batches)
        with self._numbers():
            program = self._ready(leaves, tree)
            parts = [self._arrays(one, program) for one, _ in flat]
            stacked = [np.stack(arrays) for arrays in zip(*parts, strict=True)]
            given = sharing.place(self._mesh, stacked, program.spec(sharing.ROWS_OF_EACH))
            with self._programs.noted(program, leaves, tree, count):
                rates = np.array(self.spec.rates_ahead(count), np.float64)
                keys = np.stack([_words(seed + index) for index in range(count)])
                losses, logs = self._call(program, program.several, rates, keys, given)
        for index, batch in enumerate(batches):
            yield self._finished(program, batch, losses, logs, index)

    def _ready(self, leaves: list[Tensor], tree: Any, ends_window: bool = True) -> Program:
        """The program for a batch, and the state on the devices."""
        settings = settings_of(self.spec.optimizers)
        if "training" not in self._checked or settings != self._settings:
            self._settings = settings
            self._check("training")
        program = self._programs.training(leaves, tree, ends_window)
        self._put()
        return program

    def _call(self, program: Program, run: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
        assert self._state is not None
        paths, state = program.captured.paths, self._state
        try:
            after, loss, logs = run(tuple(state[path] for path in paths), *given)
        except Exception:
            self._lost = any(array.is_deleted() for array in state.values())
            raise
        self._state = dict(zip(paths, after, strict=True))
        self._ahead = True
        self._summed = 0 if program.ends_window else self._summed + 1
        if self._virtual:
            jax.block_until_ready(loss)
        return loss, logs

    def _finished(self, program: Program, batch: Any, loss: Any, logs: Any, place: int | None) -> Any:
        """What follows one step: the optimizers' are counted, and its logs are noted."""
        for _ in range(program.captured.steps):
            self.spec.on_optimizer_step()
        options = program.captured.logs
        noted = {name: OnDevice(value, place) for name, value in zip(options, logs, strict=True)}
        self._record(program, batch, noted)
        value = OnDevice(loss, place)
        return torch.tensor(float(value)) if self._shows_loss else value

    def _record(self, program: Program, batch: Any, values: dict[str, OnDevice]) -> None:
        """Give values to `self.log` as the step did; a batch size that it named was that of one part of the batch."""
        for name, options in program.captured.logs.items():
            if program.parts > 1 and options.get("batch_size") and program.captured.trains:
                options = {**options, "batch_size": batch_rows(batch)}
            self.spec.record(batch, name, values[name], options)

    # Evaluation

    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> Any:
        """What the step returned, as tensors on the host; None where nobody takes it."""
        leaves, tree = self._flat(batch)
        with self._numbers():
            if stage not in self._checked:
                self._check(stage)
            program = self._programs.evaluation(stage, leaves, tree)
            state = self._put()
            captured = program.captured
            arrays = [sharing.host_array(leaf) for leaf in leaves]
            given = sharing.place(self._mesh, arrays, program.spec(sharing.ROWS))
            key = _words(mix(torch.default_generator.initial_seed(), batch_idx, dataloader_idx or 0))
            with self._programs.noted(program, leaves, tree):
                outputs, logs = program.evaluation(tuple(state[path] for path in captured.paths), key, given)
            if self._virtual:
                jax.block_until_ready(logs)
        self._record(program, batch, {name: OnDevice(one) for name, one in zip(captured.logs, logs, strict=True)})
        if stage != "predict" and not self.spec.hooks.lookers(f"on_{stage}_batch_end"):
            return None
        with torch.inference_mode(False):
            return pytree.tree_unflatten(_tensors(program, outputs), captured.output)

    # The weights

    def show(self) -> None:
        """Give the module and the optimizer, on the host, the state that the devices have.

        Raises:
            CheckpointError: a step failed in the middle of changing it.
        """
        if self._lost:
            raise CheckpointError("The step failed while it changed the weights: what the devices hold is lost.")
        if self._state is not None and self._ahead:
            with torch.inference_mode(False), torch.no_grad():
                load_state(self.spec.module, self._optimizers, tensors_like(self._like, self._state))
            self._ahead = False

    def lend(self) -> None:
        """`show`, and take the host's as the state from then on: somebody may look at it, or change it."""
        if self._lost:
            return
        self.show()
        self._state = None
        self._checked.clear()

    def begin_epoch(self) -> None:
        self._checked.discard("training")

    def release(self) -> None:
        self.lend()

    def state_dict(self) -> dict[str, Any]:
        """As the eager step's: the gradients of an unfinished window, so that another accelerator may finish it."""
        if not self._summed:
            return {}
        named = self.spec.module.named_parameters()
        return {"accumulated": self._summed, "gradients": {name: p.grad for name, p in named if p.grad is not None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._ahead = None, False
        self._summed = state.get("accumulated", 0)
        parameters = dict(self.spec.module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = gradient.to(parameters[name].dtype)

    def _check(self, stage: str) -> None:
        self._programs.check(stage)
        self._checked.add(stage)

    def _put(self) -> dict[Any, jax.Array]:
        """The state on the devices."""
        if self._lost:
            raise ConfigError("A step failed while it changed the weights: begin anew, or from a checkpoint.")
        if self._state is None:
            self._like = self._host_state()
            self._state = sharing.everywhere(self._mesh, self._like)
            self._ahead = False
        return self._state

    def _host_state(self) -> State:
        """The state in the module's and the optimizers' own tensors."""
        state = state_of(self.spec.module, self._optimizers, gradients=self._accumulates)
        if self._summed:
            return state
        return {path: torch.zeros_like(one) if path[0] == "gradients" else one for path, one in state.items()}

    def finish_window(self, epoch: int, batch_idx: int) -> None:
        """Step with a window that nobody knew to be the last: torch does, on the host, as there is no program for it."""
        if self._summed:
            self.lend()
            eager = EagerStep(self.spec)
            eager.load_state_dict(self.state_dict())
            eager.finish_window(epoch, batch_idx)
            self._summed = 0

    # What a program does by itself

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(_CAPTURED)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        raise ConfigError(_CAPTURED)

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str) -> None:
        raise ConfigError(_CAPTURED)

    # Batches

    def _flat(self, batch: Any) -> tuple[list[Any], Any]:
        tensors, self._programs.left_out = sharing.without_text(batch)
        leaves, tree = pytree.tree_flatten(self.spec.precision.convert_batch(tensors))
        other = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
        if other is not None:
            raise DataError(
                f"a batch holds {other!r:.60}: a compiled step takes tensors alone. What stands under a key of a dict is "
                "left out; leave this out too, or make it a tensor."
            )
        return leaves, tree

    @staticmethod
    def _alike(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
        pairs = zip(one[0], other[0], strict=False)
        return one[1] == other[1] and all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)

    def _arrays(self, leaves: list[Tensor], program: Program) -> list[np.ndarray]:
        """A batch's values in the order in which the devices take its rows."""
        devices = self._mesh.size
        return [sharing.spread(sharing.host_array(leaf), program.parts, devices) for leaf in leaves]

    def _numbers(self) -> Any:
        """64-bit numbers for 64-true, and 32-bit ones for all other precisions, whatever JAX is set to."""
        return jax.enable_x64(self._wide)


def _words(seed: int) -> np.ndarray:
    """A seed as the two words of a key."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def _tensors(program: Program, outputs: Sequence[Any]) -> list[Any]:
    """What an evaluation returned, in torch's types."""
    last = list(program.captured.graph.graph.nodes)[-1]
    nodes = last.args[0][: len(outputs)]
    return [
        None if output is None else to_tensor(output, node.meta["val"].dtype)
        for node, output in zip(nodes, outputs, strict=True)
    ]
