"""Cost of comparing batch shapes between hosts, which hosts that train with XLA together do before each call.

    python benchmarks/xla_exchange.py --json benchmarks/results/xla_exchange.json

Two processes of one machine communicate over gloo on the loopback. The limit is the bare all-reduce of three integers, the
least that the exchange needs. Over a network, both take a round trip longer. They take turns of a thousand calls each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import (
    LESS,
    QUICK_ROUNDS,
    Figures,
    Rounds,
    arguments,
    interleave,
    machine,
    median,
    process_context,
    ratio,
    report,
    row,
)
from ddp_overhead import free_port

from footplate.distributed.group import join
from footplate.distributed.world import World
from footplate.step.xla.runtime.batch_exchange import BatchExchange
from footplate.step.xla.runtime.sharding import flat

CALLS, ROUNDS, PROCESSES = 1000, 30, 2
OURS, LIMIT = "footplate", "limit: bare all-reduce"


def main() -> None:
    options = arguments(__doc__ or "")
    host = machine()
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with ProcessPoolExecutor(PROCESSES, process_context(options.quick)) as pool:
        results, _ = pool.map(measure, range(PROCESSES), repeat(free_port()), repeat(rounds))
    report(
        "xla_exchange",
        "Cost of comparing the shapes of a batch of images and classes between two processes",
        {"call_us": "µs a call"},
        [row(name, results[name]) for name in (OURS, LIMIT)],
        {"exchange_vs_limit": ratio(results, OURS, LIMIT, "call_us", f"wall time of a call, {LESS}")},
        {"call_us": median(results[OURS], "call_us")},
        host,
        ["torch", "jax", "footplate"],
        options.json,
    )


def measure(rank: int, port: int, rounds: int) -> Rounds:
    """Run one process. Only the figures of the first one count."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = World(rank, PROCESSES, rank, PROCESSES)
    spec: Any = SimpleNamespace(group=join(world, "gloo", torch.device("cpu")), weight=None)
    shares, numbers = BatchExchange(spec), torch.zeros(3, dtype=torch.int64)
    batch = flat((torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.int64)), lambda tensor: tensor)
    calls: dict[str, Callable[[int], Any]] = {
        OURS: lambda index: shares.agree([batch], index, True, index),
        LIMIT: lambda index: dist.all_reduce(numbers, op=dist.ReduceOp.MAX),
    }

    def turn(name: str) -> Figures:
        spec.group.barrier()
        began = time.perf_counter()
        for index in range(CALLS):
            calls[name](index)
        return {"call_us": (time.perf_counter() - began) / CALLS * 1e6}

    return interleave([OURS, LIMIT], turn, rounds)


if __name__ == "__main__":
    main()
