"""Cache of programs: one for each form of batch, made when a batch of that form comes for the first time.

    form of batch ──► capture (a graph, for one device's part) ──► lower (a JAX function) ──► XLA, at its first call

A program holds for batches of the same shapes and types, and for the module and optimizer as they were: which
parameters learn, plain attributes that the step reads, settings of the optimizer other than its learning rates. If one
of these changes, the step is compiled again, and the log says what has changed. A step that changes them over and over
is refused. A number among the attributes costs one compilation: the new program has it as an input, as it has
`current_epoch` and the like (`capture/symbolic_scalars.py`). If a step decides by such a number, each way through the
step has its own program.

Training on several devices is data parallel, as with DDP: each device has its part of the batch, and gradients, loss,
logs and statistics meet in one all-reduce. With `sync_batchnorm`, and in evaluations, XLA gets the whole batch with a
note that it is in parts. The result is then that of one device, whatever the step computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jax.sharding import Mesh

from footplate.core.errors import ConfigError
from footplate.core.hooks import step_arguments
from footplate.step.base import StepSpec
from footplate.step.xla.capture import Captured, capture_evaluation, capture_training
from footplate.step.xla.capture.arithmetic import Present
from footplate.step.xla.capture.attribute_guards import Attribute, is_number
from footplate.step.xla.capture.torch_optimizers import Optimizers, settings
from footplate.step.xla.capture.torch_tracing import pytree
from footplate.step.xla.lowering.interpret import products_of_whole_numbers
from footplate.step.xla.runtime.program import Program
from footplate.step.xla.runtime.sharding import Flat, part, parts_of, parts_to_evaluate, rows_of

log = logging.getLogger(__name__)

# After this many changes, the step is taken for one that changes something in every step.
MOST_CHANGES = 8

# The programs of one form of batch, for the ways through the step.
MOST_WAYS = 8


@dataclass(frozen=True)
class Form:
    """The form of a batch: its tree, and shape and type of each of its tensors."""

    tree: Any
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, batch: Flat) -> Form:
        return cls(batch.tree, tuple((tuple(leaf.shape), leaf.dtype) for leaf in batch.leaves))

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in self.tensors)


@dataclass(frozen=True)
class Compilation:
    """A compiled program.

    Attributes:
        name: the step, such as `"Classifier.training_step"`.
        form: the form of its batches.
        steps: the steps of one call.
        seconds: the time of compilation and the first call.
        again: a program of this step had been compiled before.
    """

    name: str
    form: str
    steps: int
    seconds: float
    again: bool = False


class ProgramCache:
    """The programs of one step.

    Args:
        spec: the parts and settings of the step.
        mesh: the devices that train.
        local_mesh: the devices of this process, which evaluate.

    Attributes:
        compilations: the compiled programs, in order.
        whole: the step computes on the whole batch, instead of averaging over the devices' parts.
    """

    def __init__(self, spec: StepSpec, mesh: Mesh, local_mesh: Mesh) -> None:
        self.spec = spec
        self.mesh, self.local_mesh = mesh, local_mesh
        self.whole = spec.sync_batchnorm or spec.sharded
        self.compilations: list[Compilation] = []
        # One program for each path through the step.
        self._programs: dict[tuple[str, Form, bool, int | None], list[Program]] = {}
        # The attributes whose numbers are inputs of the program, by stage.
        self._fed: defaultdict[str, set[Attribute]] = defaultdict(set)
        self._never_fed: set[Attribute] = set()
        # True if the stage's step takes the loader's index, by stage.
        self._indexed: dict[str, bool] = {}
        # Lines of the user's code that multiply integers and were logged already.
        self._warned: set[str] = set()
        self._changes = 0
        # The reason for making the next program.
        self._reason = ""
        self._made_from = self._sources()

    @property
    def processes(self) -> int:
        """The number of processes. Each has as many devices."""
        return self.mesh.size // self.local_mesh.size

    @property
    def captured(self) -> dict[str, Captured]:
        """The captured steps of the current programs, by the programs' names."""
        return {program.name: program.captured for programs in self._programs.values() for program in programs}

    def flops(self) -> float | None:
        """Return the floating-point operations of a training batch, on all devices; of the largest form of batch."""
        programs = [program for programs in self._programs.values() for program in programs if program.captured.trains]
        return max((program.flops for program in programs), default=None)

    def training(self, batch: Flat, present: Present, ends_window: bool = True) -> Program:
        """The program that trains on batches of this form, at the end of an accumulation window or inside it."""
        return self._program("training", batch, present, ends_window, None)

    def evaluation(self, stage: str, batch: Flat, present: Present, dataloader_idx: int | None = None) -> Program:
        """The program of an evaluation step. If the step takes the loader's index, each loader has its own program."""
        return self._program(stage, batch, present, True, dataloader_idx if self._takes_index(stage) else None)

    def _takes_index(self, stage: str) -> bool:
        if stage not in self._indexed:
            name = f"{stage}_step"
            self._indexed[stage] = step_arguments(getattr(self.spec.module, name), name) > 2
        return self._indexed[stage]

    def check(self, stage: str) -> None:
        """Drop the programs of a stage that no longer hold, after user code has run.

        Raises:
            ConfigError: that has happened too often.
        """
        now = self._sources() if stage == "training" else self._made_from
        if now != self._made_from:
            name = next(name for name in (*now, *self._made_from) if now.get(name) != self._made_from.get(name))
            self._changed(stage, f"{name} was {self._made_from.get(name)!r} and is {now.get(name)!r} now")
            self._made_from = now
        for program in [program for key, programs in self._programs.items() if key[0] == stage for program in programs]:
            changes = program.captured.reads.changes(self.spec.module)
            if changes:
                self._fed[stage] |= {change.attribute for change in changes if change.is_number} - self._never_fed
                self._changed(stage, "; ".join(change.text for change in changes))
                break

    @contextlib.contextmanager
    def noted(self, program: Program, batch: Flat, steps: int = 1) -> Iterator[None]:
        """The context of a program's call. The first call compiles the program, and is logged."""
        if steps in program.called:
            yield
            return
        begun = time.perf_counter()
        with self.spec.times.during("compilation"):
            yield
        program.called.add(steps)
        name = program.captured.name if program.ends_window else f"{program.captured.name}, inside a window,"
        self._tell(Compilation(name, str(Form.of(batch)), steps, time.perf_counter() - begun), program.reason)

    def _program(
        self, stage: str, batch: Flat, present: Present, ends_window: bool, dataloader_idx: int | None
    ) -> Program:
        key = stage, Form.of(batch), ends_window, dataloader_idx
        programs = self._programs.setdefault(key, [])
        broken = None
        for program in programs:
            broken = program.captured.counted.broken(present)
            if broken is None:
                return program
        if broken is not None:
            self._reason = f" since it goes another way now at {broken}"
            if len(programs) == MOST_WAYS:
                raise ConfigError(
                    f"The step has been compiled {MOST_WAYS} times for batches of one form, the last time{self._reason}. "
                    "Compute with such a number (min, max, torch.where) in place of deciding by it."
                )
        with (
            self.spec.times.during("compilation"), torch.inference_mode(False), _logging_by_class(self.spec.module),
            self._told_of(batch.left_out),
        ):  # fmt: skip
            if stage == "training":
                make = functools.partial(self._train, batch, present, ends_window)
            else:
                make = functools.partial(self._evaluate, stage, batch, present, dataloader_idx)
            program = self._feeding(stage, make)
        program.reason, self._reason = self._reason, ""
        programs.append(program)
        return program

    def _feeding(self, stage: str, make: Callable[[tuple[Attribute, ...]], Program]) -> Program:
        """A program with the changing numbers as inputs, or as constants if the step can't take inputs."""
        parts = dict(self.spec.module.named_modules())
        fed = [(owner, name) for owner, name in self._fed[stage] if is_number(vars(parts[owner]).get(name))]
        if fed:
            try:
                return make(tuple(sorted(fed)))
            except Exception:
                # The user's code may raise anything if it gets no plain number.
                self._never_fed |= self._fed.pop(stage)
        return make(())

    @contextlib.contextmanager
    def _told_of(self, left_out: list[str]) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            if error.args[:1] and str(error.args[0]) in left_out:
                raise ConfigError(
                    f'{type(self.spec.module).__name__} reads batch["{error.args[0]}"], which holds no tensors: a compiled '
                    "step can't be given it. Use it in a hook, or make it a tensor in the loader."
                ) from error
            raise

    def parts(self, batch: Flat) -> int:
        """The number of parts that the rows of a training batch are cut into, over all processes."""
        return 1 if self.mesh.size == 1 else parts_of(rows_of(batch.leaves), self.mesh.size, self.whole)

    def divides(self, parts: int) -> bool:
        """Return True if, with this number of parts, each process has exactly the rows of its own devices."""
        return self.processes == 1 or (parts > 0 and parts % self.processes == 0)

    def _train(self, batch: Flat, present: Present, ends_window: bool, fed: tuple[Attribute, ...]) -> Program:
        spec, devices = self.spec, self.mesh.size
        parts = self.parts(batch)
        share = batch.leaves if self.whole else [part(leaf, parts) for leaf in batch.leaves]
        captured = capture_training(
            spec.module, trained_by(spec), pytree.tree_unflatten(share, batch.tree),
            gradient_clip_val=spec.gradient_clip_val, gradient_clip_algorithm=spec.gradient_clip_algorithm,
            averages=devices > 1 and not self.whole, precision=spec.precision.name,
            accumulate_grad_batches=spec.accumulate_grad_batches, ends_window=ends_window,
            parts=1 if self.whole else parts, fed=fed, present=present,
        )  # fmt: skip
        self._warn_of_products(captured)
        return Program(captured, self.mesh, parts, self.whole, spec.sharded, ends_window)

    def _warn_of_products(self, captured: Captured) -> None:
        new = [line for line in products_of_whole_numbers(captured.graph) if line not in self._warned]
        if new and self.spec.precision.name != "64-true":
            self._warned.update(new)
            log.warning(
                "%s multiplies whole numbers, which have 32 bits on the device: beyond 2,147,483,647 they wrap round "
                'silently. If a hash may do that, compute it in the loader, or use precision="64-true":\n    %s',
                captured.name,
                "\n    ".join(new),
            )

    def _evaluate(
        self, stage: str, batch: Flat, present: Present, dataloader_idx: int | None, fed: tuple[Attribute, ...]
    ) -> Program:
        with torch.no_grad():
            captured = capture_evaluation(
                self.spec.module, pytree.tree_unflatten(batch.leaves, batch.tree), stage,
                precision=self.spec.precision.name, dataloader_idx=dataloader_idx, fed=fed, present=present,
            )  # fmt: skip
        parts = parts_to_evaluate(batch.leaves, self.local_mesh.size)
        return Program(captured, self.local_mesh, parts, True, self.spec.sharded)

    def _sources(self) -> dict[str, Any]:
        """The things that programs are made from, besides batches and attributes."""
        values: dict[str, Any] = {
            f"{name}.requires_grad": parameter.requires_grad for name, parameter in self.spec.module.named_parameters()
        }
        return values | settings(self.spec.optimizers)

    def _changed(self, stage: str, reason: str) -> None:
        outdated = [key for key in self._programs if key[0] == stage and self._programs[key]]
        if not outdated:
            return
        for key in outdated:
            del self._programs[key]
        self._changes += 1
        self._reason = f" since {reason}"
        if self._changes > MOST_CHANGES:
            raise ConfigError(
                f"The step has been compiled {self._changes} times, the last time{self._reason}. Leave that "
                "unchanged, keep what changes in a buffer (a number can be an attribute, if the step only computes with "
                "it), or train with another accelerator."
            )

    def _tell(self, compilation: Compilation, reason: str) -> None:
        before = [
            earlier
            for earlier in self.compilations
            if (earlier.name, earlier.steps) == (compilation.name, compilation.steps)
        ]
        self.compilations.append(dataclasses.replace(compilation, again=bool(before)))
        each = f", {compilation.steps} steps in one call" if compilation.steps > 1 else ""

        if not before:
            log.info(
                "%s for batches of %s%s: compiled in %.1f s.",
                compilation.name,
                compilation.form,
                each,
                compilation.seconds,
            )
            return
        reason = (
            reason or f", for batches of {compilation.form}; before: {', '.join(earlier.form for earlier in before)}"
        )
        log.warning(
            "%s was compiled again (program %d, %.1f s)%s%s.",
            compilation.name,
            len(before) + 1,
            compilation.seconds,
            each,
            reason,
        )


def trained_by(spec: StepSpec) -> Optimizers:
    """The optimizers in the form that captures take: one, several with manual optimisation, none for evaluations."""
    if not spec.module.automatic_optimization:
        return spec.optimizers
    return spec.optimizers[0] if spec.optimizers else None


@contextlib.contextmanager
def _logging_by_class(module: Any) -> Iterator[None]:
    """Hide a `log` that the module has on the object: the capture's `log` is on the class."""
    bound = vars(module).pop("log", None)
    try:
        yield
    finally:
        if bound is not None:
            vars(module)["log"] = bound
