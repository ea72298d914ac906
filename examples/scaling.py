"""What do more processes bring to the demo's model? A study of its training with 1 and with 2.

python examples/scaling.py                 # 3 epochs of 12,000 images, three times each; some minutes
python examples/scaling.py --part 0.05     # a twentieth of them, once each: does it work at all?

`fit` knows nothing of the study: it is what one would run alone, or with `fp.Runner(np=-2).run(fit)`.
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
    parser.add_argument("--part", type=float, default=1.0, help="of each epoch's batches")
    parser.add_argument("--output", default="runs/scaling", help="the directory of table, JSON and chart")
    given = parser.parse_args()
    study = fp.scale(
        functools.partial(fit, 3, given.part),
        np=[1, 2],
        repeat=3 if given.part == 1.0 else 1,
        lr_rule="sqrt",  # FashionNet's optimizer is of Adam's kind
        output=given.output,
    )
    print(study.reading)
    print(f"{study.directory}/scaling.md, .json, .png")
