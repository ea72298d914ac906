"""The whole demo: tables, model, trainer, and the files of a run.

runs/demo/summary.json              the numbers of the table in the terminal
runs/demo/report.html               curves, data, confusions, and the images that the model took for others
runs/demo/predictions.parquet       predictions of the best checkpoint for the validation rows
runs/demo/model.pt2                 the model of that checkpoint, for inference without Footplate
runs/demo/metrics.csv, …            the files of the loggers and the checkpoint callback
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console

import footplate as fp
from footplate.demo import LABEL_NAMES, TABLES
from footplate.demo.model import FashionNet
from footplate.demo.results import predictions_table, summary_table
from footplate.hardware.devices import Devices


def run(
    output_dir: str | Path = "runs/demo",
    epochs: int = 10,
    resume: bool = False,
    accelerator: str = "auto",
    devices: Devices = "auto",
) -> dict[str, Any]:
    """Train the demo's classifier, and show the result.

    Args:
        output_dir: the directory of the run.
        epochs: the most epochs; training ends earlier if the validation loss stops falling.
        resume: continue the run in `output_dir` from its last checkpoint, if it has one.
        accelerator: as for the `Trainer`.
        devices: as for the `Trainer`.

    Returns:
        The content of `summary.json`: `val_acc` and `val_loss` of the best checkpoint, `epochs`, `steps`, `seconds` of
        training (with validation, and with the time before a resume), `samples_per_second` (training rows in
        that time), the paths `checkpoint` and `model`, and `mlflow_run_id`.
    """
    output_dir = Path(output_dir)
    train, val = fp.Table(TABLES / "train"), fp.Table(TABLES / "val")
    data = fp.TableDataModule(train=train, val=val, predict=val, batch_size=64)
    model = FashionNet()

    best = fp.ModelCheckpoint(monitor="val_acc", mode="max", save_last=True)
    timer = fp.Timer()
    mlflow = fp.MLflow(experiment="footplate-demo")
    trainer = fp.Trainer(
        accelerator=accelerator,
        devices=devices,
        max_epochs=epochs,
        callbacks=[
            fp.EarlyStopping("val_loss", min_delta=0.002, patience=3),
            best,
            timer,
            fp.LearningRateMonitor(),
            fp.Report(),
        ],
        logger=[fp.CSV(), mlflow],
        default_root_dir=output_dir,
    )
    trainer.fit(model, data, ckpt_path="last" if resume else None)
    seconds = timer.time_elapsed("train")

    scores = trainer.validate(model, data, ckpt_path="best")[0]
    predictions = predictions_table(trainer.predict(model, data, ckpt_path="best"), LABEL_NAMES)
    pq.write_table(predictions, output_dir / "predictions.parquet")
    # Again, now with the predictions.
    fp.report(output_dir)

    summary = {
        "val_acc": scores["val_acc"],
        "val_loss": scores["val_loss"],
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": seconds,
        "samples_per_second": trainer.current_epoch * train.num_rows / seconds,
        "checkpoint": str(best.best_model_path),
        "model": str(fp.export_model(model, output_dir / "model.pt2")),
        "mlflow_run_id": mlflow.run_id,
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(summary, output_dir)
    return summary


def show(summary: dict[str, Any], output_dir: Path) -> None:
    """Print the summary and the next commands."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(summary_table(summary))
    console.print(f"[bold]Report:[/] {output_dir / 'report.html'}, for a browser")
    console.print(f"[bold]Predictions:[/] {output_dir / 'predictions.parquet'}")
    console.print(f"[bold]MLflow:[/] mlflow ui --backend-store-uri sqlite:///{output_dir.parent / 'mlflow.db'}")
    console.print(
        f"[bold]Resume:[/] footplate demo --output-dir {output_dir} --epochs {2 * summary['epochs']} --resume"
    )
    console.print(
        f'[bold]Use the model:[/] torch.export.load("{summary["model"]}").module()(images)  '
        "# uint8 (B, 1, 28, 28) → logits (B, 10)"
    )
