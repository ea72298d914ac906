"""The losses that `benchmarks/lab_train.py` writes: those of all attempts must be those of an undisturbed training."""

from __future__ import annotations

import json
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lab_train.py"
STEPS = 24

Losses = dict[tuple[str, int], set[str]]


def losses(directory: Path) -> Losses:
    """All losses that were ever computed, by rank and step. An exact repetition has one for each."""
    found: Losses = {}
    for file in directory.glob("rank-*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            found.setdefault((file.stem, line["step"]), set()).add(line["loss"])
    return found
