"""A trainer in a notebook: where it trains, how far it is, and the last metrics.

Displaying it reads nothing from a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from footplate.core import html

if TYPE_CHECKING:
    from footplate.training.run import Run


def to_html(run: Run) -> str:
    """Describe the present or last run of a trainer in HTML."""
    config, placement, progress = run.config, run.placement, run.progress
    devices = len(placement.device_ids)
    ranks = placement.ranks_asked
    epochs = f" of {config.max_epochs}" if config.max_epochs not in (None, -1) else ""
    steps = f" of {config.max_steps:,}" if config.max_steps != -1 else ""

    values = {
        "status": f"{run.status}: {run.stage}" if run.stage else run.status,
        "accelerator": placement.accelerator.name,
        "devices": f"{devices} on each of {placement.nodes} machines" if placement.nodes > 1 else devices,
        "processes": ranks if ranks > 1 else None,
        "precision": placement.precision.name,
        "epochs": f"{progress.epoch}{epochs}",
        "steps": f"{progress.global_step:,}{steps}",
        "folder": run.run_dir,
    }
    metrics = run.reports.callback.items()
    latest = html.grid(["metric", "last value"], [[name, f"{value:.6g}"] for name, value in metrics]) if metrics else ""
    return html.card("Trainer", html.facts(values), latest)
