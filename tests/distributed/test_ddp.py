"""DDP: several ranks with a shard of each batch get the result of one process with the whole batch."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import footplate as fp
from footplate.distributed.ddp import DDP
from footplate.distributed.group import join
from footplate.distributed.world import World

from .common import Plain, equal, loader, make, same, seeded, weights


class BatchNorm(Plain):
    """A module with batch norm. Its running statistics are those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


class Manual(Plain):
    """Two optimizers, two backward passes. The second optimizer sees only every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5)
        first.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(F.cross_entropy(self.other(batch[0]), batch[1]))
            second.step()
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), lr=1e-2), torch.optim.SGD(self.other.parameters(), lr=0.1)]


class Closure(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Unfreezes(Plain):
    """Trains its first layer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


class UnfreezesInMidEpoch(Plain):
    """Trains its first layer from the third batch of the first epoch on, and its last layer until then."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.global_step > 1)
        self.net[2].requires_grad_(self.global_step < 2)


class Skips(Plain):
    """Rank 1 skips its third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 2 else loss


class SkipTogether(Plain):
    """All ranks skip the third and fourth batch of each epoch. Momentum and decay would act on gradients of zero."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (2, 3) else loss


class SkipTogetherInAClosure(SkipTogether):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)


class SkipInTurn(Plain):
    """Each rank skips a different batch of the first window. The window is a step for both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == self.global_rank else loss


class SavesInAWindow(fp.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(trainer.checkpoint_dir / "in-a-window.ckpt")


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class LateStarter(Plain):
    """Manual optimisation: only on rank 0, the last layer gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.idle = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        hidden = self.net[:2](batch[0])
        loss = self.net[2](hidden).square().mean() if self.global_rank == 0 else hidden.square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def train(root, batch_size: int, module: type, rows: int, **settings: Any) -> dict[str, Any]:
    model, trainer = seeded(module), make(root, **settings)
    trainer.fit(model, loader(rows, batch_size), loader(33, batch_size, shuffle=False))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights(model), "metrics": metrics, "step": trainer.global_step}


CASES: dict[str, tuple[type, int, dict[str, Any]]] = {
    "even batches": (Plain, 48, {}),
    "an uneven tail": (Plain, 51, {}),
    "a tail of fewer rows than ranks": (Plain, 49, {}),
    "accumulation": (Plain, 49, {"accumulate_grad_batches": 3}),
    "clipping": (Plain, 51, {"gradient_clip_val": 0.1}),
    "two optimizers by hand": (Manual, 51, {}),
    "a closure": (Closure, 48, {"max_epochs": 1}),
    "batches that all ranks skip": (SkipTogether, 95, {}),
    "a window that all ranks skip": (SkipTogether, 95, {"accumulate_grad_batches": 2}),
    "half a window that all ranks skip": (SkipTogether, 95, {"accumulate_grad_batches": 3}),
    "batches that all ranks skip, clipped": (SkipTogether, 95, {"gradient_clip_val": 0.1}),
    "batches that all ranks skip in a closure": (SkipTogetherInAClosure, 95, {}),
    "unfreezing": (Unfreezes, 48, {}),
    "unfreezing in mid-epoch": (UnfreezesInMidEpoch, 48, {"max_epochs": 1}),
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks has learned in each case. The ranks start once."""
    root = tmp_path_factory.mktemp("two")

    def train_each() -> dict[str, Any]:
        return {
            name: train(root / name, 8, module, rows, **settings) for name, (module, rows, settings) in CASES.items()
        }

    return ranks.run(train_each, 2, timeout_s=600.0)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_process_with_the_global_batch_learns(name, tmp_path, learned):
    module, rows, settings = CASES[name]
    alone = train(tmp_path / "alone", 16, module, rows, **settings)
    first, second = (of_rank[name] for of_rank in learned)
    same(alone["weights"], first["weights"])
    equal(first["weights"], second["weights"])
    assert first["step"] == second["step"] == alone["step"]
    for metric in ("val_loss", "train_loss_epoch"):
        assert first["metrics"][metric] == second["metrics"][metric]
        assert first["metrics"][metric] == pytest.approx(alone["metrics"][metric], rel=1e-4)


class Searches(Plain):
    """Uses an optimizer that evaluates the loss a number of times that depends on the loss."""

    search: str | None = "strong_wolfe"

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(
            self.parameters(), lr=0.5, max_iter=20, tolerance_change=1e-3, line_search_fn=self.search
        )


class Settles(Searches):
    search = None


class SearchesByHand(Searches):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def test_an_optimizer_that_decides_by_the_loss_decides_the_same_on_all_ranks(tmp_path):
    def run() -> list[dict[str, torch.Tensor]]:
        models = [seeded(module) for module in (Searches, Settles, SearchesByHand)]
        for model in models:
            make(tmp_path, max_epochs=1, enable_checkpointing=False).fit(model, loader(33, 4))
        return [weights(model) for model in models]

    for first, second in zip(*ranks.run(run, 2), strict=True):
        equal(first, second)


def test_three_ranks_do_too(tmp_path):
    alone = train(tmp_path / "alone", 12, Plain, 50)
    of_ranks = ranks.run(lambda: train(tmp_path / "three", 4, Plain, 50), 3)
    same(alone["weights"], of_ranks[2]["weights"])
    assert of_ranks[0]["metrics"] | {"train_loss": 0, "train_loss_step": 0} == of_ranks[2]["metrics"] | {
        "train_loss": 0,
        "train_loss_step": 0,
    }


def test_running_statistics_are_those_of_rank_0_everywhere(tmp_path):
    first, second = ranks.run(lambda: train(tmp_path, 8, BatchNorm, 52), 2)
    assert first["metrics"]["val_loss"] == second["metrics"]["val_loss"]
    for name, value in first["weights"].items():
        if "running" not in name:
            assert torch.equal(value, second["weights"][name]), name


class Deep(Plain):
    """Four layers of 1 MB each. The output layer shares the first layer's weights, and is declared first."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(512, 512, bias=False)
        self.net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        self.out.weight = self.net[0].weight


def bucket_sizes() -> list[list[int]]:
    """Number of elements of each bucket of each step, in the order of sending."""
    strategy, module, sizes = DDP(), seeded(Deep), []
    join(World.from_environ(), "gloo", torch.device("cpu"))
    strategy.prepare(module)
    module.training_step = lambda batch: module.out(module.net(batch)).square().mean()
    step = strategy.training_step(module)
    assert strategy._wrapped is not None

    def send(group, bucket):  # DDP refuses annotations that are strings
        sizes[-1].append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    strategy._wrapped.register_comm_hook(None, send)
    for _ in range(3):
        sizes.append([])
        strategy.begin_batch(True)
        strategy.marked(step(torch.ones(2, 512)), counts=True, begins_window=True).backward()
    return sizes


def test_the_first_step_has_the_buckets_of_all_steps_and_the_first_of_them_is_small_and_leaves_early():
    layer = 512 * 512
    for sizes in ranks.run(bucket_sizes, 2):
        assert sizes == [[1 + layer, 3 * layer]] * 3  # and the mark of `_Step`


def different_parameters(root) -> dict[str, torch.Tensor]:
    import os

    torch.manual_seed(int(os.environ["RANK"]))
    model = Plain()
    make(root).fit(model, loader())
    return weights(model)


def test_parameters_begin_as_those_of_rank_0(tmp_path):
    first, second = ranks.run(lambda: different_parameters(tmp_path), 2)
    equal(first, second)


COMPILERS = """
import sys
import footplate as fp
from models.small import Classifier, loader

for compile in False, {"backend": "eager"}:
    trainer = fp.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=sys.argv[1], compile=compile)
    trainer.fit(Classifier(), loader())
    print(trainer.world_size, "torch._dynamo" in sys.modules)
"""


def test_ranks_import_torchs_compiler_when_they_compile(tmp_path):
    (tmp_path / "train.py").write_text(COMPILERS)
    program = [sys.executable, "-m", "footplate", "run", "--np", "2", tmp_path / "train.py", tmp_path / "runs"]
    ended = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert ended.returncode == 0, ended.stderr
    for rank in 0, 1:
        assert re.findall(rf"\[rank {rank}\] (2 \w+)", ended.stdout) == ["2 False", "2 True"]


def test_a_batch_that_one_rank_skips_stops_nobody(tmp_path):
    first, second = ranks.run(lambda: train(tmp_path, 8, Skips, 48), 2)
    equal(first["weights"], second["weights"])
    assert first["step"] == second["step"] == 6


def test_a_window_counts_that_any_rank_has_not_skipped_whole(tmp_path):
    first, second = ranks.run(lambda: train(tmp_path, 8, SkipInTurn, 48, accumulate_grad_batches=2, max_epochs=1), 2)
    equal(first["weights"], second["weights"])
    assert first["step"] == second["step"] == 2


class SkipsTheEnd(Plain):
    """Only the first batch of rank 0 counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 and self.global_rank == 0 else None


def test_a_run_that_resumes_in_a_window_knows_what_was_counted(tmp_path):
    def run() -> list[dict[str, torch.Tensor]]:
        states = []
        for path in (None, tmp_path / "checkpoints" / "in-a-window.ckpt"):
            model = seeded(SkipsTheEnd)
            trainer = make(tmp_path, accumulate_grad_batches=3, max_epochs=1, callbacks=[SavesInAWindow()])
            trainer.fit(model, loader(48), ckpt_path=path)
            assert trainer.global_step == 1
            states.append(weights(model))
        return states

    for whole, resumed in ranks.run(run, 2):
        equal(whole, resumed)


def failure(root, **settings: Any) -> str:
    try:
        train(root, 8, Unused, 48, **settings)
    except fp.FootplateError as error:
        return str(error)
    return "none"


def test_parameters_that_nothing_depends_on_are_explained_or_looked_for(tmp_path):
    for said in ranks.run(lambda: failure(tmp_path / "a"), 2):
        assert "ddp_find_unused_parameters_true" in said
    of_ranks = ranks.run(lambda: failure(tmp_path / "b", strategy="ddp_find_unused_parameters_true"), 2)
    assert of_ranks == ["none", "none"]


def test_by_hand_a_gradient_that_some_ranks_lack_counts_as_zero_there(tmp_path):
    def run():
        model = seeded(LateStarter)
        before = weights(model)
        make(tmp_path).fit(model, loader(48))
        return before, weights(model)

    (before, first), (_, second) = ranks.run(run, 2)
    equal(first, second)
    assert not torch.equal(before["net.2.weight"], first["net.2.weight"])
    assert torch.equal(before["idle.weight"], first["idle.weight"])  # nobody had a gradient for it


def lonely_backward(root) -> bool:
    model, trainer = seeded(), make(root)
    trainer.fit(model, loader())
    if trainer.global_rank == 0:
        thread = threading.Thread(target=lambda: model.training_step(next(iter(loader())), 0).backward(), daemon=True)
        thread.start()
        thread.join(60)
        return not thread.is_alive()
    return True


def test_after_training_a_backward_pass_is_a_ranks_own_again(tmp_path):
    assert ranks.run(lambda: lonely_backward(tmp_path), 2) == [True, True]


def test_a_share_that_is_too_small_for_batch_norm_is_explained(tmp_path):
    def run():
        with pytest.raises(fp.FootplateError, match="drop_last=True"):
            train(tmp_path, 8, BatchNorm, 50)

    ranks.run(run, 2)
