"""Coverage of torchvision, timm and transformers: the models whose training steps XLA can capture. No step runs.

For each model, the step is captured with tensors that have no memory, and its operations are looked up in the table of
operations. `captured` is true if none is missing; otherwise the row lists the missing ones, or the reason of the refusal.
`xla_parity.py` compares the results of some of the models.

Each model is captured in a process of its own, with a time limit. The process is forked from one that has imported the
libraries.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import transformers
from common import machine, models_parser, report
from xla_coverage_models import Model, models

from footplate.core.errors import FootplateError
from footplate.step.xla.capture import capture_training
from footplate.step.xla.lowering import missing_ops

LIMIT_S = 240


def examined(model: Model) -> dict[str, Any]:
    """Capture and lower a model's step. Return whether that works, and the reason if it doesn't."""
    torch.manual_seed(0)
    module, batch = model()
    module.train()
    try:
        captured = capture_training(module, torch.optim.SGD(module.parameters(), lr=0.1), batch)
    except FootplateError as error:
        return {"captured": False, "missing": [], "refused": without_folders(str(error))}
    missing = [operation.name for operation in missing_ops(captured.graph)]
    return {"captured": not missing, "missing": missing, "refused": "", "nodes": len(captured.graph.graph.nodes)}


def without_folders(text: str) -> str:
    """A text in which file paths begin with their package, wherever it is installed."""
    return re.sub(r"\S*/(site-packages|benchmarks)/", "", text)


def _in_child(model: Model, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        pipe.send(examined(model))
    except Exception as error:
        pipe.send({"captured": False, "missing": [], "refused": "", "error": f"{type(error).__name__}: {error}"[:2000]})


def examined_apart(model: Model) -> dict[str, Any]:
    """Run `examined` in a process of its own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(model, sender))
    started = time.perf_counter()
    child.start()
    sender.close()
    try:
        outcome = receiver.recv() if receiver.poll(LIMIT_S) else {"error": f"took more than {LIMIT_S} s"}
    except EOFError:
        outcome = {"error": "the process died"}
    child.kill()
    child.join()
    return {"captured": False, "missing": [], "refused": "", **outcome, "seconds": time.perf_counter() - started}


def main() -> None:
    """Capture all models, or the models whose names contain one of the given words."""
    parser = models_parser(__doc__ or "", "words", "parts of names of models or libraries; all by default")
    options = parser.parse_args()
    host, rows = machine(), []
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    words = options.words or (["torchvision alexnet"] if options.quick else [""])
    for library, name, model in models():
        if any(word in f"{library} {name}" for word in words):
            rows.append({"name": f"{library} {name}", "library": library, **examined_apart(model)})
            print(_line(rows[-1]), flush=True)
    if options.add and options.json.exists():
        names = {row["name"] for row in rows}
        rows = [row for row in json.loads(options.json.read_text())["rows"] if row["name"] not in names] + rows
    report(
        "xla_coverage",
        "Training steps that can be captured and lowered: 1 if so, and the nodes of their graphs",
        {"captured": "captured", "nodes": "nodes", "seconds": "s"},
        rows,
        {},
        {library: counted(rows, library) for library in sorted({row["library"] for row in rows})},
        host,
        ("torch", "jax", "torchvision", "timm", "transformers"),
        options.json,
    )


def counted(rows: list[dict[str, Any]], library: str) -> dict[str, int]:
    """Number of tried and of trainable models of a library."""
    captured = [row["captured"] for row in rows if row["library"] == library]
    return {"tried": len(captured), "captured": sum(captured)}


def _line(row: dict[str, Any]) -> str:
    why = ", ".join(row["missing"]) or row["refused"] or row.get("error", "")
    return f"{row['name']:55} {row['seconds']:5.1f} s  {'yes' if row['captured'] else 'no: ' + why}"


if __name__ == "__main__":
    main()
