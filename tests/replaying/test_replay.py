"""`fp.replay` gives the batch, the loss and each gradient of a step again, bit for bit."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import footplate as fp
from replaying.programs import ROWS, Seeing, columns, seeing, trainer

TABLE = fp.Table(columns(0, ROWS))


def loader(batch_size: int = 12) -> fp.Loader:
    return fp.Loader(TABLE, batch_size, shuffle=True, seed=4)


def check(replayed: Any, module: Seeing) -> None:
    """Compare a replayed step with what the module saw in the run."""
    step = replayed.step
    assert [batch["id"].tolist() for batch in replayed.batches[0]] == module.ids[step]
    assert all(map(torch.equal, replayed.losses[0], module.losses[step]))
    assert replayed.gradients.keys() == module.gradients[step].keys()
    assert all(torch.equal(replayed.gradients[name], value) for name, value in module.gradients[step].items())


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_are_given_again_bit_for_bit(tmp_path, seed):
    g = np.random.default_rng(seed)
    settings = {
        "save_every": int(g.integers(3, 9)),
        "accumulate_grad_batches": int(g.integers(1, 4)),
        "gradient_clip_val": 0.5 if g.random() < 0.5 else None,
    }
    module = seeing()
    trainer(tmp_path, **settings).fit(module, loader(), loader())
    for step in g.choice([*module.ids], 5, replace=False).tolist():
        again = seeing()
        replayed = fp.replay(tmp_path, step, trainer(tmp_path, **settings), again, loader(), loader())
        check(replayed, module)
        assert 0 <= step - 1 - replayed.first_step < settings["save_every"]


def test_model_and_generators_are_where_they_were(tmp_path):
    module = seeing()
    trainer(tmp_path).fit(module, loader())
    again = seeing()
    replayed = fp.replay(tmp_path, 8, trainer(tmp_path), again, loader())
    assert torch.equal(again.loss(replayed.batch), replayed.loss)
    assert replayed.optimizer_states[0]["state"][0]["step"] == 7
    replayed.loss.zero_()
    parameters = dict(again.named_parameters())
    assert all(torch.equal(value, replayed.weights[name]) for name, value in parameters.items())


def test_the_directory_of_the_run_stays_as_it_is(tmp_path):
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    class Saving(Seeing):
        def configure_callbacks(self):
            return [fp.ModelCheckpoint(tmp_path / "own", save_top_k=1)]

    def program() -> tuple[fp.Trainer, Seeing, fp.Loader, fp.Loader]:
        torch.manual_seed(3)
        return trainer(tmp_path, max_epochs=2), Saving(), loader(), loader()

    began, *rest = program()
    began.fit(*rest)
    before = files()
    fp.replay(tmp_path, 20, *program())
    assert files() == before


def test_validation_and_callbacks_take_part(tmp_path):
    """The learning rate follows the validation loss, and the accumulation changes between epochs."""

    class Plateau(Seeing):
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    def program() -> tuple[fp.Trainer, Seeing, fp.Loader, fp.Loader]:
        torch.manual_seed(3)
        callbacks = [fp.EMAWeightAveraging(), _accumulation({0: 1, 1: 3})]
        return trainer(tmp_path, max_epochs=4, save_every=1000, callbacks=callbacks), Plateau(), loader(), loader()

    began, module, data, validation = program()
    began.fit(module, data, validation)
    for step in (13, 14, max(module.ids)):
        check(fp.replay(tmp_path, step, *program()), module)
    assert fp.rows(tmp_path, 14, TABLE).batches == [0, 1, 2]


def _accumulation(scheduling: dict[int, int]) -> fp.Callback:
    from footplate.callbacks import GradientAccumulationScheduler

    return GradientAccumulationScheduler(scheduling)


def test_manual_optimisation_gives_the_gradients_of_one_optimizer(tmp_path):
    class Two(Seeing):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                optimizer.zero_grad()
                loss = net(torch.stack([batch["a"], batch["b"]], 1)).square().mean()
                self.manual_backward(loss)
                optimizer.step()
            self.losses[self.trainer.global_step] = [loss.detach()]
            return loss

        def on_before_optimizer_step(self, optimizer):
            parts = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            named = [(name, parameter) for name, parameter in self.named_parameters() if id(parameter) in parts]
            self.gradients[self.trainer.global_step + 1] = {name: parameter.grad.clone() for name, parameter in named}

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]

    def program() -> tuple[fp.Trainer, Seeing, fp.Loader]:
        torch.manual_seed(3)
        return trainer(tmp_path, max_epochs=2), Two(), loader()

    began, module, data = program()
    began.fit(module, data)
    for step in (3, 18):
        replayed = fp.replay(tmp_path, step, *program())
        assert all(torch.equal(replayed.gradients[name], value) for name, value in module.gradients[step].items())
        assert {name.split(".")[0] for name in replayed.gradients} == {"net" if step % 2 else "other"}
        assert torch.equal(replayed.loss, module.losses[step + step % 2][0])


def test_a_torch_dataloader(tmp_path):
    rows = [{name: value[n] for name, value in columns(0, 60).items()} for n in range(60)]
    data = DataLoader(rows, 8, shuffle=True)
    module = seeing()
    trainer(tmp_path).fit(module, data)
    for step in (4, 17):
        check(fp.replay(tmp_path, step, trainer(tmp_path), seeing(), DataLoader(rows, 8, shuffle=True)), module)


def test_two_ranks(tmp_path):
    run, seen = tmp_path / "run", tmp_path / "seen"
    seen.mkdir()
    trainer(run, devices=2, max_epochs=1).fit(seeing(directory=seen), loader(8))
    replayed = fp.replay(run, 7, trainer(run, devices=2, max_epochs=1), seeing(), loader(8))
    for rank in range(2):
        noted = [json.loads(line) for line in (seen / f"rank-{rank}").read_text().splitlines()]
        (expected,) = [record for record in noted if record["step"] == 7]
        assert replayed.batches[rank][0]["id"].tolist() == expected["ids"]
        assert replayed.losses[rank][0].item().hex() == expected["loss"]

    # The gradient is the one that led to the weights after the step.
    assert (replayed.first_step, len(replayed.gradients)) == (5, 6)
    with pytest.raises(fp.ConfigError, match="made by 2 ranks, and this trainer has 1"):
        fp.replay(run, 7, trainer(run), seeing(), loader(16))
    with pytest.raises(fp.ConfigError, match="2 ranks can't be debugged"):
        fp.replay(run, 7, trainer(run, devices=2), seeing(), loader(8), debug=True)


def test_the_debugger_stops_in_the_users_step(tmp_path, monkeypatch, capsys):
    trainer(tmp_path, accumulate_grad_batches=2).fit(seeing(), loader())
    module = seeing()
    monkeypatch.setattr(sys, "stdin", io.StringIO("p batch_idx, self.trainer.global_step\nc\np batch_idx\nc\n"))
    replayed = fp.replay(tmp_path, 9, trainer(tmp_path, accumulate_grad_batches=2), module, loader(), debug=True)
    printed = capsys.readouterr().out
    assert "training_step()" in printed
    assert "(2, 8)" in printed
    assert "(Pdb) 3" in printed
    assert replayed.batch_indices == [2, 3]
    assert "training_step" not in vars(module)


def test_a_checkpoint_in_the_middle_of_a_step_is_used_only_if_there_is_no_other(tmp_path):
    class Stopping(Seeing):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.progress.batches == 10:
                raise RuntimeError("the loader fails")

    settings = {"accumulate_grad_batches": 3, "save_every": 2}
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="the loader fails"):
        trainer(tmp_path, **settings).fit(Stopping(), loader())
    module = seeing()
    trainer(tmp_path, **settings).fit(module, loader(), ckpt_path="last")

    replayed = fp.replay(tmp_path, 4, trainer(tmp_path, **settings), seeing(), loader())
    assert (replayed.batch_indices, replayed.begins_inside, replayed.first_step) == ([9, 10, 11], False, 2)
    inside = next(path for path in (tmp_path / "checkpoints").iterdir() if "step=3" in path.name)
    part = fp.replay(inside, 4, trainer(tmp_path, **settings), seeing(), loader())
    assert (part.batch_indices, part.begins_inside, part.first_step) == ([10, 11], True, 3)
    for rerun in (replayed, part):
        assert all(torch.equal(rerun.gradients[name], value) for name, value in module.gradients[4].items())


def test_mistakes_are_one_clear_error(tmp_path):
    trainer(tmp_path, max_epochs=1).fit(seeing(), loader())
    torch.manual_seed(4)
    with pytest.raises(fp.ConfigError, match="others than those that the run began with"):
        fp.replay(tmp_path, 2, trainer(tmp_path), Seeing(), loader())
    with pytest.raises(fp.ConfigError, match="training ended at step 13, before it"):
        fp.replay(tmp_path, 99, trainer(tmp_path, max_epochs=1), seeing(), loader())
    with pytest.raises(fp.ConfigError, match=r"there is no config\.yaml"):
        fp.replay(tmp_path, 2)
    with pytest.raises(fp.ConfigError, match="a trainer and no model"):
        fp.replay(tmp_path, 2, trainer(tmp_path))
    with pytest.raises(fp.ConfigError, match="was saved after step 10"):
        fp.replay(tmp_path / "checkpoints" / "epoch=0-step=10.ckpt", 10, trainer(tmp_path), seeing(), loader())
    with pytest.raises(fp.ConfigError, match="at least 1"):
        fp.replay(tmp_path, 0)
    with pytest.raises(fp.CheckpointError, match="other rows"):
        fp.replay(
            tmp_path, 8, trainer(tmp_path), seeing(), fp.Loader(fp.Table(columns(5, 80)), 12, shuffle=True, seed=4)
        )


def test_xla_is_refused(tmp_path):
    trainer(tmp_path, max_epochs=1).fit(seeing(), loader())
    with pytest.raises(fp.ConfigError, match="only inside the compiled program"):
        fp.replay(tmp_path, 8, trainer(tmp_path, accelerator="xla"), seeing(), loader())
