"""The program of a job: it trains, saves checkpoints into the job directory, continues from them, and exports a model file.

    footplate jobs submit training demo_job --package-path examples/trainer --module-name trainer.task \\
        --job-dir runs/jobs/demo --region us-central1 --stream-logs -- --epochs 2

You can also run it by hand. It runs on one replica or several without a change:

    cd examples && python -m trainer.task --job-dir ../runs/jobs/by_hand --epochs 2
"""

import argparse
import tempfile

from pyarrow import fs

import footplate as fp
from footplate.demo import TABLES
from trainer.model import Net

parser = argparse.ArgumentParser()
parser.add_argument(
    "--job-dir", required=True, help="for checkpoints, metrics and the model: a directory, gs:// or s3://"
)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-3)


def main() -> None:
    given = parser.parse_args()
    remote = "://" in given.job_dir
    here = tempfile.mkdtemp() if remote else given.job_dir  # a run's own files are on this machine's disk
    fp.seed_everything(1)
    data = fp.TableDataModule(train=TABLES / "train", val=TABLES / "val", batch_size=given.batch_size)
    model = Net(given.lr)
    saver = fp.ModelCheckpoint(dirpath=f"{given.job_dir}/checkpoints", every_n_train_steps=50, save_last=True)
    trainer = fp.Trainer(max_epochs=given.epochs, callbacks=[saver], logger=fp.CSV(), default_root_dir=here)

    trainer.fit(model, data, ckpt_path="last")  # from the beginning, or from where the attempt before was cut off
    scores = trainer.validate(model, data)[0]
    if trainer.is_global_zero:
        path = fp.export_model(model, f"{here}/model.pt2")
        if remote:
            fs.copy_files(str(path), f"{given.job_dir}/model.pt2")
        print(f"val_acc {scores['val_acc']:.3f} after {trainer.global_step} steps: {given.job_dir}/model.pt2")


if __name__ == "__main__":
    main()
