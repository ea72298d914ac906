"""Measure how the training of the demo's model scales from 1 process to 2.

python examples/scaling.py                 # 3 epochs of 12,000 images, three times each; takes some minutes
python examples/scaling.py --part 0.05     # a twentieth of the batches, once each: a quick check that it works

`fit` has no code for the study. You can also run it alone, or with `fp.Runner(np=-2).run(fit)`.
"""

import argparse
import functools
import tempfile

import footplate as fp
from footplate.demo import TABLES
from footplate.demo.model import FashionNet


def fit(epochs: int, part: float) -> None:
    """Train the demo's model on a part of its table."""
    data = fp.TableDataModule(train=fp.Table(TABLES / "train"), val=fp.Table(TABLES / "val"), batch_size=64)
    with tempfile.TemporaryDirectory() as directory:
        trainer = fp.Trainer(
            max_epochs=epochs, limit_train_batches=part, limit_val_batches=part, seed=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, default_root_dir=directory,
        )  # fmt: skip
        trainer.fit(FashionNet(), data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Study how the training of the demo's model scales.")
    parser.add_argument("--part", type=float, default=1.0, help="the part of each epoch's batches")
    parser.add_argument("--output", default="runs/scaling", help="the directory of table, JSON and chart")
    args = parser.parse_args()
    study = fp.scale(
        functools.partial(fit, 3, args.part),
        np=[1, 2],
        repeat=3 if args.part == 1.0 else 1,
        lr_rule="sqrt",  # the usual rule for AdamW, which FashionNet uses
        output=args.output,
    )
    print(study.reading)
    print(f"{study.directory}/scaling.md, .json, .png")
