"""Training from a table, killed in mid-epoch and resumed with another number of ranks: every row exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from models import ranks
from torch import nn

import footplate as fp

from .common import make

ROWS, BATCH, CUT_AT = 331, 12, 11  # batches of 12 rows over all ranks: 28 an epoch, the last with 7


class Notes(fp.Module):
    """Records the rows of its training steps, in a file of its rank."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with (self.root / f"{self.trainer.current_epoch}-{self.trainer.global_rank}").open("a") as file:
            file.writelines(f"{row}\n" for row in batch["id"].tolist())
        return self.net(batch["x"][:, None]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Cut(fp.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == CUT_AT:
            trainer.save_checkpoint(trainer.run_dir / "cut.ckpt")
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3)])
def test_a_table_is_trained_on_across_a_change_of_ranks_and_every_row_is_seen_exactly_once(before, after, tmp_path):
    for part in range(3):
        ids = range(part * 111, min(ROWS, (part + 1) * 111))
        rows = pa.table({"id": ids, "x": pa.array([number / ROWS for number in ids], pa.float32())})
        pq.write_table(rows, tmp_path / f"{part}.parquet", row_group_size=10)

    def train(callbacks: list[Any], ckpt_path: Path | None = None) -> None:
        data = fp.TableDataModule(train=str(tmp_path / "*.parquet"), batch_size=BATCH // before)
        try:
            trainer = make(tmp_path / "run", callbacks=callbacks, max_epochs=2)
            trainer.fit(Notes(tmp_path), data, ckpt_path=ckpt_path)
        except KeyboardInterrupt:
            pass

    def seen(epoch: int) -> list[int]:
        return sorted(int(line) for file in tmp_path.glob(f"{epoch}-*") for line in file.read_text().splitlines())

    ranks.run(lambda: train([Cut()]), before)
    assert len(seen(0)) == BATCH * (CUT_AT + 1)
    ranks.run(lambda: train([], tmp_path / "run" / "cut.ckpt"), after)
    assert seen(0) == list(range(ROWS))
    assert seen(1) == list(range(ROWS))
