"""The compiler, in a process of its own: `python -m footplate.planning.compiler REQUEST REPLY`.

Why a process of its own: the TPU's compiler (libtpu) is one of a machine at a time, writes to standard error as it likes,
and may end the process when it doesn't like a program. And JAX decides once, when it is first used, for which hardware.

REQUEST is a pickled `Request`, REPLY a JSON file, written last. The process plans for `tpu` with
`jax.experimental.topologies`, which describes a slice that isn't there, and for `cpu` with XLA for the CPU that it runs
on, where it can also run the program that it has made, and measure.
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

from footplate.planning.hlo import collectives
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
        found["measured"] = _measured(compiled, arguments, devices[0], request.steps)
    return found


def _devices(request: Request) -> list[Any]:
    import jax

    if request.topology is None:
        return [jax.devices("cpu")[0]]
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(request.topology, platform="tpu", **request.options).devices)


def _jitted(captured: Any, devices: list[Any]) -> Any:
    """The step for these devices, spread over them by `data_parallel`, also where there is one alone."""
    from footplate.step.lowering.parallel import data_parallel, mesh_of

    return data_parallel(captured, mesh_of(devices))


def _arguments(captured: Any, devices: int) -> tuple[Any, ...]:
    """Shapes and types of state, rates, key and the whole batch."""
    import jax
    import jax.numpy as jnp
    import torch

    from footplate.step.lowering.arrays import array_type

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
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return {
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "peak_bytes": _peak(memory, platform),
        "flops": max(0.0, cost.get("flops", 0.0)),
        "accessed_bytes": max(0.0, cost.get("bytes accessed", 0.0)),
        "collectives": [asdict(one) for one in collectives(compiled.as_text())],
    }


def _peak(memory: Any, platform: str) -> int:
    """The most that is alive at once. The CPU's compiler doesn't say: there it is all kinds together."""
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    whole = memory.argument_size_in_bytes + new + memory.temp_size_in_bytes
    return getattr(memory, "peak_memory_in_bytes", whole) if platform == "tpu" else whole


def _measured(compiled: Any, arguments: tuple[Any, ...], device: Any, steps: int) -> dict[str, Any]:
    """Run the program on made-up numbers: seconds of a step, and how much the process's memory has grown at most."""
    import jax

    jax.jit(lambda x: x @ x)(jax.numpy.ones((512, 512))).block_until_ready()  # threads and their buffers are there
    _forget_peak()
    before = _status("VmRSS")
    state, rates, key, batch = _made_up(arguments, compiled.input_shardings[0])
    seconds = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        state, loss, _ = compiled(state, rates, key, batch)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - begun)
    return {
        "step_s": statistics.median(seconds[1:]),
        "fastest_s": min(seconds[1:]),
        "peak_bytes": _status("VmHWM") - before,
        "steps": steps,
    }


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
    request_path, reply_path = map(Path, sys.argv[1:])
    reply = compile_step(pickle.loads(request_path.read_bytes()))
    unfinished = reply_path.with_suffix(".part")
    unfinished.write_text(json.dumps(reply))
    unfinished.rename(reply_path)
