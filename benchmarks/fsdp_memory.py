"""Memory and step time of a sharded model, beside a loop of one's own with FSDP2.

    python benchmarks/fsdp_memory.py --json benchmarks/results/fsdp_memory.json
    python benchmarks/fsdp_memory.py --ranks 4 --json benchmarks/results/fsdp_memory.json

A stack of transformer blocks with 400 million parameters in float32, AdamW, ranks that are fresh processes with one torch
thread each, over gloo. Both loops build the model on the meta device, and shard it block by block. The loop of one's own is
what torch's documentation shows: `fully_shard`, `to_empty`, `reset_parameters`.

Memory is resident memory of a rank beyond what it had after its imports; the figure is the mean of the ranks:

    construction    the most until the model is sharded, before the first batch
    peak            the most of the whole run, with gradients and the moments of AdamW
    shard           the bytes of the rank's own parameters

The step is the median of the steps after the first two. `quick` runs a small model.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import (
    LESS,
    QUICK_ROUNDS,
    WALL_STEP,
    Figures,
    arguments_parser,
    interleave,
    machine,
    median,
    process_context,
    ratio,
    report,
    row,
    spread,
)
from ddp_overhead import free_port

# Width, blocks, rows of a batch, steps.
MODEL, QUICK_MODEL = (2048, 8, 4, 5), (256, 4, 4, 4)
LENGTH = 16
WARM_STEPS = 2
ROUNDS = 2
RAW, FOOTPLATE = "raw FSDP2", "footplate"
MB = 1e6


def memory(field: str) -> float:
    """Resident memory of this process in MB, by a field of Linux: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024 / MB


def block(width: int) -> Any:
    """A transformer block."""
    from torch import nn

    return nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True)


def batches(width: int, rows: int, steps: int) -> list[Any]:
    import torch

    return [torch.randn(rows, LENGTH, width, generator=torch.Generator().manual_seed(step)) for step in range(steps)]


def raw(model: tuple[int, int, int, int], constructed: Callable[[Any], None]) -> list[float]:
    """The loop of one's own. Returns the seconds of each step."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    width, blocks, rows, steps = model
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    with torch.device("meta"):
        net = nn.Sequential(*(block(width) for _ in range(blocks)))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    net.to_empty(device="cpu")
    for layer in net.modules():
        reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
        if reset is not None:
            reset()
    constructed(net)

    optimizer = torch.optim.AdamW(net.parameters())
    seconds = []
    for batch in batches(width, rows, steps):
        began = time.perf_counter()
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    torch.distributed.destroy_process_group()
    return seconds


def footplate(model: tuple[int, int, int, int], constructed: Callable[[Any], None]) -> list[float]:
    """Footplate's trainer. Returns the seconds of each step."""
    import torch
    from torch import nn

    import footplate as fp

    width, blocks, rows, steps = model
    times: list[float] = []

    class Stack(fp.Module):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.net = nn.Sequential(*(block(width) for _ in range(blocks)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Watch(fp.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            constructed(pl_module)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            times.append(time.perf_counter() - self.began)

    folder = tempfile.mkdtemp()
    trainer = fp.Trainer(
        accelerator="cpu", strategy="fsdp", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[Watch()],
    )  # fmt: skip
    trainer.fit(Stack(), batches(width, rows, steps))
    shutil.rmtree(folder)
    return times


LOOPS = {RAW: raw, FOOTPLATE: footplate}


def rank(name: str, model: tuple[int, int, int, int], environ: dict[str, str], sending: Connection) -> None:
    """One rank of a loop: sends its figures."""
    os.environ.update(environ)
    import torch
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    if name == FOOTPLATE:
        import footplate.distributed.fsdp
        import footplate.training.trainer  # noqa: F401
    figures: Figures = {}
    # Imports that a loop makes itself count for it, and the memory that they use up meanwhile doesn't.
    before = memory("VmRSS")

    def constructed(module: Any) -> None:
        figures["construction_mb"] = memory("VmHWM") - before
        shards = (parameter.to_local().nbytes for parameter in module.parameters())
        figures["shard_mb"] = sum(shards) / MB

    seconds = LOOPS[name](model, constructed)
    figures["peak_mb"] = memory("VmHWM") - before
    figures["step_s"] = statistics.median(seconds[WARM_STEPS:])
    sending.send(figures)


def measure(name: str, ranks: int, model: tuple[int, int, int, int], quick: bool) -> Figures:
    """Run all ranks of a loop, and return the means of their figures."""
    context = process_context(quick, "torch.distributed.fsdp", "footplate.training.trainer")
    port = free_port()
    pipes, processes = [], []
    for number in range(ranks):
        environ = {
            "RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=rank, args=(name, model, environ, sending))
        process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    of_ranks = [receiving.recv() for receiving in pipes]
    for process in processes:
        process.join()
    return {figure: statistics.fmean(each[figure] for each in of_ranks) for figure in of_ranks[0]}


def main() -> None:
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    options = parser.parse_args()
    model = QUICK_MODEL if options.quick else MODEL
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    before = machine()
    results = interleave(list(LOOPS), lambda name: measure(name, options.ranks, model, options.quick), rounds)

    suffix = "" if options.ranks == 2 else f"_{options.ranks}_ranks"
    most = f"most memory of a rank beyond its imports, {LESS}"
    over_shard = [run["construction_mb"] / run["shard_mb"] for run in results[FOOTPLATE]]
    ratios = {
        "peak_vs_plain_fsdp2": ratio(results, FOOTPLATE, RAW, "peak_mb", most),
        "construction_peak_vs_shard": spread(over_shard, FOOTPLATE, "the rank's own parameters", most),
        "step_vs_plain_fsdp2": ratio(results, FOOTPLATE, RAW, "step_s", WALL_STEP),
    }
    rows = [row(f"{name}, {options.ranks} ranks", runs) for name, runs in results.items()]
    report(
        "fsdp_memory",
        f"{options.ranks} ranks of a sharded model: memory in MB, and seconds of a step",
        {"shard_mb": "shard", "construction_mb": "construction", "peak_mb": "peak", "step_s": "step s"},
        rows,
        {name + suffix: value for name, value in ratios.items()},
        {f"parameters_mb{suffix}": options.ranks * median(results[RAW], "shard_mb")},
        before,
        ("torch", "footplate"),
        options.json,
        add=True,
    )


if __name__ == "__main__":
    main()
