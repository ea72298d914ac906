"""Two ranks that are killed and resumed end bit for bit like an uninterrupted run."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ranks
from models.small import Classifier, dataset
from torch.utils.data import DataLoader
from training.test_resume import TwoOptimizers

import footplate as fp
from footplate import checkpoint

CASES: dict[str, dict[str, Any]] = {
    "dropout and shuffling": {},
    "accumulation, saved inside a window": {
        "trainer": {"accumulate_grad_batches": 4, "val_check_interval": 5},
        "every": {"every_n_epochs": 1},
    },
    "validation in mid-epoch": {"trainer": {"val_check_interval": 3}},
    "two optimizers by hand": {"module": TwoOptimizers},
    "sharded, saved inside a window": {
        "trainer": {"accumulate_grad_batches": 4, "val_check_interval": 5, "strategy": "fsdp"},
        "every": {"every_n_epochs": 1},
    },
}


class Unfreezes(Classifier):
    """Trains the first layer from the sixth batch on. The last layer is frozen for five batches around the interruption."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batches = self.trainer.progress.batches
        layers = [layer for layer in self.net if isinstance(layer, torch.nn.Linear)]
        layers[0].requires_grad_(batches >= 5)
        layers[-1].requires_grad_(not 10 <= batches < 15)


class Watch(fp.Callback):
    """Records each batch's loss in a file of its rank. May end the run at a batch, once a checkpoint is whole."""

    def __init__(self, root: Path, end_at: int | None, number: int, who: int) -> None:
        self.root, self.end_at, self.number, self.who = root, end_at, number, who

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with (self.root / f"losses-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.progress.batches} {float(outputs).hex()}\n")
        if trainer.progress.batches == self.end_at and self.who in (-1, trainer.global_rank):
            deadline = time.monotonic() + 120
            while self.number == signal.SIGKILL and not self._all_may_die(trainer):
                assert time.monotonic() < deadline, "a checkpoint isn't whole, or a rank isn't here"
                time.sleep(0.01)
            os.kill(os.getpid(), self.number)

    def _all_may_die(self, trainer: fp.Trainer) -> bool:
        """Whether a checkpoint is whole and each rank is here. A rank that is still in the step fails when a peer dies."""
        (self.root / f"here-{trainer.global_rank}").touch()
        here = len(list(self.root.glob("here-*"))) == trainer.world_size
        return here and checkpoint.newest([self.root / "checkpoints"]) is not None


def train(
    root: Path, case: dict[str, Any], end_at: int | None = None, number: int = 0, who: int = -1, devices: int = 2
) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    model = case.get("module", Classifier)()
    trainer = fp.Trainer(
        accelerator="cpu", devices=devices, logger=False, enable_progress_bar=False, enable_model_summary=False, seed=1,
        max_epochs=3, default_root_dir=root, log_every_n_steps=1,
        callbacks=[Watch(root, end_at, number, who), fp.ModelCheckpoint(**case.get("every", {"every_n_train_steps": 2}))],
        **case.get("trainer", {}),
    )  # fmt: skip
    trainer.fit(model, DataLoader(dataset(), 5, shuffle=True), DataLoader(dataset(33), 8), ckpt_path="last")
    weights = trainer.parallel.whole(dict(model.state_dict()))
    return {"weights": weights, "metrics": dict(trainer.callback_metrics)}


def losses(root: Path, rank: int) -> dict[str, set[str]]:
    """Every loss of a batch over all attempts."""
    by_batch: dict[str, set[str]] = {}
    for line in (root / f"losses-{rank}").read_text().splitlines():
        batch, loss = line.split()
        by_batch.setdefault(batch, set()).add(loss)
    return by_batch


ENDS = {"SIGTERM to rank 1": (signal.SIGTERM, 1, [143, 143]), "kill -9 of both": (signal.SIGKILL, -1, [-9, -9])}
# Each case with one end at least, and each end with a checkpoint between steps and with one inside a window.
CUTS = [
    ("dropout and shuffling", "SIGTERM to rank 1"),
    ("dropout and shuffling", "kill -9 of both"),
    ("accumulation, saved inside a window", "SIGTERM to rank 1"),
    ("accumulation, saved inside a window", "kill -9 of both"),
    ("validation in mid-epoch", "kill -9 of both"),
    ("two optimizers by hand", "SIGTERM to rank 1"),
    ("sharded, saved inside a window", "kill -9 of both"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A function that returns the directory and the results of a case's uninterrupted run. Each case runs once."""

    @functools.cache
    def run(name):
        root = tmp_path_factory.mktemp("whole")
        return root, ranks.run(lambda: train(root, CASES[name]), 2)

    return run


@pytest.mark.parametrize(("name", "end"), CUTS)
def test_two_ranks_that_were_cut_off_are_bit_for_bit_the_two_that_were_not(name, end, uninterrupted, tmp_path):
    case, (number, who, codes) = CASES[name], ENDS[end]
    root, whole = uninterrupted(name)

    with ranks.start(lambda: train(tmp_path / "cut", case, 18, number, who), 2) as cut:
        assert cut.exit_codes() == codes
    rest = ranks.run(lambda: train(tmp_path / "cut", case), 2)

    for rank in (0, 1):
        seen = losses(tmp_path / "cut", rank)
        assert seen == losses(root, rank)
        for key, value in whole[rank]["weights"].items():
            assert torch.equal(value, rest[rank]["weights"][key]), key
    assert rest[0]["metrics"] == whole[0]["metrics"]
    attempts = (tmp_path / "cut" / "losses-0").read_text().splitlines()
    assert len(attempts) < 36 + 18, "it began anew instead of continuing"


# Of three ranks' gradients, the order of addition shows in the sum.
OF_THREE: dict[str, dict[str, Any]] = {
    "accumulation, saved inside a window": {"trainer": {"accumulate_grad_batches": 4, "val_check_interval": 3}},
    "looking for unused parameters": {"trainer": {"strategy": "ddp_find_unused_parameters_true"}},
    "freezing in mid-epoch": {"module": Unfreezes},
}


@pytest.mark.parametrize("name", OF_THREE)
def test_three_ranks_that_were_killed_are_bit_for_bit_the_three_that_were_not(name, tmp_path):
    case = OF_THREE[name]
    whole = ranks.run(lambda: train(tmp_path / "whole", case, devices=3), 3)
    with ranks.start(lambda: train(tmp_path / "cut", case, 13, signal.SIGKILL, devices=3), 3) as cut:
        assert cut.exit_codes() == [-9, -9, -9]
    rest = ranks.run(lambda: train(tmp_path / "cut", case, devices=3), 3)

    for rank in range(3):
        assert losses(tmp_path / "cut", rank) == losses(tmp_path / "whole", rank)
        for key, value in whole[0]["weights"].items():
            assert torch.equal(value, rest[rank]["weights"][key]), key
    attempts = (tmp_path / "cut" / "losses-0").read_text().splitlines()
    assert len(attempts) < 13 + len(losses(tmp_path / "whole", 0)), "it began anew instead of continuing"


def test_a_signal_to_one_rank_ends_all_within_seconds(tmp_path):
    with ranks.start(lambda: train(tmp_path, {}, 10, signal.SIGTERM, 1), 2) as cut:
        began = time.monotonic()
        assert cut.exit_codes() == [143, 143]
        assert time.monotonic() - began < 100
    last = [(tmp_path / f"losses-{rank}").read_text().splitlines()[-1].split()[0] for rank in (0, 1)]
    assert last[0] == last[1], "the ranks stopped at different batches"
