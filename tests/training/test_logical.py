"""Training with logical ranks gives the same bits on any number of processes. Real processes train tiny models."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from models import ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import footplate as fp
from footplate.core.errors import CheckpointError, ConfigError

TOTAL = 8


class Rows(Dataset[Any]):
    """Rows with augmentation that draws from all three global generators."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.inputs = torch.randn(rows, 8, generator=generator)
        self.labels = torch.randint(0, 3, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(8) + 0.01 * np.random.rand() + 0.01 * random.random()
        return self.inputs[index] + noise, self.labels[index]


class Everything(fp.Module):
    """Dropout, batch norm, draws of every kind in steps and hooks, and a schedule by a metric of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor = 1.0 + 0.1 * random.random()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.01 * torch.rand_like(batch[0]), batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        loss = loss * self.factor * (1.0 + 0.1 * np.random.rand())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own_loss", loss, on_step=True)
        self.log("rank", float(self.trainer.global_rank), on_epoch=True, reduce_fx="sum")
        return loss

    def on_after_backward(self) -> None:
        # The gradients of all ranks: the hook finds the same everywhere.
        self.net[0].bias.grad.mul_(0.9)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noise = 0.01 * torch.randn_like(batch[0])
        self.log("val_loss", F.cross_entropy(self.net(batch[0] + noise), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("drawn", random.random())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss_epoch"}}


class Plain(Everything):
    """Without batch norm, so that shares may have one row or none."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()


class Buffers(Plain):
    """Changes buffers in place and by assignment, in training and in validation, and lets the loss depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return F.cross_entropy(self.net(batch[0] - self.mean), batch[1]) * (1.0 + 0.1 * torch.sin(self.seen))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch[0].sum()
        self.log("val_loss", self.seen)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-2)


class OfTable(Plain):
    """Takes the batches of a table."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch["x"], batch["label"]


class Sums(Plain):
    """Sums of losses with their weight. Some shares are skipped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank % 3 == 0:
            return None
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return {"loss_sum": (losses * 0.1).sum(), "weight": len(losses)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Unused(Plain):
    """Logical ranks use different layers; one layer is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        branch = self.trainer.global_rank % 3
        logits = self.net(batch[0])
        # In this step, only one logical rank uses the branch.
        if batch_idx != 2 or self.trainer.global_rank == 4:
            logits = logits + self.branches[branch](batch[0])
        return F.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-2)


class Wide(Plain):
    """Gradients that fill several buckets of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 500), nn.ReLU(), nn.Linear(500, 600), nn.ReLU(), nn.Linear(600, 3))


class Images(Plain):
    """Convolutions whose weights have another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, (2, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)).to(
            memory_format=torch.channels_last
        )

    def forward_of(self, rows: Any) -> Any:
        return self.net(rows.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.forward_of(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.forward_of(batch[0]), batch[1]))

    def on_after_backward(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-2)


class EndsAt(fp.Callback):
    """Kills the processes of some ranks after a number of batches."""

    def __init__(self, batches: int | None = None, processes: tuple[int, ...] = ()) -> None:
        self.batches, self.processes = batches, processes

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.batches == self.batches and int(os.environ["RANK"]) in self.processes:
            os.kill(os.getpid(), signal.SIGKILL)


class Losses(fp.Callback):
    """Keeps the loss of logical rank 0 in each step, on process 0."""

    def __init__(self) -> None:
        self.losses: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs if isinstance(outputs, torch.Tensor) else None if outputs is None else outputs["loss"]
        self.losses.append("none" if loss is None else float(loss).hex())


def trainer_of(root: Path, **settings: Any) -> fp.Trainer:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 2}
    defaults = {"max_epochs": 2, "seed": 1, "logical_ranks": TOTAL, "devices": world, "default_root_dir": root}
    return fp.Trainer(accelerator="cpu", **{**quiet, **defaults, **settings})


def loaders(rows: int, batch_size: int = 2, workers: int = 0) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Rows(rows), batch_size, shuffle=True, num_workers=workers), DataLoader(Rows(37), 2)


def train(
    root: Path, module: type = Everything, data: Any = None, end: Any = (), keep: bool = False, **settings: Any
) -> dict[str, Any]:
    torch.manual_seed(7)
    model = module()
    watched = Losses()
    callbacks = [watched, EndsAt(*end), *settings.pop("callbacks", [])]
    if keep:
        callbacks.append(fp.ModelCheckpoint(every_n_epochs=1))
    else:
        settings["enable_checkpointing"] = False
    trainer = trainer_of(root, callbacks=callbacks, **settings)
    training, validation = data() if data else loaders(115, 3)
    trainer.fit(model, training, validation, ckpt_path="last" if keep else None)
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "losses": watched.losses,
        "steps": trainer.global_step,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, which differ for 0.0 and -0.0."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(result: dict[str, Any], expected: dict[str, Any], losses: bool = True) -> None:
    differing = [
        name for name, value in expected["weights"].items() if as_bytes(value) != as_bytes(result["weights"][name])
    ]
    assert not differing
    for name in ("metrics", "steps", "rates", *(("losses",) if losses else ())):
        assert result[name] == expected[name], name


EVERYTHING = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.4, "val_check_interval": 3, "max_epochs": 3}


def stopping() -> list[Any]:
    return [fp.EarlyStopping(monitor="train_loss_step", patience=5), fp.EarlyStopping(monitor="val_loss", patience=5)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    """The results of an uninterrupted training on one process."""
    root = tmp_path_factory.mktemp("whole")
    return ranks.run(lambda: train(root, callbacks=stopping(), **EVERYTHING), 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4, 5, 8])
def test_any_number_of_processes_gives_the_same_bits(processes, whole, tmp_path):
    results = ranks.run(lambda: train(tmp_path, callbacks=stopping(), **EVERYTHING), processes)
    assert_equal(results[0], whole)
    for result in results[1:]:
        assert_equal(result, whole, losses=False)


def tables(root: Path) -> Any:
    """Loaders of a table that augment each row."""

    def augmented(row: Any, rng: Any) -> Any:
        x = np.array([row[f"x{column}"] for column in range(8)], dtype=np.float32)
        return {"x": x + 0.1 * rng.standard_normal(8).astype(np.float32), "label": np.int64(row["label"])}

    path = root / "rows.parquet"
    if not path.exists():
        drawn = np.random.default_rng(0)
        columns = {f"x{column}": drawn.standard_normal(57) for column in range(8)}
        pq.write_table(pa.table({**columns, "label": drawn.integers(0, 3, 57)}), path, row_group_size=11)
    table = fp.Table(str(path))
    return (
        fp.Loader(table, 2, shuffle=True, transform=augmented),
        fp.Loader(table, 3, transform=augmented),
    )


CASES: dict[str, dict[str, Any]] = {
    "shares of one row or none": {"module": Plain, "data": lambda: loaders(19)},
    "worker processes": {"module": Plain, "data": lambda: loaders(35, workers=1), "max_epochs": 1},
    "sums of losses, skipped shares": {"module": Sums, "accumulate_grad_batches": 2},
    "buffers that steps change": {"module": Buffers},
    "parameters that some ranks don't use": {"module": Unused, "strategy": "ddp_find_unused_parameters_true"},
    "another memory format": {"module": Images, "gradient_clip_val": 0.1},
    "averaged weights and buffers": {"module": Buffers, "callbacks": [fp.EMAWeightAveraging(0.9)]},
    "several buckets, six logical ranks": {"module": Wide, "logical_ranks": 6},
    "bf16-mixed": {"module": Plain, "precision": "bf16-mixed"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_process_and_three_give_the_same_bits(name, tmp_path):
    (alone,) = ranks.run(lambda: train(tmp_path / "alone", **CASES[name]), 1)
    three = ranks.run(lambda: train(tmp_path / "three", **CASES[name]), 3)
    assert_equal(three[0], alone)
    assert set(alone["losses"]) != {"none"}


@pytest.mark.slow
def test_batches_of_a_table(tmp_path):
    def run() -> Any:
        return train(tmp_path / os.environ["WORLD_SIZE"], module=OfTable, data=lambda: tables(tmp_path))

    tables(tmp_path)
    assert_equal(ranks.run(run, 3)[0], ranks.run(run, 1)[0])


@pytest.mark.slow
def test_eight_then_five_then_eight_processes_end_as_an_uninterrupted_run(whole, tmp_path):
    def run(end: Any = ()) -> Any:
        return train(tmp_path, end=end, keep=True, callbacks=stopping(), **EVERYTHING)

    # The checkpoints of the batches 3 and 8 are in mid-epoch, and the first is in mid-window.
    with ranks.start(run, 8, (4, tuple(range(8)))) as eight:
        assert set(eight.exit_codes()) == {-9}
    with ranks.start(run, 5, (9, tuple(range(5)))) as five:
        assert set(five.exit_codes()) == {-9}
    results = ranks.run(run, 8)
    assert_equal(results[0], whole, losses=False)
    assert results[0]["losses"] == whole["losses"][-len(results[0]["losses"]) :]
    assert len(results[0]["losses"]) < len(whole["losses"])


@pytest.mark.slow
def test_an_evaluation_and_predictions_do_not_depend_on_the_number_of_processes(tmp_path):
    class Evaluated(Buffers):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[1]

    def run() -> Any:
        torch.manual_seed(7)
        trainer = trainer_of(tmp_path)
        (results,) = trainer.test(Evaluated(), loaders(19)[1])
        predictions = trainer.predict(Evaluated(), DataLoader(Rows(37), 2))
        return {name: value.hex() for name, value in results.items()}, torch.cat(predictions).tolist()

    ((alone, predictions),) = ranks.run(run, 1)
    three = ranks.run(run, 3)
    assert predictions == Rows(37).labels.tolist()
    assert [results for results, _ in three] == [alone] * 3
    assert sum(len(predictions) for _, predictions in three) == 37


# Refusals


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnStep(Plain):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure)


class ByClosure(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Misses(Plain):
    """Logical rank 5 doesn't use the last layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        layers = self.net[:-1] if self.trainer.global_rank == 5 else self.net
        return F.cross_entropy(layers(batch[0]), batch[1])


class Clamps(Plain):
    """Changes a parameter in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.net[0].bias.clamp_(-1.0, 1.0)
        return loss


class Gathers(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.all_gather(loss.detach())
        return loss


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Rows(30))


def with_layer(layer: nn.Module) -> type:
    class WithLayer(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

    return WithLayer


class Metric(nn.Module):
    """Has what a torchmetrics object has."""

    _update_count, _defaults = 0, {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices": 9}, "logical_ranks=8: the run has 9 processes"),
        ({"strategy": "fsdp"}, 'strategy="fsdp"'),
        ({"strategy": "replicas"}, 'strategy="replicas"'),
        ({"sync_batchnorm": True}, "sync_batchnorm=True"),
        ({"compile": True}, "compile=True"),
        ({"use_distributed_sampler": False}, "use_distributed_sampler=False"),
        ({"logical_ranks": 0}, "logical_ranks=0: expected an integer of at least 1"),
    ],
)
def test_arguments_that_cannot_be_held_are_refused_when_the_trainer_is_made(settings, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        trainer_of(tmp_path, **settings)
    assert words in str(error.value)
    assert "logical_ranks" in str(error.value)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (ByHand, "optimises by hand"),
        (OwnStep, "overrides optimizer_step"),
        (ByClosure, "LBFGS evaluates the loss itself"),
        (with_layer(nn.SyncBatchNorm(4)), "the layer layer (SyncBatchNorm)"),
        (with_layer(nn.Embedding(3, 4, sparse=True)), "gradients are sparse"),
        (with_layer(Metric()), "torchmetrics object"),
        (Clamps, "changed the parameter net.0.bias in place"),
        (Gathers, "all_gather() would give one value for each process"),
        (Misses, "logical rank 5 doesn't depend on the parameter net.4.weight"),
    ],
)
def test_modules_that_cannot_be_held_are_refused(module, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        train(tmp_path, module)
    assert words in str(error.value)
    assert "logical_ranks=8" in str(error.value)


def test_averaging_that_collects_statistics_again_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
        train(tmp_path, callbacks=[fp.StochasticWeightAveraging(1e-2)])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: (DataLoader(Stream(), 2), None), "rows can't be shared out"),
        (lambda: ([torch.ones(2, 8)] * 8, None), "rows can't be shared out"),
        (lambda: ({"one": loaders(60)[0], "other": loaders(60)[0]}, None), "rows can't be shared out"),
        (lambda: (loaders(60)[0], DataLoader(Stream(), 2)), "rows can't be shared out"),
    ],
)
def test_loaders_that_cannot_be_shared_out_are_refused(data, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        train(tmp_path, Plain, data)
    assert words in str(error.value)


def test_a_rank_that_misses_a_parameter_ends_all_processes(tmp_path):
    with ranks.start(lambda: train(tmp_path, Misses), 2) as both:
        assert both.exit_codes(60.0) == [1, 1]


def test_a_lost_process_ends_the_others_in_the_backward_pass(tmp_path):
    with ranks.start(lambda: train(tmp_path, end=(2, (1,))), 3) as three:
        first, killed, last = three.exit_codes(60.0)
    assert killed == -signal.SIGKILL
    assert first == last == 1


@pytest.mark.parametrize(("before", "after"), [(8, 4), (8, None), (None, 8)])
def test_another_number_of_logical_ranks_does_not_continue_a_training(before, after, tmp_path):
    train(tmp_path, Plain, keep=True, max_epochs=1, logical_ranks=before)
    with pytest.raises(CheckpointError) as error:
        train(tmp_path, Plain, keep=True, max_epochs=2, logical_ranks=after)
    assert f"logical_ranks={after}" in str(error.value)
    assert ("without logical_ranks" if before is None else f"with logical_ranks={before}") in str(error.value)


def test_the_number_of_threads_is_that_of_the_checkpoint(tmp_path, monkeypatch):
    threads: list[int] = []

    class Counts(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            threads.append(torch.get_num_threads())
            return super().training_step(batch, batch_idx)

    before = torch.get_num_threads()
    monkeypatch.setattr("footplate.training.logical.usable_cores", lambda: 24.0)
    train(tmp_path, Counts, keep=True, max_epochs=1)
    assert set(threads) == {3}
    assert torch.get_num_threads() == before

    threads.clear()
    monkeypatch.setattr("footplate.training.logical.usable_cores", lambda: 8.0)
    train(tmp_path, Counts, keep=True, max_epochs=2)
    assert set(threads) == {3}


# What users see


def test_ranks_are_logical_ones_for_the_users_code(tmp_path):
    seen: list[tuple[int, int]] = []

    class Sees(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.global_rank, self.trainer.world_size))
            return super().training_step(batch, batch_idx)

    train(tmp_path, Sees, max_steps=1)
    assert seen == [(rank, TOTAL) for rank in range(TOTAL)]


def test_batch_hooks_run_once_for_each_step_and_validation_hooks_for_each_logical_rank(tmp_path):
    calls: list[tuple[str, int, int]] = []

    class Watches(fp.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            calls.append(("start", batch_idx, len(batch[0])))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            calls.append(("end", batch_idx, len(batch[0])))

        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            calls.append(("validated", batch_idx, len(batch[0])))

    train(tmp_path, Plain, callbacks=[Watches()], max_epochs=1, num_sanity_val_steps=0)
    assert [call for call in calls if call[0] == "start"] == [
        ("start", index, 3 if index < 4 else 2) for index in range(5)
    ]
    assert len([call for call in calls if call[0] == "end"]) == 5
    validated = [rows for name, _, rows in calls if name == "validated"]
    assert sum(validated) == 37


def test_predictions_have_every_row_once(tmp_path):
    class Predicts(Plain):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[1]

    trainer = trainer_of(tmp_path)
    predictions = trainer.predict(Predicts(), DataLoader(Rows(37), 2))
    assert torch.equal(torch.cat(predictions), Rows(37).labels)
