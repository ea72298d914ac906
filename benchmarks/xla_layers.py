"""Equal layers one by one, folded into a scan, or as calls of one function: cost of compiling, of a step, and its memory.

The model is a transformer of 12 layers of width 256 in plain JAX, trained by SGD. The weights of each layer are separate
before and after a step, as in a module. `scan` stacks them in the program and splits the gradients again. `calls` keeps XLA
from inlining the function of a layer and that of its backward pass. `docs/decisions/012-layers-are-not-folded.md` explains
why this matters. Compile time is processor time, on the CPU or, with `--tpu`, in the TPU's compiler for one core of a v5e,
where no step runs.

    python benchmarks/xla_layers.py [--tpu] [--json FILE]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from common import LESS, WALL_STEP, Figures, arguments_parser, interleave, machine, ratio, report, row
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

LAYERS, WIDTH, HEADS, ROWS, LENGTH = 12, 256, 4, 4, 64
RATE = 0.1
SHAPES = {
    "first_norm": (WIDTH,), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "second_norm": (WIDTH,),
    "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH),
}  # fmt: skip

Weights = dict[str, Any]


def layer(weights: Weights, x: Any) -> Any:
    """Attention and a network of two layers, each after a normalisation."""
    heads = _normed(x, weights["first_norm"]) @ weights["qkv"]
    q, k, v = heads.reshape(ROWS, LENGTH, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), q @ k.mT, -1e9)
    attended = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = x + attended @ weights["out"]
    return x + jax.nn.gelu(_normed(x, weights["second_norm"]) @ weights["up"]) @ weights["down"]


def _normed(x: Any, weight: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * weight


def _changed(layers: list[Weights], gradients: list[Weights]) -> list[Weights]:
    return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, layers, gradients)


def one_by_one(layers: list[Weights], x: Any) -> list[Weights]:
    """A step with the layers one after the other."""

    def loss(layers: list[Weights]) -> Any:
        y = x
        for weights in layers:
            y = layer(weights, y)
        return (y**2).mean()

    return _changed(layers, jax.grad(loss)(layers))


def scan(layers: list[Weights], x: Any) -> list[Weights]:
    """A step with the layers folded into a loop."""

    def loss(stacked: Weights) -> Any:
        return (lax.scan(lambda y, weights: (layer(weights, y), None), x, stacked)[0] ** 2).mean()

    gradients = jax.grad(loss)(jax.tree.map(lambda *each: jnp.stack(each), *layers))
    return _changed(layers, [jax.tree.map(lambda one, at=at: one[at], gradients) for at in range(LAYERS)])


def calls(layers: list[Weights], x: Any) -> list[Weights]:
    """A step that calls one function for each layer, and another for its backward pass."""
    forward = jax.jit(lambda weights, x: jax.vjp(layer, weights, x))
    backward = jax.jit(lambda pull, gradient: pull(gradient))
    with set_xla_metadata(inlineable="false"):
        pulls = []
        for weights in layers:
            x, pull = forward(weights, x)
            pulls.append(pull)
        gradient, gradients = 2 * x / x.size, []
        for pull in reversed(pulls):
            of_weights, gradient = backward(pull, gradient)
            gradients.append(of_weights)
    return _changed(layers, gradients[::-1])


ENTRANTS: dict[str, Callable[[list[Weights], Any], list[Weights]]] = {
    "one by one": one_by_one, "scan": scan, "calls": calls,
}  # fmt: skip


def compiled(step: Callable[..., Any], arguments: Any, tpu: bool) -> tuple[Any, Figures]:
    """Compile a step. Return the program, its compile cost, and its memory beside weights and batch."""
    where: dict[str, Any] = {}
    if tpu:
        from jax.experimental import topologies

        device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        where = {"in_shardings": sharding, "out_shardings": sharding}
        arguments = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments)
    lowered = jax.jit(step, donate_argnums=0, **where).lower(*arguments)
    begun = time.process_time()
    program = lowered.compile()
    seconds = time.process_time() - begun
    memory: Any = program.memory_analysis()
    return program, {"compile_s": seconds, "temporaries_mb": memory.temp_size_in_bytes / 1e6}


def main() -> None:
    """Measure, print, and write."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--tpu", action="store_true", help="compile for a TPU, without a TPU, and run no step")
    options = parser.parse_args()
    host = machine()
    keys = iter(jax.random.split(jax.random.key(0), LAYERS * len(SHAPES) + 1))
    layers = [
        {name: jax.random.normal(next(keys), shape) * 0.02 for name, shape in SHAPES.items()} for _ in range(LAYERS)
    ]
    x = jax.random.normal(next(keys), (ROWS, LENGTH, WIDTH))
    programs = {name: compiled(step, (layers, x), options.tpu) for name, step in ENTRANTS.items()}
    state = {name: jax.tree.map(jnp.copy, layers) for name in ENTRANTS}

    steps, rounds = (2, 1) if options.quick or options.tpu else (10, 5)

    def turn(name: str) -> Figures:
        program, figures = programs[name]
        if options.tpu:
            return figures
        begun = time.perf_counter()
        for _ in range(steps):
            state[name] = jax.block_until_ready(program(state[name], x))
        return {**figures, "step_ms": (time.perf_counter() - begun) / steps * 1e3}

    results = interleave(list(ENTRANTS), turn, rounds)
    columns = {"compile_s": "compiling, s", "temporaries_mb": "temporaries, MB", "step_ms": "ms a step"}
    ratios = {
        f"{name}: {figure}": ratio(results, name, "one by one", figure, measure)
        for name in ("scan", "calls")
        for figure, measure in (("compile_s", f"time to compile, {LESS}"), ("step_ms", WALL_STEP))
        if figure in results[name][0]
    }
    title = f"{LAYERS} layers of {WIDTH}, {'TPU v5e' if options.tpu else 'CPU'}"
    rows = [row(name, results[name]) for name in ENTRANTS]
    report("xla_layers", title, columns, rows, ratios, {}, host, ("jax", "jaxlib"), options.json)


if __name__ == "__main__":
    main()
