"""A captured step as compiled functions: one step a call, several steps a call, or an evaluation.

XLA compiles each function at its first call. The state stays on the devices: the new state reuses the memory of the
old.

Functions that compute the same have the same name, such as "training_step_1f8b0c44", in every process and in the cache of
compiled programs. By it, a profile knows which step a program belongs to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from footplate.step.xla.capture import Captured
from footplate.step.xla.capture.flops import flops_of
from footplate.step.xla.capture.module_view import reduction_of
from footplate.step.xla.lowering import lower
from footplate.step.xla.lowering.data_parallel import AXIS, platform_of
from footplate.step.xla.runtime.sharding import ROWS, ROWS_OF_EACH, WHOLE, layout, spec_of

KEYS = "threefry2x32"


class Program:
    """A captured step, as functions that run on a mesh.

    Attributes:
        name: the name of its functions.
        captured: the step, for one device's part of the batch if the rows are cut.
        parts: the number of parts that the rows of a batch are cut into; see `sharding.py`.
        ends_window: the optimizer steps after the batch; otherwise its gradients are added to those before.
        called: the numbers of steps of the calls so far, which tell the compiled functions.
        reason: the reason for a further program, as the end of a sentence; empty if it is another form of batch.
    """

    def __init__(
        self, captured: Captured, mesh: Mesh, parts: int, whole: bool, sharded: bool, ends_window: bool = True
    ) -> None:
        self.captured = captured
        self.parts = parts
        self.ends_window = ends_window
        self.called: set[int] = set()
        self.reason = ""
        self._mesh = mesh
        self._apart = mesh.size > 1 and not whole
        self._several_steps: dict[int, Callable[..., Any]] = {}
        self._dimensions = [len(shape) for shape, _ in captured.batch[1]]
        inputs = [node.meta["val"] for node in captured.graph.graph.nodes if node.op == "placeholder"]
        self._state = tuple(
            NamedSharding(mesh, layout(value.shape, mesh.size, sharded)) for value in inputs[: len(captured.paths)]
        )
        forms = [(value.shape, value.dtype) for value in inputs]
        computed = captured.graph.code, forms, self._state, parts, whole
        self.name = f"{captured.name.rpartition('.')[2]}_{zlib.crc32(repr(computed).encode()):08x}"

    @cached_property
    def flops(self) -> float:
        """The floating-point operations of one step, on all devices."""
        flops = sum(map(flops_of, self.captured.graph.graph.nodes))
        return flops * self._mesh.size if self._apart else flops

    @cached_property
    def one_step(self) -> Callable[..., Any]:
        """The compiled function of one step.

        `(state, rates, key, batch) → (state, loss, logs)`, each a tuple in the captured order.
        """
        return self._compiled(self._step(), self.name, ROWS)

    def several_steps(self, count: int) -> Callable[..., Any]:
        """Return the compiled function of several steps.

        Batches, rates, keys, losses and logs have the steps as their first dimension.

        Args:
            count: the number of steps.
        """
        if count not in self._several_steps:
            self._several_steps[count] = self._scan(count)
        return self._several_steps[count]

    def _scan(self, count: int) -> Callable[..., Any]:
        step = self._step()

        def run(state: Any, rates: Any, keys: Any, batches: Any) -> tuple[Any, Any, Any]:
            def body(state: Any, inputs: Any) -> tuple[Any, Any]:
                state, loss, logs = step(state, *inputs)
                return state, (loss, logs)

            state, (losses, logs) = lax.scan(body, state, (rates, keys, batches))
            return state, losses, logs

        return self._compiled(run, f"{self.name}_{count}_steps", ROWS_OF_EACH)

    @cached_property
    def evaluation(self) -> Callable[..., Any]:
        """The compiled function of an evaluation: `(state, rates, key, batch) → (outputs, logs)`."""
        function, paths = lower(self.captured, platform_of(self._mesh)), self.captured.paths

        def run(state: Any, rates: Any, key: Any, batch: Any) -> tuple[Any, Any]:
            outputs, logs = function(dict(zip(paths, state, strict=True)), _key(key), batch, list(rates))
            return outputs, tuple(logs.values())

        run.__name__ = self.name
        shardings = (self._state, self._whole, self._whole, self._shardings(spec_of(self.parts, ROWS)))
        return jax.jit(run, in_shardings=shardings, out_shardings=self._whole)

    def _step(self) -> Callable[..., Any]:
        function, paths, apart = lower(self.captured, platform_of(self._mesh)), self.captured.paths, self._apart
        sums = {name for name, options in self.captured.logs.items() if reduction_of(options) == "sum"}

        def step(state: Any, rates: Any, key: Any, batch: Any) -> tuple[Any, Any, Any]:
            key = jax.random.fold_in(_key(key), lax.axis_index(AXIS)) if apart else _key(key)
            named = dict(zip(paths, state, strict=True))
            after, loss, logs = function(named, list(rates), key, batch)
            # The sums were averaged over the parts.
            if apart:
                logs = {name: value * self.parts if name in sums else value for name, value in logs.items()}
            return tuple(after[path] for path in paths), loss, tuple(logs.values())

        return step

    def _compiled(self, run: Callable[..., Any], name: str, rows: PartitionSpec) -> Callable[..., Any]:
        run.__name__ = name
        rows = spec_of(self.parts, rows)
        if self._apart:
            run = jax.shard_map(
                run,
                mesh=self._mesh,
                in_specs=(WHOLE, WHOLE, WHOLE, self._specs(rows)),
                out_specs=WHOLE,
                check_vma=False,
            )
        shardings = (self._state, self._whole, self._whole, self._shardings(rows))
        return jax.jit(
            run, in_shardings=shardings, out_shardings=(self._state, self._whole, self._whole), donate_argnums=0
        )

    @property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self._mesh, WHOLE)

    def _specs(self, rows: PartitionSpec) -> tuple[PartitionSpec, ...]:
        return tuple(rows if dimensions else WHOLE for dimensions in self._dimensions)

    def _shardings(self, rows: PartitionSpec) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(self._mesh, spec) for spec in self._specs(rows))


def _key(words: Any) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=KEYS)
