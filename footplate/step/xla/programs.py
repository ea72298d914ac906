"""One program for each form of batch, made when a batch of that form comes for the first time.

    form of batch ──► capture (a graph, for one device's part) ──► lower (a JAX function) ──► XLA, at its first call

A program holds for batches of the same shapes and types, and for the module and optimizer as they were: which parameters
learn, plain attributes that the step reads, settings of the optimizer other than its learning rates. Whoever changes one
of these pays for a compilation, and is told so with what has changed; changing them over and over is refused.

Training on several devices is data parallel, as with DDP: each has its part of the batch, and gradients, loss, logs and
statistics meet in one all-reduce. With `sync_batchnorm`, and in evaluations, XLA is given the whole batch with a note that
it lies in parts: the result is then that of one device, whatever is computed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import torch
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from footplate.errors import ConfigError
from footplate.step.base import StepSpec
from footplate.step.capture import Captured, CaptureError, capture_evaluation, capture_training
from footplate.step.capture.functional import pytree
from footplate.step.capture.optimizers import Optimizers
from footplate.step.lowering import lower
from footplate.step.lowering.parallel import AXIS
from footplate.step.xla.sharing import ROWS, ROWS_OF_EACH, WHOLE, part, parts_of, rows_of

log = logging.getLogger(__name__)

MOST_CHANGES = 8  # of what programs are made from, before it is taken for something that changes in every step
KEYS = "threefry2x32"


@dataclass(frozen=True)
class Form:
    """The form of a batch: its tree, and shape and type of each of its tensors."""

    tree: Any
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, leaves: list[Tensor], tree: Any) -> Form:
        return cls(tree, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves))

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in self.tensors)


@dataclass(frozen=True)
class Compilation:
    """A program that was made.

    Attributes:
        name: the step, such as `"Classifier.training_step"`.
        form: of the batches that it holds for.
        steps: how many steps a call of it makes.
        seconds: for capturing, compiling and its first call.
    """

    name: str
    form: str
    steps: int
    seconds: float


class Program:
    """A captured step, as functions that run on a mesh.

    Attributes:
        captured: the step, of one device's part of the batch where `parts` says so.
        parts: into how many parts the rows of a batch are cut; see `sharing.py`.
        ends_window: whether the optimizer steps after the batch, or only its gradients are added to those before.
    """

    def __init__(self, captured: Captured, mesh: Mesh, parts: int, whole: bool, ends_window: bool = True) -> None:
        self.captured = captured
        self.parts = parts
        self.ends_window = ends_window
        self._mesh = mesh
        self._apart = mesh.size > 1 and not whole
        self._dimensions = [len(shape) for shape, _ in captured.batch[1]]

    @cached_property
    def one(self) -> Callable[..., Any]:
        """`(state, rates, key, batch) → (state, loss, logs)`, all of them tuples in the captured order."""
        return self._compiled(self._step(), ROWS)

    @cached_property
    def several(self) -> Callable[..., Any]:
        """The same over as many steps as the batch's tensors have in their first dimension: rates, keys, losses, logs."""
        step = self._step()

        def run(state: Any, rates: Any, keys: Any, batches: Any) -> tuple[Any, Any, Any]:
            def body(state: Any, given: Any) -> tuple[Any, Any]:
                state, loss, logs = step(state, *given)
                return state, (loss, logs)

            state, (losses, logs) = lax.scan(body, state, (rates, keys, batches))
            return state, losses, logs

        return self._compiled(run, ROWS_OF_EACH)

    @cached_property
    def evaluation(self) -> Callable[..., Any]:
        """`(state, key, batch) → (outputs, logs)`."""
        function, paths = lower(self.captured), self.captured.paths

        def run(state: Any, key: Any, batch: Any) -> tuple[Any, Any]:
            outputs, logs = function(dict(zip(paths, state, strict=True)), _key(key), batch)
            return outputs, tuple(logs.values())

        shardings = (self._whole, self._whole, self._shardings(self.spec(ROWS)))
        return jax.jit(run, in_shardings=shardings, out_shardings=self._whole)

    def spec(self, rows: PartitionSpec) -> PartitionSpec:
        """How the tensors of a batch lie on the devices: cut, or, where they can't be, whole on each."""
        return rows if self.parts else WHOLE

    def _step(self) -> Callable[..., Any]:
        function, paths, apart = lower(self.captured), self.captured.paths, self._apart

        def step(state: Any, rates: Any, key: Any, batch: Any) -> tuple[Any, Any, Any]:
            key = jax.random.fold_in(_key(key), lax.axis_index(AXIS)) if apart else _key(key)
            named = dict(zip(paths, state, strict=True))
            after, loss, logs = function(named, [rates[group] for group in range(rates.shape[0])], key, batch)
            return tuple(after[path] for path in paths), loss, tuple(logs.values())

        return step

    def _compiled(self, run: Callable[..., Any], rows: PartitionSpec) -> Callable[..., Any]:
        specs = self._specs(self.spec(rows))
        if self._apart:
            run = jax.shard_map(
                run, mesh=self._mesh, in_specs=(WHOLE, WHOLE, WHOLE, specs), out_specs=WHOLE, check_vma=False
            )
        shardings = (self._whole, self._whole, self._whole, self._shardings(self.spec(rows)))
        return jax.jit(run, in_shardings=shardings, out_shardings=self._whole, donate_argnums=0)

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self._mesh, WHOLE)

    def _specs(self, rows: PartitionSpec) -> tuple[PartitionSpec, ...]:
        return tuple(rows if dimensions else WHOLE for dimensions in self._dimensions)

    def _shardings(self, rows: PartitionSpec) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(self._mesh, spec) for spec in self._specs(rows))


def _key(words: Any) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=KEYS)


class Programs:
    """The programs of one step.

    Attributes:
        made: those that were compiled, in order.
        left_out: keys of the present batch that hold no tensors, which programs aren't given.
    """

    def __init__(self, spec: StepSpec, mesh: Mesh) -> None:
        self.spec = spec
        self.mesh = mesh
        self.made: list[Compilation] = []
        self.left_out: list[str] = []
        self._found: dict[tuple[str, Form, bool], Program] = {}
        self._called: set[tuple[Program, int]] = set()
        self._changes = 0
        self._reason = ""
        self._made_from = self._things()

    def training(self, leaves: list[Tensor], tree: Any, ends_window: bool = True) -> Program:
        """The program that trains on batches of the form of this one, at the end of a window of them or inside it."""
        return self._program("training", leaves, tree, ends_window)

    def evaluation(self, stage: str, leaves: list[Tensor], tree: Any) -> Program:
        """The program of `validation_step`, `test_step` or `predict_step`."""
        return self._program(stage, leaves, tree)

    def check(self, stage: str) -> None:
        """After somebody else's code has run: forget the programs of a stage that no longer hold.

        Raises:
            ConfigError: that has happened too often.
        """
        now = self._things() if stage == "training" else self._made_from
        if now != self._made_from:
            what = next(one for one in now if now[one] != self._made_from.get(one))
            self._changed(stage, f"{what} was {self._made_from.get(what)!r} and is {now[what]!r} now")
            self._made_from = now
        for program in [one for (name, *_), one in self._found.items() if name == stage]:
            try:
                program.captured.check_attributes(self.spec.module)
            except CaptureError as change:
                self._changed(stage, str(change))
                break

    @contextlib.contextmanager
    def noted(self, program: Program, leaves: list[Tensor], tree: Any, steps: int = 1) -> Iterator[None]:
        """A call of a program. The first one compiles it, and is written down and told."""
        key = (program, steps)
        if key in self._called:
            yield
            return
        begun = time.perf_counter()
        yield
        self._called.add(key)
        name = program.captured.name if program.ends_window else f"{program.captured.name}, inside a window,"
        self._tell(Compilation(name, str(Form.of(leaves, tree)), steps, time.perf_counter() - begun))

    def _program(self, name: str, leaves: list[Tensor], tree: Any, ends_window: bool = True) -> Program:
        key = name, Form.of(leaves, tree), ends_window
        program = self._found.get(key)
        if program is None:
            with torch.inference_mode(False), _logging_by_class(self.spec.module), self._told_of_left_out():
                if name == "training":
                    program = self._train(leaves, tree, ends_window)
                else:
                    program = self._evaluate(name, leaves, tree)
            self._found[key] = program
        return program

    @contextlib.contextmanager
    def _told_of_left_out(self) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            if error.args[:1] and str(error.args[0]) in self.left_out:
                raise ConfigError(
                    f'{type(self.spec.module).__name__} reads batch["{error.args[0]}"], which holds no tensors: a compiled '
                    "step can't be given it. Use it in a hook, or make it a tensor in the loader."
                ) from error
            raise

    def _train(self, leaves: list[Tensor], tree: Any, ends_window: bool) -> Program:
        spec, devices, whole = self.spec, self.mesh.size, self.spec.sync_batchnorm
        rows = rows_of(leaves) if devices > 1 else 0
        parts = parts_of(rows, devices) if devices > 1 else 1
        if whole and parts < devices:
            raise ConfigError(
                f"sync_batchnorm=True: a batch of {rows} rows can't be split over {devices} devices, and batch norm must "
                "see each row once. Use a batch_size that they divide, and drop_last=True."
            )
        share = leaves if whole else [part(leaf, parts) for leaf in leaves]
        captured = capture_training(
            spec.module, trained_by(spec), pytree.tree_unflatten(share, tree),
            gradient_clip_val=spec.gradient_clip_val, gradient_clip_algorithm=spec.gradient_clip_algorithm,
            averages=devices > 1 and not whole, precision=spec.precision.name,
            accumulate_grad_batches=spec.accumulate_grad_batches, ends_window=ends_window,
        )  # fmt: skip
        return Program(captured, self.mesh, parts, whole, ends_window)

    def _evaluate(self, stage: str, leaves: list[Tensor], tree: Any) -> Program:
        devices = self.mesh.size
        splits = devices == 1 or all(leaf.shape[0] % devices == 0 for leaf in leaves if leaf.ndim)
        with torch.no_grad():
            batch, precision = pytree.tree_unflatten(leaves, tree), self.spec.precision.name
            captured = capture_evaluation(self.spec.module, batch, stage, precision=precision)
        return Program(captured, self.mesh, devices if splits else 0, whole=True)

    def _things(self) -> dict[str, Any]:
        """What programs are made from, beside batches and the attributes that they have read."""
        found: dict[str, Any] = {
            f"{name}.requires_grad": parameter.requires_grad for name, parameter in self.spec.module.named_parameters()
        }
        return found | settings_of(self.spec.optimizers)

    def _changed(self, stage: str, reason: str) -> None:
        outdated = [key for key in self._found if key[0] == stage]
        if not outdated:
            return
        for key in outdated:
            del self._found[key]
        self._changes += 1
        self._reason = f" since {reason}"
        if self._changes > MOST_CHANGES:
            raise ConfigError(
                f"The step has been compiled {self._changes} times over, the last time{self._reason}. A program takes only "
                "learning rates anew in each step: leave the others as they are (OneCycleLR and CyclicLR: "
                "cycle_momentum=False), keep numbers that change in buffers, or train with another accelerator."
            )

    def _tell(self, made: Compilation) -> None:
        before = [one for one in self.made if (one.name, one.steps) == (made.name, made.steps)]
        self.made.append(made)
        each = f", {made.steps} steps in one call" if made.steps > 1 else ""
        if not before:
            log.info("%s for batches of %s%s: compiled in %.1f s.", made.name, made.form, each, made.seconds)
            return
        reason = self._reason or f", for batches of {made.form}; before: {', '.join(one.form for one in before)}"
        log.warning(
            "%s was compiled again (program %d, %.1f s)%s%s.", made.name, len(before) + 1, made.seconds, each, reason
        )
        self._reason = ""


def trained_by(spec: StepSpec) -> Optimizers:
    """The optimizers as captures take them: one, several with manual optimisation, none for evaluations."""
    if not spec.module.automatic_optimization:
        return spec.optimizers
    return spec.optimizers[0] if spec.optimizers else None


def settings_of(optimizers: list[Any]) -> dict[str, Any]:
    """The settings of optimizers that are constants of a program: plain values of their groups, but for learning rates."""
    return {
        f"{type(optimizer).__name__}, group {index}: {name}": len(value) if name == "params" else value
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
        and not isinstance(value, Tensor)
    }


@contextlib.contextmanager
def _logging_by_class(module: Any) -> Iterator[None]:
    """A LightningModule is attached with a `log` of its own on the object, which would hide the one that captures."""
    bound = vars(module).pop("log", None)
    try:
        yield
    finally:
        if bound is not None:
            vars(module)["log"] = bound
