"""Steps that return `{"loss_sum": …, "weight": …}`: any split of a batch gives the gradient of the mean over it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import footplate as fp

ROWS, LONGEST, IGNORED = 12, 6, -100


def documents(lengths: list[int]) -> TensorDataset:
    """A row for each length: tokens, then padding, whose labels are ignored."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 11, (len(lengths), LONGEST), generator=generator)
    labels = torch.where(torch.arange(LONGEST) < torch.tensor(lengths)[:, None], tokens.roll(-1, 1), IGNORED)
    return TensorDataset(tokens, labels)


RAGGED = documents([6, 6, 5, 6, 1, 2, 1, 0, 3, 0, 0, 4])


class Tokens(fp.Module):
    """Takes one step of plain SGD with rate 1, so that the change of its weights is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        total = F.cross_entropy(self.net(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return {"loss_sum": total, "weight": (labels != IGNORED).sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Noted(Tokens):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class PythonWeight(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "weight": int(output["weight"])}


class ByClosure(Tokens):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


class SkipsEmpty(Tokens):
    """Returns None for a batch without tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if output["weight"] else None


def fitted(
    root: Path, model: Tokens, batch_size: int, rows: TensorDataset = RAGGED, ckpt_path: str | None = None, **given: Any
) -> Tokens:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    arguments = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **quiet, **given}
    fp.Trainer(default_root_dir=root, seed=1, **arguments).fit(model, DataLoader(rows, batch_size), ckpt_path=ckpt_path)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.double() for name, value in model.state_dict().items()}


def whole(rows: TensorDataset = RAGGED) -> dict[str, Tensor]:
    """The weights after a step with the mean over all tokens, written out."""
    model = Tokens().double()
    tokens, labels = rows.tensors
    F.cross_entropy(model.net(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()
    return {name: (value - value.grad).detach() for name, value in model.named_parameters()}


def same(module: nn.Module, wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, value in gradients(module).items():
        torch.testing.assert_close(value, wanted[name], rtol=tolerance, atol=tolerance, msg=name)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, LONGEST), min_size=1, max_size=9).filter(any), batch_size=st.integers(1, 9))
def test_any_cut_into_a_window_gives_the_gradient_of_the_whole(
    tmp_path_factory: Any, lengths: list[int], batch_size: int
) -> None:
    rows = documents(lengths)
    window = -(-len(lengths) // batch_size)

    model = fitted(tmp_path_factory.mktemp("run"), Tokens(), batch_size, rows, accumulate_grad_batches=window)

    same(model, whole(rows))


@pytest.mark.parametrize(("batch_size", "window"), [(12, 1), (5, 3)])
@pytest.mark.parametrize("model", [Noted, PythonWeight, SkipsEmpty])
def test_a_weight_is_a_tensor_or_a_number_and_hooks_see_the_mean(
    tmp_path: Path, model: type[Tokens], batch_size: int, window: int
) -> None:
    trained = fitted(tmp_path, model(), batch_size, accumulate_grad_batches=window)

    same(trained, whole())
    tokens, labels = (part[:batch_size] for part in RAGGED.tensors)
    net = Tokens().double().net
    first = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    assert trained.losses == [] or trained.losses[0] == pytest.approx(float(first.detach()))


def test_clipping_and_hooks_before_the_optimizer_see_the_divided_gradient(tmp_path: Path) -> None:
    class Norm(Tokens):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norm = torch.nn.utils.get_total_norm(p.grad for p in self.parameters() if p.grad is not None)

    model = fitted(tmp_path, Norm(), 3, accumulate_grad_batches=4, gradient_clip_val=1e-3)

    start, moved = Tokens().double(), whole()
    gradient = torch.cat([(start.state_dict()[name] - value).flatten() for name, value in moved.items()])
    taken = torch.cat([(start.state_dict()[name] - value).flatten() for name, value in gradients(model).items()])
    torch.testing.assert_close(model.norm, gradient.norm())
    torch.testing.assert_close(taken.norm(), torch.tensor(1e-3).double())


def test_a_window_without_weight_leaves_the_weights_alone(tmp_path: Path) -> None:
    model = fitted(tmp_path, Tokens(), 1, documents([0, 0]), accumulate_grad_batches=2)

    same(model, gradients(Tokens()), 0.0)


def test_a_run_that_is_cut_inside_a_window_continues_it(tmp_path: Path) -> None:
    class Stops(Tokens):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "cut.ckpt")

    fitted(tmp_path / "first", Stops(), 3, accumulate_grad_batches=4, enable_checkpointing=True)

    model = fitted(tmp_path / "second", Tokens(), 3, ckpt_path=str(tmp_path / "cut.ckpt"), accumulate_grad_batches=4)

    same(model, whole())


def test_copies_of_the_module_add_their_sums(tmp_path: Path) -> None:
    model = fitted(tmp_path, Tokens(), 5, devices=3, strategy="replicas", accumulate_grad_batches=3)

    same(model, whole())


def test_lbfgs_judges_by_the_mean(tmp_path: Path) -> None:
    class Mean(ByClosure):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return output["loss_sum"] / output["weight"]

    same(fitted(tmp_path / "sum", ByClosure(), 12), gradients(fitted(tmp_path / "mean", Mean(), 12)), 1e-9)


def on_ranks(root: Path, model: type[Tokens], batch_size: int, **given: Any) -> dict[str, Tensor]:
    state = fitted(root, model(), batch_size, **given).state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("batch_size", "window", "world"), [(2, 3, 2), (5, 2, 2), (1, 4, 3)])
def test_any_cut_over_ranks_gives_the_gradient_of_the_whole(
    tmp_path: Path, strategy: str, batch_size: int, window: int, world: int
) -> None:
    job = functools.partial(
        on_ranks, tmp_path, Tokens, batch_size, strategy=strategy, accumulate_grad_batches=window, devices=world
    )

    for state in ranks.run(job, world):
        for name, value in whole().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_a_rank_whose_every_batch_is_skipped_still_divides(tmp_path: Path) -> None:
    """Rows 1 and 3 have no tokens, so that rank 1 returns None before it has returned anything else."""
    rows = documents([6, 0, 3, 0])
    job = functools.partial(
        on_ranks, tmp_path, SkipsEmpty, 1, rows=rows, strategy="ddp", accumulate_grad_batches=2, devices=2
    )

    for state in ranks.run(job, 2):
        for name, value in whole(rows).items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


class LogsMean(Tokens):
    """Logs the mean of each batch, which is NaN for one without tokens, with the number of its tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        mean, count = (output["loss_sum"] / output["weight"]).detach(), output["weight"]
        self.log("by_tensor", mean, on_step=False, on_epoch=True, batch_size=count)
        self.log("by_number", mean, on_step=False, on_epoch=True, batch_size=int(count))
        return output


@pytest.mark.parametrize("strategy", [{}, {"devices": 2, "strategy": "replicas"}])
def test_a_mean_that_is_logged_with_the_count_of_its_tokens_is_the_mean_over_all_tokens(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    class Ends(LogsMean):
        def on_train_end(self) -> None:
            self.found = dict(self.trainer.callback_metrics)

    model = fitted(tmp_path, Ends(), 2, accumulate_grad_batches=6, **strategy)

    tokens, labels = RAGGED.tensors
    with torch.no_grad():
        net = Tokens().double().net
        wanted = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    assert {name: float(value) for name, value in model.found.items()} == {
        "by_tensor": pytest.approx(float(wanted)),
        "by_number": pytest.approx(float(wanted)),
    }


class Sometimes(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return output if batch_idx else output["loss_sum"]


class NoWeight(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss_sum": super().training_step(batch, batch_idx)["loss_sum"]}


class WrongWeight(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "weight": torch.ones(3)}


class WrongSum(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().training_step(batch, batch_idx), "loss_sum": torch.ones(3)}


class ByHand(Tokens):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (NoWeight, '"weight": None'),
        (WrongWeight, "a tensor of shape \\(3,\\)"),
        (WrongSum, '"loss_sum": a tensor of shape \\(3,\\)'),
        (ByHand, "manual optimisation"),
        (Sometimes, "for every batch, or for none"),
    ],
)
def test_what_is_not_a_sum_with_its_weight_is_refused(tmp_path: Path, model: type[Tokens], word: str) -> None:
    with pytest.raises(fp.ConfigError, match=word):
        fitted(tmp_path, model(), 4, **({} if model is ByHand else {"accumulate_grad_batches": 2}))
