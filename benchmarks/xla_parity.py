"""Parity of XLA on eight devices with eager torch, for models of torchvision, timm and transformers.

Double precision: five steps of SGD with momentum, then five of AdamW, on eight virtual devices with two rows each. The
reference is data-parallel training in eager torch: each eighth of the batch separately, from the same buffers, with
gradients and buffers averaged. The figure is the largest relative error of any parameter or buffer at the end. Tensors
whose elements are below a thousandth are measured as if they were a thousandth. The bias of attention's keys, for example,
has no effect and stays at zero except for rounding.

bfloat16: five steps of SGD under autocast on one device, with the same rows. The losses are compared with eager torch's in
single precision. Beside it is the error of eager torch's own autocast.

The models are made without dropout. Dropout has a row of its own, because its draws can't match torch's: `xla_dropout.py`
counts the drops, and the row fails if a count is further from its expected value than chance explains.

A model that can't be captured is not a failure. Its row has the reason that the user would see.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import torch
from common import machine, models_parser, report
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from xla_dropout import SIGMAS, draws
from xla_models import ENTRIES, QUICK, UNFIT, Entry

from footplate.core.errors import FootplateError
from footplate.step.xla.capture import capture_training, load_state, state_of
from footplate.step.xla.lowering import arrays_of, batch_arrays, lower, missing_ops, rates_of, tensors_like
from footplate.step.xla.lowering.data_parallel import data_parallel, mesh_of

DEVICES, ROWS, STEPS = 8, 2, 5
LIMITS = {"sgd": 1e-6, "adamw": 1e-4, "bf16": 0.02}
SMALL = 1e-3
DROPOUT = "dropout"

Make = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05),
}


def drawn(entry: Entry, rows: int, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """A module and its batches in a given type. Every call returns the same values."""
    torch.manual_seed(0)
    module = entry.make().to(dtype)

    def typed(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module, [pytree.tree_map(typed, entry.draw(rows)) for _ in range(STEPS)]


def shares(batch: Any) -> list[Any]:
    """Split a batch among the devices."""
    return [pytree.tree_map(lambda tensor, i=i: tensor[i * ROWS : (i + 1) * ROWS], batch) for i in range(DEVICES)]


def eager_parallel(module: Any, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    """Data-parallel training by eager torch in one process."""
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    for batch in batches:
        before = [buffer.clone() for buffer in buffers]
        after = [torch.zeros_like(buffer) for buffer in buffers]
        optimizer.zero_grad()
        for share in shares(batch):
            for buffer, value in zip(buffers, before, strict=True):
                buffer.data.copy_(value)
            (module.training_step(share, 0) / DEVICES).backward()
            for total, buffer in zip(after, buffers, strict=True):
                total += buffer / DEVICES
        for buffer, value in zip(buffers, after, strict=True):
            buffer.data.copy_(value)
        optimizer.step()


def compiled_parallel(module: Any, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    """The same training by one program on all devices."""
    captured = capture_training(module, optimizer, shares(batches[0])[0], averages=True)
    step = data_parallel(captured, mesh_of(jax.devices()[:DEVICES]))
    state = arrays_of(state_of(module, optimizer))
    for number, batch in enumerate(batches):
        arrays = batch_arrays(captured, batch, DEVICES)
        state, _, _ = step(state, rates_of(optimizer), jax.random.key(number), arrays)
    load_state(module, optimizer, tensors_like(state_of(module, optimizer), state))


def worst(trained: nn.Module, reference: nn.Module) -> float:
    """Largest relative error of a module's floating-point tensors."""
    pairs = zip(trained.state_dict().values(), reference.state_dict().values(), strict=True)
    return max(
        ((a - b).norm() / b.norm().clamp(min=SMALL * b.numel() ** 0.5)).item()
        for a, b in pairs
        if a.is_floating_point()
    )


def parallel_error(entry: Entry, make: Make) -> float:
    """Error of the eight devices against eager torch after all steps."""
    module, batches = drawn(entry, DEVICES * ROWS, torch.float64)
    reference = copy.deepcopy(module)
    with jax.enable_x64(True):
        compiled_parallel(module, make(module.parameters()), batches)
    eager_parallel(reference, make(reference.parameters()), batches)
    return worst(module, reference)


def compiled_losses(module: Any, batches: list[Any]) -> list[float]:
    """Losses of bfloat16 steps in a compiled program."""
    optimizer = MAKE["sgd"](module.parameters())
    captured = capture_training(module, optimizer, batches[0], precision="bf16-mixed")
    step, state, losses = (jax.jit(lower(captured), donate_argnums=0), arrays_of(state_of(module, optimizer)), [])
    for number, batch in enumerate(batches):
        arrays = batch_arrays(captured, batch)
        state, loss, _ = step(state, rates_of(optimizer), jax.random.key(number), arrays)
        losses.append(float(loss))
    return losses


def eager_losses(module: Any, batches: list[Any], half: bool) -> list[float]:
    """Losses of eager torch's steps, in bfloat16 or in single precision."""
    optimizer, losses = MAKE["sgd"](module.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def half_errors(entry: Entry) -> tuple[float, float]:
    """Errors of the bfloat16 losses against single precision: ours, and eager torch's own."""
    module, batches = drawn(entry, DEVICES * ROWS, torch.float32)
    wanted = eager_losses(copy.deepcopy(module), batches, half=False)
    eager = eager_losses(copy.deepcopy(module), batches, half=True)
    ours = compiled_losses(module, batches)
    return furthest(ours, wanted), furthest(eager, wanted)


def furthest(losses: list[float], wanted: list[float]) -> float:
    """Largest relative error of a number."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def compared(name: str, entry: Entry) -> dict[str, Any]:
    """A row of the table."""
    started = time.perf_counter()
    try:
        errors = {kind: parallel_error(entry, make) for kind, make in MAKE.items()}
        eager = {}
        if entry.in_half:
            errors["bf16"], eager["bf16_eager"] = half_errors(entry)
    except Exception as error:  # the comparison goes on with the other models
        return {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
    ok = all(error <= LIMITS[kind] for kind, error in errors.items())
    return {"name": name, **errors, **eager, "ok": ok, "seconds": time.perf_counter() - started}


def dropped() -> dict[str, Any]:
    """The row of dropout."""
    started = time.perf_counter()
    statistics = draws()
    ok = statistics.sigmas <= SIGMAS
    return {"name": DROPOUT, **asdict(statistics), "ok": ok, "seconds": time.perf_counter() - started}


def why_not(entry: Entry) -> str:
    """The reason why a model can't be trained, or an empty text if it can."""
    module, batches = drawn(entry, ROWS, torch.float32)
    try:
        captured = capture_training(module, MAKE["sgd"](module.parameters()), batches[0])
    except FootplateError as error:
        return str(error).split(", which", 1)[0].split(": ", 1)[-1].splitlines()[0]
    return ", ".join(f"no {operation.name}" for operation in missing_ops(captured.graph))


def main() -> None:
    """Compare all models, or the named ones."""
    parser = models_parser(__doc__ or "")
    options = parser.parse_args()
    host = machine()
    names = options.models or ([*QUICK] if options.quick else [*ENTRIES, DROPOUT, *UNFIT])
    rows = []
    for name in (name for name in names if name not in UNFIT):
        rows.append(dropped() if name == DROPOUT else compared(name, {**ENTRIES, **QUICK}[name]))
        print(rows[-1], flush=True)
    refused = {name: why_not(UNFIT[name]) for name in names if name in UNFIT}
    if options.add and options.json.exists():
        known = json.loads(options.json.read_text())
        rows = [row for row in known["rows"] if row["name"] not in names] + rows
        refused = known["figures"]["not_supported"] | refused
    report(
        "xla_parity",
        "Relative errors against eager torch: parameters after five steps; losses in bfloat16",
        {
            "sgd": "SGD",
            "adamw": "AdamW",
            "bf16": "bf16",
            "bf16_eager": "eager bf16",
            "sigmas": "standard errors",
            "seconds": "s",
        },
        rows,
        {},
        {
            "models": sum(row["name"] != DROPOUT for row in rows),
            "failed": sum(not row["ok"] for row in rows),
            "dropout_sigmas": max((row["sigmas"] for row in rows if "sigmas" in row), default=None),
            "max_rel_err": max((row["sgd"] for row in rows if "sgd" in row), default=None),
            "max_rel_err_adamw": max((row["adamw"] for row in rows if "adamw" in row), default=None),
            "max_rel_err_bf16_loss": max((row["bf16"] for row in rows if "bf16" in row), default=None),
            "not_supported": {name: reason for name, reason in refused.items() if reason},
        },
        host,
        ("torch", "jax", "torchvision", "timm", "transformers"),
        options.json,
    )


if __name__ == "__main__":
    main()
