"""The compiler, in a process of its own: `python -m footplate.planning.compiler REQUEST REPLY PARENT`.

Why a process of its own: the TPU's compiler (libtpu) is one of a machine at a time, writes to standard error as it likes,
and may end the process when it doesn't like a program. And JAX decides once, when it is first used, for which hardware.

REQUEST is a pickled `Request`, REPLY a JSON file, written last. The process plans for `tpu` with
`jax.experimental.topologies`, which describes a slice that isn't there, and for `cpu` with XLA for the CPU that it runs
on, where it can also run the program that it has made, and measure. When its parent dies, whose id is PARENT, so does it:
else it would have libtpu for minutes more, for nobody.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from footplate.launch.family import die_with
from footplate.planning.hlo import collectives, set_aside
from footplate.planning.plainform import PlainStep, restored


@dataclass(frozen=True)
class Request:
    """What is to be compiled, and for what.

    Attributes:
        step: captured with the batch of one device; with averages where there are several.
        platform: "tpu" or "cpu".
        topology: the slice's, such as `v5e:2x4`; None for a CPU.
        options: what `get_topology_desc` is given beside it.
        steps: how many steps are run and timed after compiling; 0 for none, and on a TPU none can be.
    """

    step: PlainStep
    platform: str
    topology: str | None
    options: dict[str, Any]
    steps: int = 0


def compile_step(request: Request) -> dict[str, Any]:
    """Compile, and say what one device needs: see `compiled.Program`."""
    import jax

    captured = restored(request.step)
    devices = _devices(request)
    arguments = _arguments(captured, len(devices))
    begun = time.perf_counter()
    step = _jitted(captured, devices)
    try:
        compiled = step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"too_large": str(error), "compile_s": time.perf_counter() - begun}
    found = _described(compiled, request.platform)
    found |= {"devices": len(devices), "device_kind": devices[0].device_kind, "compile_s": time.perf_counter() - begun}
    if request.steps:
        found["measured"] = _measured(compiled, arguments, request.steps)
    return found


def _devices(request: Request) -> list[Any]:
    import jax

    if request.topology is None:
        return [jax.devices("cpu")[0]]
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(request.topology, platform="tpu", **request.options).devices)


def _jitted(captured: Any, devices: list[Any]) -> Any:
    """The step for these devices, spread over them by `data_parallel`, also where there is one alone."""
    from footplate.step.xla.lowering.data_parallel import data_parallel, mesh_of

    return data_parallel(captured, mesh_of(devices))


def _arguments(captured: Any, devices: int) -> tuple[Any, ...]:
    """Shapes and types of state, rates, key and the whole batch."""
    import jax
    import jax.numpy as jnp
    import torch

    from footplate.step.xla.lowering.arrays import array_type

    inputs = [node.meta["val"] for node in captured.graph.graph.nodes if node.op == "placeholder"]
    state = {
        path: jax.ShapeDtypeStruct(tuple(value.shape), array_type(value.dtype))
        for path, value in zip(captured.paths, inputs, strict=False)
    }
    rate = jax.ShapeDtypeStruct((), jnp.result_type(array_type(torch.float64)))
    batch = tuple(
        jax.ShapeDtypeStruct((shape[0] * devices, *shape[1:]) if shape else (), array_type(dtype))
        for shape, dtype in captured.batch[1]
    )
    return state, [rate] * captured.rates, jax.eval_shape(lambda: jax.random.key(0)), batch


def _described(compiled: Any, platform: str) -> dict[str, Any]:
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    cost = cost[0] if isinstance(cost, list) else cost
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    if platform == "cpu":
        temporaries += set_aside(text)
    whole = memory.argument_size_in_bytes + new + temporaries
    return {
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": new,
        "temporaries_bytes": temporaries,
        "code_bytes": memory.generated_code_size_in_bytes,
        # The CPU's compiler doesn't say what is alive at once: there it is all kinds together.
        "peak_bytes": getattr(memory, "peak_memory_in_bytes", whole) if platform == "tpu" else whole,
        "flops": max(0.0, cost.get("flops", 0.0)),
        "accessed_bytes": max(0.0, cost.get("bytes accessed", 0.0)),
        "collectives": [asdict(one) for one in collectives(text)],
    }


def _measured(compiled: Any, arguments: tuple[Any, ...], steps: int) -> dict[str, Any]:
    """Run the program on made-up numbers: seconds of a step, and how much the process's memory grows for it.

    That is the bytes of state and batch, and what the process grows by at most within a step: a step that didn't write the
    new state over the old would grow by it, too. After one that isn't counted all is there that is there once, however many
    steps follow: threads, code, what libraries keep. Some steps are timed, one after the other. Before each of the rest the
    process is left to settle, since XLA's threads let go of temporaries a moment after a step's end; their median counts.
    """
    import jax

    state, rates, key, batch = _made_up(arguments, compiled.input_shardings[0])
    held = sum(one.nbytes for one in jax.tree.leaves((state, batch)))
    seconds, grown = [], []
    for number in range(1 + 2 * steps):
        resting = _settled_bytes() if number > steps else 0
        begun = time.perf_counter()
        state, loss, _ = compiled(state, rates, key, batch)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - begun)
        grown.append(_status("VmHWM") - resting)
    timed = seconds[1 : steps + 1]
    return {
        "step_s": statistics.median(timed),
        "fastest_s": min(timed),
        "peak_bytes": held + int(statistics.median(grown[steps + 1 :])),
        "steps": steps,
    }


def _settled_bytes() -> int:
    """The process's memory once what was let go is given back, its peak forgotten."""
    for _ in range(10):
        time.sleep(0.05)
        _forget_peak()
    return _status("VmRSS")


def _made_up(arguments: tuple[Any, ...], shardings: Any) -> Any:
    """Small random numbers for floats, zeros for integers (a class, a token), one array at a time."""
    import jax
    import numpy as np

    numbers = np.random.default_rng(0)

    def make(spec: Any, sharding: Any) -> Any:
        if jax.numpy.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), sharding)
        if jax.numpy.issubdtype(spec.dtype, jax.numpy.floating):
            values = (np.abs(numbers.standard_normal(spec.shape, dtype=np.float32)) * 0.02).astype(spec.dtype)
        else:
            values = np.zeros(spec.shape, spec.dtype)
        return jax.device_put(values, sharding, may_alias=False)

    return jax.tree.map(make, arguments, shardings)


def _forget_peak() -> None:
    """Give unused memory back to the system, and let its record of the most that was used begin anew."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """A figure of `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


if __name__ == "__main__":
    die_with(int(sys.argv.pop()))
    request_path, reply_path = map(Path, sys.argv[1:])
    reply = compile_step(pickle.loads(request_path.read_bytes()))
    unfinished = reply_path.with_suffix(".part")
    unfinished.write_text(json.dumps(reply))
    unfinished.rename(reply_path)
