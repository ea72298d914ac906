"""Time from the start of a process until its first training step.

    python benchmarks/startup.py --json benchmarks/results/startup.json

Fresh processes take turns, with warm file caches. Each runs a small program until its first training step (or its imports)
are done, prints the time, and exits at once. CPU time is that of the process since it began. Wall time starts before the
process does. The trainers keep their defaults: progress display, CSV, summary and checkpoints are on.

The last table is Python's own import timing. It lists the modules that a Footplate program imports in addition to the raw
program. torch imports much of itself, mostly `torch._dynamo`, when the first optimizer is made. That time is in the first
steps, not in `import torch`.

A quick run forks these processes from one that has imported torch and Lightning. Only Python's import timing starts fresh
processes then.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import (
    LESS,
    QUICK_ROUNDS,
    Figures,
    arguments,
    interleave,
    let_torchvision_be_imported,
    machine,
    median,
    process_context,
    ratio,
    report,
)

ROUNDS = 15
_MODEL = "nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))"
_BATCH = "x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))"
_IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
_DONE = "import os, time; print('DONE', time.monotonic(), time.process_time(), flush=True); os._exit(0)"
_LET_TORCHVISION = f"{inspect.getsource(let_torchvision_be_imported)}\nlet_torchvision_be_imported()\n"

_RAW = f"""{_IMPORTS}
{_BATCH}
model = {_MODEL}
adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
adamw.zero_grad()
F.cross_entropy(model(x), y).backward()
adamw.step()
{_DONE}
"""
_TRAINED = """
class Tiny({base}):
    def __init__(self):
        super().__init__()
        self.net = {model}
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
    def on_train_batch_end(self, *_):
        {done}
class Batches:
    def __len__(self):
        return 1
    def __iter__(self):
        yield x, y
{batch}
{trainer}(accelerator="cpu", devices=1, max_epochs=1).fit(Tiny(), Batches())
"""
_OURS = {"model": _MODEL, "done": _DONE, "batch": _BATCH}
PROGRAMS = {
    "import torch": f"import torch\n{_DONE}",
    "import footplate": f"import footplate\n{_DONE}",
    "footplate.Trainer, .Module": f"import footplate; footplate.Trainer, footplate.Module\n{_DONE}",
    "import lightning": f"{_LET_TORCHVISION}import lightning.pytorch\n{_DONE}",
    "raw: first step": _RAW,
    "footplate: first step": f"{_IMPORTS}import footplate as fp"
    + _TRAINED.format(base="fp.Module", trainer="fp.Trainer", **_OURS),
    "lightning: first step": f"{_LET_TORCHVISION}{_IMPORTS}import lightning.pytorch as pl"
    + _TRAINED.format(base="pl.LightningModule", trainer="pl.Trainer", **_OURS),
}


def run(name: str, quick: bool) -> Figures:
    """Start a program in an empty directory. Return the seconds until it is done."""
    with tempfile.TemporaryDirectory(prefix="footplate-bench-") as directory:
        begun = time.monotonic()
        if quick:
            output = _output_of_fork(PROGRAMS[name], Path(directory))
        else:
            output = _output(name, [sys.executable, "-c", PROGRAMS[name]], directory)[0]
    done = re.search(r"DONE (\S+) (\S+)", output)
    if done is None:
        raise SystemExit(f"{name} failed.")
    return {"wall_s": float(done.group(1)) - begun, "cpu_s": float(done.group(2))}


def imports(name: str) -> dict[str, float]:
    """Modules that a program imports, each with its own time in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="footplate-bench-") as directory:
        _, errors = _output(name, [sys.executable, "-X", "importtime", "-c", PROGRAMS[name]], directory)
    lines = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", errors)
    return {module: int(us) / 1000 for us, module in lines}


def _output(name: str, command: list[str], directory: str) -> tuple[str, str]:
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if "DONE" not in ended.stdout:
        raise SystemExit(f"{name} failed:\n{ended.stderr[-4000:]}")
    return ended.stdout, ended.stderr


def _output_of_fork(program: str, directory: Path) -> str:
    """Run a program in a fork of this process, which has imported torch and Lightning."""
    context: Any = process_context(True, "preloaded")
    process = context.Process(target=_execute, args=(program, directory))
    process.start()
    process.join()
    return (directory / "output").read_text()


def _execute(program: str, directory: Path) -> None:
    os.chdir(directory)
    os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT), 1)
    exec(program, {"__name__": "__main__"})


def added_imports() -> dict[str, Figures]:
    """Imports of Footplate's first step beyond the raw one's: milliseconds and modules by top-level package."""
    raw, ours = imports("raw: first step"), imports("footplate: first step")
    packages: dict[str, Figures] = defaultdict(lambda: {"ms": 0.0, "modules": 0})
    for module in ours.keys() - raw.keys():
        package = packages[module.partition(".")[0]]
        package["ms"] += ours[module]
        package["modules"] += 1
    return dict(sorted(packages.items(), key=lambda item: -item[1]["ms"]))


def main() -> None:
    options = arguments("Time from the start of a process until its first training step")
    if options.quick:
        compare(QUICK_ROUNDS, options.json, quick=True)
        return
    with tempfile.TemporaryDirectory(prefix="footplate-bench-") as bytecode:
        # Compile all modules once, as an installed environment has them, into a directory that is always writable.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode

        # Fill the file caches and compile the modules before the clock runs.
        for name in PROGRAMS:
            run(name, quick=False)
        compare(ROUNDS, options.json)


def compare(rounds: int, path: Path | None, quick: bool = False) -> None:
    host = machine()
    results = interleave(list(PROGRAMS), lambda name: run(name, quick), rounds)

    pairs = {
        "first_step_vs_raw": ("footplate: first step", "raw: first step"),
        "import_vs_torch": ("footplate.Trainer, .Module", "import torch"),
        "import_alone_vs_torch": ("import footplate", "import torch"),
        "lightning_first_step_vs_raw": ("lightning: first step", "raw: first step"),
        "lightning_import_vs_torch": ("import lightning", "import torch"),
    }
    rows = [
        {"name": name, "cpu_s": median(runs, "cpu_s"), "wall_s": median(runs, "wall_s"), "rounds": runs}
        for name, runs in results.items()
    ]
    added = added_imports()
    wall = {
        f"wall_{name}": ratio(results, *pair, "wall_s", f"wall time of the process, {LESS}")
        for name, pair in pairs.items()
    }
    report(
        "startup",
        f"Seconds from the start of a process, medians of {len(results['import torch'])} rounds",
        {"cpu_s": "CPU s", "wall_s": "wall s"},
        rows,
        {
            name: ratio(results, *pair, "cpu_s", f"processor time of the process, {LESS}")
            for name, pair in pairs.items()
        },
        {**wall, "added_imports": added, "clock": "CPU time of the process"},
        host,
        ("torch", "footplate", "lightning", "rich"),
        path,
    )
    print("\nImported for Footplate's first step and not for the raw one:")
    for package, figures in list(added.items())[:10]:
        print(f"  {package:24} {figures['ms']:7.1f} ms  {figures['modules']:4.0f} modules")


if __name__ == "__main__":
    main()
