"""A whole training step as one CUDA graph: copy the batch, launch the graph, read the loss.

A CUDA graph repeats kernels with the same addresses and the same numbers from the host. So it is right only as long as all
else is the same. Two things watch over that:

- `training_step` is a function of torch.compile, whose guards run before every step. They compare what the function has
  read of the module and of Python. If something has changed, torch.compile makes another program, which has no graph yet.
  What the function does to Python's objects is done in every step, too. If it isn't one program, because torch.compile
  had to leave it in between, no step is a graph.
- `Program.fits` compares the addresses of all tensors and the settings of the optimizer. Learning rates are tensors.

A program's first steps run kernel by kernel. Then its graph is captured, which runs nothing:

    clear the gradients → the program's forward pass → backward pass → clipping and optimizer

In a replayed step, the program copies its results out of the graph's memory, and torch.compile does the rest of
`training_step` with them: it returns and logs them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from footplate.core.garbage import no_collection
from footplate.step.compiled_functions import CompiledUpdate, computes_on
from footplate.step.phases import parameters_of
from footplate.step.torch_internals import compile_graph, is_of_torch

if TYPE_CHECKING:
    from footplate.step.compiled_step import CompiledStep

log = logging.getLogger(__name__)

DEVICE = "cuda"
WARM_STEPS = 3
MAX_GRAPHS = 8

# What `getrefcount` counts of an object to which only a list refers, beside the list.
_COUNTED = (lambda held: sys.getrefcount(held[0]))([object()]) - 1

Gradients = list[tuple[Any, Tensor | None]]


class StepGraphs:
    """The CUDA graphs of a step: one for each program that torch.compile makes of `training_step`.

    Args:
        step: the step.
        update: its clipping and optimizer.
        backend: the backend of torch.compile that makes the programs.

    Attributes:
        active: steps are graphs, or will be.
        ready: a program has a graph.
        replayed: the program whose graph was the current step. None if the step wasn't a graph.
        gradients_of: the program whose gradients the parameters have.
    """

    def __init__(self, step: CompiledStep, update: CompiledUpdate, backend: str) -> None:
        self.active, self.ready = True, False
        self.replayed: Program | None = None
        self._step, self._update, self._backend = step, update, backend
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._warming = True
        self._leaves: list[Any] = []
        self._inputs: list[Tensor] = []
        self._programs: list[Program] = []
        self._graphs: list[Program] = []
        self._captured = 0
        self.gradients_of: Program | None = None

    def backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Program:
        """Compile a part of `training_step`; the backend that torch.compile is given."""
        return Program(self, compile_graph(self._backend, graph, inputs), computes_on(self._step.spec.device, graph))

    def begin(self, leaves: list[Any], structure: Any) -> Any:
        """Begin a step: return the batch, in the memory that the graphs read if there are any.

        Args:
            leaves: the tensors and other objects of the batch.
            structure: how they are nested, as `tree_flatten` says it.
        """
        self._programs.clear()
        self.replayed = None
        self._leaves = leaves
        if self.ready:
            self._replace_kept_inputs()
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if tensors:
                torch._foreach_copy_(self._inputs, tensors)  # pyright: ignore[reportPrivateImportUsage]
            own = iter(self._inputs)
            leaves = [next(own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, structure)

    def forget(self) -> None:
        """Go back to first steps, without graphs and their memory."""
        for program in self._graphs:
            program.forget_graph()
        self._graphs, self._inputs, self.ready, self._warming = [], [], False, True

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """The context of a step. Before a capture, it is the stream of the capture, on which gradients are summed."""
        return self._beside() if self._warming else contextlib.nullcontext()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def _replace_kept_inputs(self) -> None:
        """Replace the inputs that somebody has kept, or views of them, since the next batch overwrites inputs."""
        for index, references in enumerate(self._references()):
            if references > 1 + sum(program.references[index] for program in self._graphs):
                self._inputs[index] = self._inputs[index].clone()

    def _references(self) -> list[int]:
        """The number of references to each input, of which the list's is one."""
        return [sys.getrefcount(self._inputs[index]) - _COUNTED for index in range(len(self._inputs))]

    def run(self, program: Program, inputs: tuple[Any, ...]) -> Sequence[Any]:
        """Run a program: replay its graph, which is a whole step, or compute its results."""
        self._programs.append(program)
        if program.graph is not None and len(self._programs) == 1:
            self._update.set_rates()
            if program.fits(inputs, self.optimizer_state()):
                program.graph.replay()
                self.replayed = program
                return [each.clone() if isinstance(each, Tensor) else each for each in program.results]
            self._graphs.remove(program)
            self.ready = bool(self._graphs)
            program.forget_graph()
        program.inputs, program.results = inputs, program.compiled(*inputs)
        return program.results

    def end(self, output: Any) -> Any:
        """End a step: return its output, without the memory that the graphs read. Capture a graph, if it is time."""
        given = output if type(output) is Tensor else self._given(output)
        program = self.replayed
        self._warming = program is None
        if program is None:
            self.gradients_of = None
            self._consider_capture(output)
        elif self.gradients_of is not program:
            # Another step has put its own there.
            _set_gradients(program.gradients)
            self.gradients_of = program
        return given

    def _given(self, output: Any) -> Any:
        """The output of a step, with the tensors of the batch as the loader gave them."""
        tensors = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        given = {id(own): leaf for own, leaf in zip(self._inputs, tensors, strict=False)}
        return pytree.tree_map(lambda leaf: given.get(id(leaf), leaf), output)

    def _consider_capture(self, output: Any) -> None:
        """After the first steps of a program, capture its graph. Give graphs up if they could be wrong."""
        programs = self._programs[:]
        loss = output.get("loss") if isinstance(output, dict) else output
        reason = None
        if len(programs) != 1:
            reason = (
                f"torch.compile makes {len(programs)} programs of training_step (TORCH_LOGS=graph_breaks shows why)"
            )
        elif loss is not None:
            reason = self._warm(programs[0], loss)
        elif output is not None:
            reason = "training_step returns a sum of losses"
        for program in programs:
            program.release()
        if reason is not None:
            self.forget()
            self.active = False
            log.warning('compile="%s": steps are no CUDA graphs, because %s.', self._step.name, reason)

    def _warm(self, program: Program, loss: Tensor) -> str | None:
        """Count a step of a program; after the last of its first steps, capture its graph. Return why not, or None."""
        program.steps += 1
        if program.steps < WARM_STEPS:
            return None
        if self._captured == MAX_GRAPHS:
            return f"{MAX_GRAPHS} were captured already: something that training_step reads keeps changing"
        reason = program.reason_against_graph(loss) or self._reason_against_optimizer()
        return self._capture(program, loss) if reason is None else reason

    def _reason_against_optimizer(self) -> str | None:
        optimizer = self._step.optimizer
        if not self._update.on_device:
            return f"the step of {type(optimizer).__name__} is not one program on the GPU"
        parameters = parameters_of(optimizer)
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
            return "a parameter has a hook for its gradient"
        if any(isinstance(value, Tensor) for group in self._settings() for value in group.values()):
            return "a setting of the optimizer is a tensor"
        return None

    def _capture(self, program: Program, loss: Tensor) -> str | None:
        """Capture the step of a program. Return why it failed, or None."""
        step = self._step
        place = next(index for index, each in enumerate(program.results) if each is loss)
        if not self.ready:
            self._inputs = [leaf.clone() for leaf in self._leaves if isinstance(leaf, Tensor)]
        inputs = self._own_inputs(program.inputs)
        program.release()
        before = self._references()
        gradients = [(parameter, parameter.grad) for parameter in parameters_of(step.optimizer)]
        step.clear_gradients()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy batches meanwhile.
            with _capturable(), torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                with step.forward_context():
                    results = program.compiled(*inputs)
                step.after_forward(results[place])
        except Exception as error:
            _set_gradients(gradients)
            while error.__context__ is not None:
                # The end of a capture only says that there was an error before.
                error = error.__context__
            return f"it can't be captured: {type(error).__name__}: {str(error).strip().splitlines()[0]}"

        program.set_graph(graph, inputs, [each.detach() if isinstance(each, Tensor) else each for each in results])
        del results
        views = [now - then for now, then in zip(self._references(), before, strict=True)]
        program.references = [
            more + sum(1 for each in inputs if each is own) for more, own in zip(views, self._inputs, strict=True)
        ]
        program.state = self.optimizer_state()
        program.gradients = [(parameter, parameter.grad) for parameter, _ in gradients]
        _set_gradients(gradients)
        self._graphs.append(program)
        self._captured += 1
        self.ready, self._warming = True, False
        return None

    def _own_inputs(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a program, with the tensors of the batch in memory of the graphs' own."""
        tensors = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        own = {id(tensor): copy for tensor, copy in zip(tensors, self._inputs, strict=True)}
        return tuple(own.get(id(each), each) for each in inputs)

    def optimizer_state(self) -> tuple[Any, ...]:
        """The addresses of parameters and optimizer state, and the settings of the optimizer without learning rates."""
        optimizer: Any = self._step.optimizer
        addresses: list[int] = []
        for parameter in parameters_of(optimizer):
            addresses += (parameter.data_ptr(), parameter.requires_grad)
            state = optimizer.state.get(parameter)
            if state:
                addresses += [value.data_ptr() for value in state.values() if isinstance(value, Tensor)]
        return addresses, self._settings(), is_of_torch(optimizer)

    def _settings(self) -> list[dict[str, Any]]:
        assert self._step.optimizer is not None
        return [{**group, "params": None, "lr": None} for group in self._step.optimizer.param_groups]


class Program:
    """One program that torch.compile has made of `training_step`, with its graph.

    Attributes:
        compiled: computes the results from the inputs.
        on_device: it computes with tensors of the device alone.
        steps: the steps that it has run kernel by kernel.
        graph: the captured step. None before.
        inputs: of the current step, or of the graph.
        results: of the current step, or in the graph's memory.
        state: of the optimizer, when the graph was captured.
        gradients: parameters with their gradients in the graph's memory.
        references: how often the program refers to each tensor of the batch, by `inputs`, and by views in `results`.
    """

    def __init__(self, graphs: StepGraphs, compiled: Callable[..., Any], on_device: bool) -> None:
        self.compiled, self.on_device = compiled, on_device
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Any, ...] = ()
        self.results: Sequence[Any] = ()
        self.state: tuple[Any, ...] = ()
        self.gradients: Gradients = []
        self.references: list[int] = []
        self._addresses: list[tuple[int, bool]] = []
        self._graphs = graphs

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self._graphs.run(self, inputs)

    def fits(self, inputs: Sequence[Any], state: tuple[Any, ...]) -> bool:
        """Return True if a replay computes with these inputs and with this state of the optimizer."""
        same = all(given is other for given, other in zip(inputs, self.inputs, strict=True))
        return same and _addresses(inputs) == self._addresses and state == self.state

    def reason_against_graph(self, loss: Tensor) -> str | None:
        """Return why a replay could be wrong, or None."""
        if not self.on_device:
            return "training_step computes with numbers or tensors of the CPU that may change"
        if not any(each is loss for each in self.results):
            return "the loss isn't a result of what torch.compile has compiled"
        return None

    def set_graph(self, graph: torch.cuda.CUDAGraph, inputs: tuple[Any, ...], results: Sequence[Any]) -> None:
        """Set the captured step."""
        self.graph, self.inputs, self.results = graph, inputs, results
        self._addresses = _addresses(inputs)

    def forget_graph(self) -> None:
        """Go back to the first steps: the graph would compute with other tensors."""
        self.graph, self.steps, self.gradients = None, 0, []
        self.release()

    def release(self) -> None:
        """Let go of the tensors of a step, unless they are the graph's."""
        if self.graph is None:
            self.inputs, self.results = (), ()


def _addresses(tensors: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """The address of each tensor, and if it learns, which the guards don't compare."""
    return [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]


@contextlib.contextmanager
def _capturable() -> Iterator[None]:
    """Let nothing but the captured operations reach the GPU from this thread, and undo a capture that fails."""
    generators = torch.cuda.default_generators
    states = [generator.clone_state() for generator in generators]
    # To free another graph would end the capture.
    gc.collect()
    with no_collection():
        try:
            yield
        except BaseException:
            # They would go on to wait for the end of the capture.
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(state)
            raise


def _set_gradients(gradients: Gradients) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient
