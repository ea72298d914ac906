"""The trainer with several ranks: one writes, all see the same, and none hangs."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from models import ranks
from models.small import Classifier, dataset
from torch.utils.data import DataLoader, IterableDataset

import footplate as fp
from footplate import checkpoint
from footplate.distributed.world import World

from .common import Plain, equal, loader, make, same, seeded, weights


def rank() -> int:
    return int(os.environ["RANK"])


# Ends


class Ends(fp.Callback):
    """Sets `should_stop` on one rank, or advances rank 0's clock past the time limit."""

    def __init__(self, who: int, at: int) -> None:
        self.who, self.at = who, at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == self.who and trainer.progress.batches == self.at:
            trainer.should_stop = True


def test_should_stop_on_one_rank_stops_all_at_the_same_step(tmp_path):
    def run():
        trainer = make(tmp_path, max_epochs=100, callbacks=Ends(1, 5))
        trainer.fit(seeded(), loader())
        return trainer.global_step, trainer.should_stop

    first, second = ranks.run(run, 2)
    assert first == second
    assert 5 <= first[0] < 100
    assert first[1]


def test_time_is_that_of_rank_0(tmp_path):
    def run():
        trainer = make(tmp_path, max_epochs=-1, max_time=timedelta(seconds=1))
        trainer.fit(seeded(), loader())
        return trainer.global_step

    first, second = ranks.run(run, 2)
    assert first == second


def test_saving_by_time_happens_on_all_ranks_at_once(tmp_path):
    def run():
        clock, uptime_s = time.monotonic, 1000.0 * rank()  # ranks on several hosts: each has been up for its own time
        time.monotonic = lambda: clock() + uptime_s
        saver = fp.ModelCheckpoint(train_time_interval=timedelta(milliseconds=200), save_top_k=-1)
        trainer = make(tmp_path, max_epochs=-1, max_time=timedelta(seconds=2), callbacks=saver)
        trainer.fit(seeded(), loader())
        return len(saver.best_k_models)

    first, second = ranks.run(run, 2)
    assert first == second > 1


def test_early_stopping_comes_to_one_conclusion(tmp_path):
    def run():
        stopper = fp.EarlyStopping("val_loss", min_delta=10.0, patience=2)
        trainer = make(tmp_path, max_epochs=50, callbacks=stopper)
        trainer.fit(seeded(), loader(), loader(33))
        return trainer.current_epoch, stopper.best_score

    first, second = ranks.run(run, 2)
    assert first == second
    assert first[0] == 3


def test_a_scheduler_that_watches_a_step_value_is_the_same_everywhere(tmp_path):
    class Plateau(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
            config = {"scheduler": scheduler, "monitor": "train_loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    def run():
        model, trainer = seeded(Plateau), make(tmp_path, log_every_n_steps=1)
        trainer.fit(model, loader())
        return trainer.optimizers[0].param_groups[0]["lr"], weights(model)

    first, second = ranks.run(run, 2)
    assert first[0] == second[0] < 0.1
    equal(first[1], second[1])


class SignalsInValidation(Classifier):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == 1 and not self.trainer.sanity_checking:
            os.kill(os.getpid(), 15)
        (self.trainer.run_dir / f"validated-{self.global_rank}").write_text(str(batch_idx + 1))
        time.sleep(0.02)


@pytest.mark.parametrize("even", [True, False])
def test_a_signal_inside_validation_ends_all_ranks_and_saves(even, tmp_path):
    def run():
        data = loader(1600, 8, shuffle=False) if even else DataLoader(Stream([40, 57], known=False), 8)
        make(tmp_path, max_epochs=4).fit(SignalsInValidation(), loader(), data)

    with ranks.start(run, 2) as started:
        assert started.exit_codes() == [143, 143]
    batches = [int((tmp_path / f"validated-{rank}").read_text()) for rank in range(2)]
    if even:
        assert batches[0] == batches[1] < 100, "validation was gone through to its end"
    else:
        assert batches == [5, 8], "ranks with unequal numbers of batches end after them"
    assert checkpoint.newest([tmp_path / "checkpoints"]) is not None


def test_an_interrupt_to_one_rank_ends_all_after_the_same_step(tmp_path):
    class Interrupts(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_rank == 0 and trainer.progress.batches == 3:
                os.kill(os.getpid(), 2)

    def run():
        trainer = make(tmp_path, max_epochs=100, callbacks=Interrupts())
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(seeded(), loader())
        return trainer.global_step

    first, second = ranks.run(run, 2)
    assert first == second < 100


def test_a_signal_in_a_batch_of_which_one_rank_has_no_rows_ends_all_and_saves(tmp_path):
    class SignalsInTheLastBatch(Plain):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if batch_idx == 2 and not self.trainer.sanity_checking:
                os.kill(os.getpid(), 15)

    def run():
        make(tmp_path, max_epochs=4).fit(seeded(SignalsInTheLastBatch), loader(), loader(33, 8, shuffle=False))

    with ranks.start(run, 2) as started:
        assert started.exit_codes(60) == [143, 143]
    assert checkpoint.newest([tmp_path / "checkpoints"]) is not None


def test_what_has_interrupted_one_run_does_not_end_the_next(tmp_path):
    class Interrupts(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            os.kill(os.getpid(), 2)

    def run():
        model, trainer = seeded(), make(tmp_path, callbacks=Interrupts())
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(model, loader())
        return len(trainer.validate(model, DataLoader(Stream([40, 57], known=False), 8), verbose=False))

    assert ranks.run(run, 2) == [1, 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_is_killed_the_others_raise_at_once(victim, tmp_path):
    class Dies(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_rank == victim and trainer.progress.batches == 3:
                os.kill(os.getpid(), 9)

    def run():
        make(tmp_path, max_epochs=1000, callbacks=Dies()).fit(seeded(), loader())

    with ranks.start(run, 2) as started:
        began = time.monotonic()
        codes = started.exit_codes()
        assert time.monotonic() - began < 100
    assert codes[victim] == -9
    assert codes[1 - victim] == 1


SCRIPT = """
    import os, sys
    sys.path.insert(0, {tests!r})
    from models.small import Classifier, loader
    import footplate as fp

    class Slow(fp.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            import time; time.sleep(0.02)
            if trainer.progress.batches == 10 and trainer.global_rank == 1:
                open(sys.argv[1] + "/pid", "w").write(str(os.getpid()))

    trainer = fp.Trainer(accelerator="cpu", default_root_dir=sys.argv[1], logger=False, max_epochs=1000, callbacks=Slow())
    trainer.fit(Classifier(), loader())
"""


@pytest.mark.slow
def test_torchrun_starts_it_and_a_signal_to_one_worker_saves_and_ends_all(tmp_path):
    script, root = tmp_path / "train.py", tmp_path / "run"
    script.write_text(textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parents[1]))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, root]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 120
        while not (root / "pid").exists() or not (root / "pid").read_text():
            assert time.monotonic() < end and process.poll() is None  # noqa: PT018
            time.sleep(0.1)
        os.kill(int((root / "pid").read_text()), 15)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert said.count("SIGTERM after step") == 1
    assert "exitcode  : 143" in said
    assert checkpoint.newest([root / "checkpoints"]) is not None


# Loaders


class Stream(IterableDataset):
    """A data set with a given number of rows on each rank."""

    def __init__(self, rows: list[int], known: bool) -> None:
        self.rows = rows
        if known:
            self.__class__ = KnownStream

    def __iter__(self):
        x, y = dataset(100).tensors
        return iter(zip(x[: self.rows[rank()]], y, strict=False))


class KnownStream(Stream):
    def __len__(self) -> int:
        return self.rows[rank()]


@pytest.mark.parametrize("known", [True, False])
def test_ranks_whose_loaders_have_different_lengths_end_their_epochs_together(known, tmp_path, caplog):
    def run():
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("footplate").addHandler(handler)
        epochs = []

        class Counts(Plain):
            def on_train_epoch_end(self):
                epochs.append(self.global_step)

        model, trainer = seeded(Counts), make(tmp_path, max_epochs=2)
        trainer.fit(model, DataLoader(Stream([40, 57], known), 8))
        return epochs, weights(model), [record for record in records if "left over" in record]

    first, second = ranks.run(run, 2)
    assert first[0] == second[0] == [5, 10]
    equal(first[1], second[1])
    assert second[2] == []
    assert first[2] and "rank 1: 3 batches" in first[2][0] if known else "rank 1: at least 1 batch" in first[2][0]


def test_a_loader_of_a_table_gives_each_row_once_and_learns_what_one_process_does(tmp_path):
    import pyarrow as pa

    x, y = dataset(50).tensors
    pq.write_table(pa.table({**{f"x{i}": x[:, i].numpy() for i in range(8)}, "y": y.numpy()}), tmp_path / "t.parquet")

    class OfTable(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step((torch.stack([batch[f"x{i}"] for i in range(8)], 1), batch["y"]), batch_idx)

    def run(root, batch_size):
        model = seeded(OfTable)
        make(root).fit(model, fp.Loader(fp.Table(str(tmp_path / "t.parquet")), batch_size, shuffle=True, seed=1))
        return weights(model)

    alone = run(tmp_path / "alone", 16)
    first, second = ranks.run(lambda: run(tmp_path / "two", 8), 2)
    same(alone, first)
    equal(first, second)


# Resuming on another number of ranks


class Stops(fp.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.progress.batches == 6:  # of 7 an epoch; inside an accumulation window
            trainer.save_checkpoint(trainer.run_dir / "cut.ckpt")
            raise KeyboardInterrupt


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_a_run_goes_on_in_mid_window_with_another_number_of_ranks(before, after, tmp_path):
    settings: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 4}

    def run(root: Path, batch_size: int, cut: bool, ckpt_path: Path | None = None):
        model, trainer = seeded(), make(root, **settings, callbacks=[Stops()] if cut else [])
        try:
            trainer.fit(model, loader(100, batch_size), loader(33), ckpt_path=ckpt_path)
        except KeyboardInterrupt:
            return None
        return weights(model), float(trainer.callback_metrics["train_loss_epoch"]), trainer.global_step

    whole = run(tmp_path / "whole", 16, cut=False)
    ranks.run(lambda: run(tmp_path / "cut", 16 // before, cut=True), before)
    of_ranks = ranks.run(lambda: run(tmp_path / "rest", 16 // before, False, tmp_path / "cut" / "cut.ckpt"), after)
    for result in of_ranks:
        same(whole[0], result[0])
        assert result[1] == pytest.approx(whole[1], rel=1e-4)
        assert result[2] == whole[2]


def test_a_running_mean_keeps_its_total_on_another_number_of_ranks(tmp_path):
    def run(ckpt_path: Path | None = None):
        trainer = make(tmp_path, max_epochs=1, callbacks=[] if ckpt_path else [Stops()])
        try:
            trainer.fit(seeded(), loader(100, 8), ckpt_path=ckpt_path)
        except KeyboardInterrupt:
            return 0.0
        return float(trainer.callback_metrics["train_loss_epoch"])

    def whole():
        trainer = make(tmp_path, max_epochs=1)
        trainer.fit(seeded(), loader(100, 8))
        return float(trainer.callback_metrics["train_loss_epoch"])

    expected = ranks.run(whole, 2)
    ranks.run(run, 2)
    assert run(tmp_path / "cut.ckpt") == pytest.approx(expected[0], rel=1e-5)


# Prediction


def predicted(root: Path, rows: int) -> list[float]:
    table = make(root).predict(seeded(), loader(rows, 4, shuffle=False), output=root / "out")
    return [row["first"] for row in table.to_arrow().to_pylist()] if hasattr(table, "to_arrow") else []


@pytest.mark.parametrize("rows", [37, 1])
def test_each_rank_writes_predictions_of_its_own_rows(rows, tmp_path):
    ranks.run(lambda: predicted(tmp_path, rows), 2)
    predictions = sorted(pq.read_table(tmp_path / "out").column("first").to_pylist())
    assert predictions == sorted(dataset(rows).tensors[0][:, 0].tolist())
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["part-000-00000.parquet", "part-001-00000.parquet"][: min(rows, 2)] or rows == 1
    assert not list(tmp_path.glob(".tmp-*"))


# Who does what


class Helpers(Plain):
    """Uses the trainer's helpers that modules need with several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def prepare_data(self) -> None:
        with (Path(self.trainer.default_root_dir).parent / "prepared").open("a") as file:
            file.write(f"{self.global_rank} ")

    def on_train_start(self) -> None:
        trainer = self.trainer
        trainer.strategy.barrier()
        self.logger.experiment.add_scalar("nothing", 1.0)
        self.logger.log_metrics({"nothing": 1.0}, 0, 0)
        gathered = self.all_gather({"rank": torch.tensor([float(trainer.global_rank)]), "number": trainer.global_rank})
        self.seen = {
            "zero": trainer.is_global_zero,
            "place": (trainer.global_rank, trainer.local_rank, trainer.world_size, trainer.num_nodes),
            "gathered": (gathered["rank"].tolist(), gathered["number"].tolist()),
            "broadcast": trainer.strategy.broadcast(f"of {trainer.global_rank}"),
            "any": trainer.strategy.reduce_boolean_decision(trainer.is_global_zero, all=False),
            "all": trainer.strategy.reduce_boolean_decision(trainer.is_global_zero),
            "mean": float(trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)))),
            "seed": trainer.seed,
            "run_dir": str(trainer.run_dir),
            "bars": sum(isinstance(callback, fp.ProgressBar) for callback in trainer.callbacks),
        }
        self.print("printed once")


class Rows(fp.Logger):
    """Writes its input, with its process id, to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def experiment(self) -> Any:
        return self

    def add_scalar(self, name: str, value: float) -> None:
        """Record a value."""

    def log_metrics(self, metrics, step, epoch):
        with self.path.open("a") as file:
            file.write(f"{rank()}\n")


def test_rank_0_writes_and_modules_find_their_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run():
        model = seeded(Helpers)
        trainer = fp.Trainer(accelerator="cpu", max_epochs=2, logger=Rows(tmp_path / "rows"), log_every_n_steps=1)
        trainer.fit(model, loader())
        return model.seen

    first, second = ranks.run(run, 2)
    assert (first["zero"], second["zero"]) == (True, False)
    assert (first["place"], second["place"]) == ((0, 0, 2, 1), (1, 1, 2, 1))
    assert first["gathered"] == second["gathered"] == ([[0.0], [1.0]], [0, 1])
    assert first["broadcast"] == second["broadcast"] == "of 0"
    assert (first["any"], first["all"], first["mean"]) == (True, False, 0.5)
    assert (first["seed"], first["run_dir"]) == (second["seed"], second["run_dir"])
    assert (first["bars"], second["bars"]) == (1, 0)
    assert set((tmp_path / "rows").read_text().split()) == {"0"}
    assert (tmp_path / "runs" / "prepared").read_text() == "0 "
    assert len(list((tmp_path / "runs").iterdir())) == 2  # one run directory, and the file of prepare_data


def own_group(root: Path) -> bool:
    dist.init_process_group("gloo")
    mine = dist.group.WORLD
    make(root).fit(seeded(), loader())
    make(root).validate(seeded(), loader(), verbose=False)
    return dist.group.WORLD is mine


def test_a_process_group_of_the_users_own_is_used_and_left_alone(tmp_path):
    assert ranks.run(lambda: own_group(tmp_path), 2) == [True, True]


def test_every_spelling_of_devices_trains_together(tmp_path):
    def run():
        positions = []
        for devices in (1, 2, "auto", "2"):
            trainer = make(tmp_path, devices=devices, max_epochs=1)
            trainer.fit(seeded(), loader())
            positions.append((trainer.world_size, trainer.global_step))
        return positions

    assert ranks.run(run, 2) == [[(2, 4)] * 4] * 2


# Mistakes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "dpp"}, 'Did you mean "ddp"'),
        ({"strategy": "ddp_spawn"}, '"ddp" does the same'),
        ({"strategy": "deepspeed_stage_3"}, '"fsdp" shards'),
        ({"strategy": 3}, "expected a name"),
        ({"sync_batchnorm": "yes"}, "expected True or False"),
        ({"devices": 2, "min_devices": 3}, "min_devices=3"),
        ({"devices": 2, "heartbeat_timeout": 0}, "heartbeat_timeout=0"),
        ({"devices": 2, "max_restarts": -1}, "max_restarts=-1"),
        ({"devices": 2, "max_host_restarts": -1}, "max_host_restarts=-1"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(settings, said, tmp_path):
    with pytest.raises(fp.FootplateError, match=re.escape(said)):
        make(tmp_path, **settings)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"WORLD_SIZE": "two"}, "expected a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "below the size"),
        ({"WORLD_SIZE": "4", "NODE_RANK": "1", "LOCAL_RANK": "1"}, "set LOCAL_WORLD_SIZE to the number"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "RANK is not"),
    ],
)
def test_half_of_an_environment_is_refused(environ, said, tmp_path, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fp.FootplateError, match=said):
        make(tmp_path)


@pytest.mark.parametrize(("node_rank", "rank"), [("0", 1), ("1", 3)])
def test_the_rank_follows_from_the_node_and_the_local_rank(node_rank, rank, tmp_path, monkeypatch):
    from lightning.pytorch.utilities import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 0)
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": node_rank, "LOCAL_RANK": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    trainer = make(tmp_path)
    assert trainer.world == World(rank, 4, 1, 2, launched=True)
    assert rank_zero_only.rank == rank


def test_on_the_first_node_the_local_rank_is_the_rank():
    assert World.from_environ({"WORLD_SIZE": "4", "NODE_RANK": "0", "LOCAL_RANK": "1"}).rank == 1


def test_sync_batchnorm_is_refused_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(fp.FootplateError, match="only runs on GPUs"):
        make(tmp_path, sync_batchnorm=True)
