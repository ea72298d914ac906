"""Directories of runs, as a trainer, a monitor, a launch and a user leave them, with values that the tests know."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

BEGAN = 1_764_060_000.0
STEPS = 400
EVERY = 10
CLASSES = ("circle", "square", "star")


def write_metrics(run: Path, steps: int = STEPS, lr: float = 1e-3) -> None:
    """A metrics.csv: a training loss every ten steps, validation every hundred, and a learning rate."""
    run.mkdir(parents=True, exist_ok=True)
    lines = ["step,epoch,train_loss,lr-AdamW,val_loss,val_acc"]
    for step in range(EVERY, steps + 1, EVERY):
        loss = 2 * math.exp(-step / 150) + 0.1 * math.sin(step / 7) ** 2
        lines.append(f"{step},{step // 100},{loss!r},{lr * (1 - step / steps)!r},,")
        if step % 100 == 0:
            lines.append(f"{step},{step // 100},,,{loss + 0.1!r},{1 - loss / 3!r}")
    (run / "metrics.csv").write_text("\n".join(lines) + "\n")


def monitor_rows(steps: int = STEPS, status: str | None = "finished", ranks: int = 1, at: float = BEGAN) -> list[Any]:
    """Rows of a monitor.jsonl: one attempt, which waits for input for half of its time."""
    rows: list[Any] = [
        {"kind": "start", "time": at, "epoch": 0, "step": 0, "world_size": ranks, "device": "cpu",
         "precision": "32-true", "setup_s": 1.3}
    ]  # fmt: skip
    for number, step in enumerate(range(EVERY, steps + 1, EVERY), 1):
        seconds = {"input": 1.0, "transfer": 0.05, "forward": 0.3, "backward": 0.45, "optimizer": 0.1, "logging": 0.02}
        if step % 100 == 0:
            seconds |= {"validation": 0.5, "checkpoint": 0.2}
        rows.append(
            {"kind": "window", "time": at + 2.0 * number, "epoch": step // 100, "step": step, "batches": EVERY,
             "wall_s": sum(seconds.values()), "seconds": seconds, "samples": 640, "tokens": None, "flops": 3.2e9,
             "gc_s": 0.01, "memory_bytes": 400_000_000 + 100_000 * step, "device_memory_bytes": None,
             "recompilations": 0}
        )  # fmt: skip
        if step % 100 == 0 and ranks > 1:
            times = [
                {"rank": rank, "own_s": 10.0 + (3.0 if rank == 1 else 0.0), "input_s": 2.0} for rank in range(ranks)
            ]
            rows.append(
                {"kind": "epoch", "time": at + 2.0 * number, "epoch": step // 100, "step": step, "ranks": times}
            )
    end = at + 2.0 * steps / EVERY
    if status == "finished":
        text = "52% of the time waits for input: decoding `image` is the limit. Set `num_threads=8`."
        rows.append({"kind": "advice", "time": end, "rule": "input", "text": text, "gain": 2.0, "evidence": {}})
    if status is not None:
        rows.append({"kind": "end", "time": end, "step": steps, "status": status})
    return rows


def write_monitor(run: Path, rows: list[Any]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "monitor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_hparams(run: Path, **hparams: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "hparams.json").write_text(json.dumps(hparams))


def picture(number: int) -> bytes:
    """A PNG that differs for each number."""
    image = np.full((16, 16, 3), 230, np.uint8)
    cv2.circle(image, (8, 8), 2 + number % 6, (number * 37 % 256, 60, 120), -1)
    return cv2.imencode(".png", image)[1].tobytes()


def samples(rows: int = 60) -> pa.Table:
    labels = np.arange(rows, dtype=np.int64) % len(CLASSES)
    return pa.table(
        {
            "image": [picture(number) for number in range(rows)],
            "label": labels,
            "weight": np.linspace(0, 5, rows),
            "note": [None if number % 4 == 0 else f"note {number}" for number in range(rows)],
        }
    )


def predictions(rows: int = 60) -> pa.Table:
    """Every fifth prediction is wrong, and surer with its row."""
    labels = np.arange(rows, dtype=np.int64) % len(CLASSES)
    predicted = np.where(np.arange(rows) % 5 == 0, (labels + 1) % len(CLASSES), labels)
    return pa.table(
        {
            "row": np.arange(rows, dtype=np.int64),
            "label": labels,
            "label_name": [CLASSES[label] for label in labels],
            "prediction": predicted,
            "prediction_name": [CLASSES[label] for label in predicted],
            "probability": np.linspace(0.4, 0.99, rows),
        }
    )


def plan() -> dict[str, Any]:
    return {
        "model": "Net", "precision": "32", "batch_size": 64,
        "choices": [
            {"on": "cpu", "kind": "cpu", "devices": 1, "fits": True, "memory": {"peak": 300_000_000, "limit": 8 << 30},
             "step_s": 0.05, "samples_per_second": 1280.0, "hours": 0.01, "usd": None},
            {"on": "H100", "kind": "gpu", "devices": 1, "fits": True, "memory": {"peak": 310_000_000, "limit": 80 << 30},
             "step_s": 0.0004, "samples_per_second": 150_000.0, "hours": 0.0001, "usd": 0.02},
        ],
    }  # fmt: skip


def full_run(run: Path) -> Path:
    """A run of two attempts with everything that a report shows."""
    write_metrics(run)
    first = monitor_rows(200, status=None, ranks=2)
    again = monitor_rows(ranks=2, at=BEGAN + 60)
    again = [again[0] | {"step": 150}, *(row for row in again[1:] if row.get("step", 400) > 150)]
    write_monitor(run, [*first, *again])
    table = run.parent / "table"
    write_deltalake(table, samples())
    write_hparams(
        run, lr=0.001, width=24, predict_table=f"{table}@0", **{"trainer/seed": 7, "trainer/accelerator": "cpu"}
    )
    pq.write_table(predictions(), run / "predictions.parquet")
    (run / "plan.json").write_text(json.dumps(plan()))
    (run / "hang-1.txt").write_text(
        "rank 1 is in `train` (train.py:7) since 41 s; rank 0 waits for it\n\nrank 0: process 7\n"
    )
    alert = {"rule": "val_loss > 2", "text": "val_loss is 2.5", "step": 100, "time_s": BEGAN + 20}
    (run / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    environment = {
        "recorded": BEGAN, "command": "python train.py --lr 0.001", "directory": "/home/me/flowers", "host": "node-3",
        "git": {"commit": "0123456789abcdef", "changed": True}, "system": "Linux", "cpu": "A processor", "cores": 8.0,
        "memory_bytes": 32 << 30, "devices": ["cpu:0", "cpu:1"], "python": "3.12.1", "footplate": "0.1.0",
        "packages": {"torch": "2.11.0", "numpy": "2.0.0"},
    }  # fmt: skip
    (run / "environment.json").write_text(json.dumps(environment))
    return run
