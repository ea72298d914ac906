"""The compiler's process: `python -m footplate.planning.compiler REQUEST REPLY PARENT`.

The compiler needs a process of its own for two reasons. libtpu, the TPU's compiler, serves one process of a machine at a
time, writes to standard error, and may abort its process. And JAX chooses its hardware once, when it is first used.

REQUEST is a pickled `Request`. REPLY is a JSON file, which the process writes last. For `tpu` the process compiles with
`jax.experimental.topologies`, which describes a slice that isn't attached. For `cpu` it compiles with XLA for this
machine's CPU, and can also run the program and measure it. The process ends with its parent, whose id is PARENT; otherwise
it would hold libtpu for minutes after the plan has ended.
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

from footplate.launch.process_lifetime import die_with
from footplate.planning.hlo import collectives, library_bytes
from footplate.planning.serialized_step import SerializedStep, deserialize


@dataclass(frozen=True)
class Request:
    """A step, and the hardware to compile it for.

    Attributes:
        step: the step, captured with the batch of one device; with averages if there are several devices.
        platform: "tpu" or "cpu".
        topology: the topology of the slice, such as `v5e:2x4`; None for a CPU.
        options: further arguments of `get_topology_desc`.
        steps: the number of steps to run and time after compiling; always 0 for a TPU.
    """

    step: SerializedStep
    platform: str
    topology: str | None
    options: dict[str, Any]
    steps: int = 0


def compile_step(request: Request) -> dict[str, Any]:
    """Compile a step; returns the facts of one device: see `program_client.Program`."""
    import jax

    captured = deserialize(request.step)
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

    facts = _facts(compiled, request.platform)
    facts |= {"devices": len(devices), "device_kind": devices[0].device_kind, "compile_s": time.perf_counter() - begun}
    if request.steps:
        facts["measured"] = _measure(compiled, arguments, request.steps)
    return facts


def _devices(request: Request) -> list[Any]:
    import jax

    if request.topology is None:
        return [jax.devices("cpu")[0]]
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(request.topology, platform="tpu", **request.options).devices)


def _jitted(captured: Any, devices: list[Any]) -> Any:
    """Make the step a function over all devices with `data_parallel`, also if there is only one device."""
    from footplate.step.xla.lowering.data_parallel import data_parallel, mesh_of

    return data_parallel(captured, mesh_of(devices))


def _arguments(captured: Any, devices: int) -> tuple[Any, ...]:
    """Describe the arguments of the step: shapes and types of state, rates, key and the whole batch."""
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


def _facts(compiled: Any, platform: str) -> dict[str, Any]:
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    cost = cost[0] if isinstance(cost, list) else cost
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes
    if platform == "cpu":
        temporaries += library_bytes(text)

    # The CPU's compiler doesn't report what is alive at once. The sum of all kinds is a bound.
    total = memory.argument_size_in_bytes + new + temporaries
    return {
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": new,
        "temporaries_bytes": temporaries,
        "code_bytes": memory.generated_code_size_in_bytes,
        "peak_bytes": getattr(memory, "peak_memory_in_bytes", total) if platform == "tpu" else total,
        "flops": max(0.0, cost.get("flops", 0.0)),
        "accessed_bytes": max(0.0, cost.get("bytes accessed", 0.0)),
        "collectives": [asdict(collective) for collective in collectives(text)],
    }


def _measure(compiled: Any, arguments: tuple[Any, ...], steps: int) -> dict[str, Any]:
    """Run the program on random numbers, and measure the time of a step and the memory.

    The memory is the bytes of state and batch, plus the most by which the process grows within a step. A step that doesn't
    overwrite the old state with the new one grows by the size of the state too.

    The first step isn't counted. It allocates what later steps reuse: threads, code, buffers of libraries. The next steps
    are timed, one after the other. Before each of the last steps the process waits, because XLA's threads free temporaries
    a moment after a step's end; the median growth of these steps counts.
    """
    import jax

    state, rates, key, batch = _random_arguments(arguments, compiled.input_shardings[0])
    held = sum(array.nbytes for array in jax.tree.leaves((state, batch)))
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
    """Wait until freed memory is returned to the system, and reset the peak; returns the memory of the process."""
    for _ in range(10):
        time.sleep(0.05)
        _reset_peak()
    return _status("VmRSS")


def _random_arguments(arguments: tuple[Any, ...], shardings: Any) -> Any:
    """Make small random numbers for floats, and zeros for integers, which are classes or tokens."""
    import jax
    import numpy as np

    generator = np.random.default_rng(0)

    def make(spec: Any, sharding: Any) -> Any:
        if jax.numpy.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), sharding)
        if jax.numpy.issubdtype(spec.dtype, jax.numpy.floating):
            values = (np.abs(generator.standard_normal(spec.shape, dtype=np.float32)) * 0.02).astype(spec.dtype)
        else:
            values = np.zeros(spec.shape, spec.dtype)
        return jax.device_put(values, sharding, may_alias=False)

    return jax.tree.map(make, arguments, shardings)


def _reset_peak() -> None:
    """Return unused memory to the system, and reset its record of the peak (`VmHWM`)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """Read a size from `/proc/self/status`, in bytes."""
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
