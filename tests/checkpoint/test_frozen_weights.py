"""`save_frozen_weights=False`: checkpoints have what was trained, and are continued on the same frozen weights only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from models.adapted import FROZEN, Adapted, last, train
from torch import nn

import footplate as fp
from footplate import checkpoint
from footplate.checkpoint import frozen_weights
from footplate.cli.main import main


def saved(directory: Path) -> dict:
    return checkpoint.load(last(directory))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(value.equal(other.state_dict()[name]) for name, value in one.state_dict().items())


def test_a_checkpoint_has_trained_weights_and_buffers_and_checksums_of_the_others(tmp_path):
    train(Adapted(), tmp_path)
    state = saved(tmp_path)
    buffers = {"base.0.running_mean", "base.0.running_var", "base.0.num_batches_tracked"}
    assert state["state_dict"].keys() == {"adapter.weight", "adapter.bias"} | buffers
    assert state["frozen_weights"].keys() == FROZEN


@pytest.mark.parametrize("accelerator", ["cpu", "xla"])
def test_a_continued_training_is_the_one_that_was_not_interrupted(tmp_path, accelerator):
    whole, first, second = Adapted(), Adapted(), Adapted()
    train(whole, tmp_path / "whole", 3, accelerator=accelerator)
    train(first, tmp_path / "cut", 1, accelerator=accelerator)
    train(second, tmp_path / "cut", 3, "last", accelerator=accelerator)
    assert same(second, whole)
    assert saved(tmp_path / "cut")["frozen_weights"].keys() == FROZEN


def test_other_frozen_weights_are_refused_wherever_the_checkpoint_is_loaded(tmp_path):
    train(Adapted(), tmp_path)
    path = str(last(tmp_path))
    loads = (
        lambda: train(Adapted(base_seed=1), tmp_path, 4, path),
        lambda: Adapted.load_from_checkpoint(path, base_seed=1),
        lambda: fp.Trainer(logger=False).predict(Adapted(base_seed=1), [torch.zeros(1, 8)], ckpt_path=path),
    )
    for load in loads:
        with pytest.raises(
            fp.CheckpointError, match=r"has other numbers in base.1.weight.* and 1 more. Build the model"
        ):
            load()


def test_a_module_without_a_frozen_weight_is_refused(tmp_path):
    train(Adapted(), tmp_path)
    module = Adapted()
    module.base = module.base[:2]
    with pytest.raises(fp.CheckpointError, match=r"lacks base.2.weight, base.2.bias. Build"):
        train(module, tmp_path, 4, "last")


def test_a_module_is_built_with_its_own_frozen_weights(tmp_path):
    module = Adapted()
    train(module, tmp_path)
    assert same(Adapted.load_from_checkpoint(last(tmp_path)), module)


def test_weights_that_were_trained_for_a_while_are_saved_from_then_on(tmp_path):
    trained = {"base.1.weight", "base.1.bias"}
    train(Adapted(unfreeze_at=1), tmp_path, 1)
    assert trained < saved(tmp_path)["frozen_weights"].keys()

    train(Adapted(unfreeze_at=1), tmp_path, 3, "last")
    assert trained < saved(tmp_path)["state_dict"].keys()
    assert saved(tmp_path)["frozen_weights"].keys() == FROZEN - trained

    # A run that begins with them frozen keeps them in its checkpoints, too.
    continued, whole = Adapted(unfreeze_at=1), Adapted(unfreeze_at=1)
    train(continued, tmp_path, 4, "last")
    train(whole, tmp_path / "whole", 4)
    assert trained < saved(tmp_path)["state_dict"].keys()
    assert same(continued, whole)


def test_a_frozen_weight_that_a_hook_writes_to_is_saved_and_one_that_it_writes_back_is_not(tmp_path):
    class Meddling(Adapted):
        def on_train_start(self):
            with torch.no_grad():
                self.base[1].weight.add_(1)
                self.base[2].weight.copy_(self.base[2].weight.clone())

    module = Meddling()
    train(module, tmp_path)
    state = saved(tmp_path)
    assert state["state_dict"]["base.1.weight"].equal(module.base[1].weight)
    assert state["frozen_weights"].keys() == FROZEN - {"base.1.weight"}


def test_a_run_whose_checkpoints_had_all_weights_leaves_out_those_that_are_the_modules(tmp_path):
    train(Adapted(), tmp_path, 1, save_frozen_weights=True)
    train(Adapted(), tmp_path, 2, "last")
    assert saved(tmp_path)["frozen_weights"].keys() == FROZEN

    # Weights of the checkpoint that the module doesn't begin with stay in it.
    train(Adapted(), tmp_path / "other", 1, save_frozen_weights=True)
    module = Adapted(base_seed=1)
    train(module, tmp_path / "other", 2, "last")
    # Batch norms of both begin with ones and zeros.
    assert saved(tmp_path / "other")["frozen_weights"].keys() == {"base.0.weight", "base.0.bias"}
    assert same(module, Adapted.load_from_checkpoint(last(tmp_path / "other"), base_seed=2))


def test_averages_of_weights_are_saved_without_frozen_ones_and_continue(tmp_path):
    def callbacks():
        return [fp.EMAWeightAveraging(decay=0.5)]

    whole, second = Adapted(), Adapted()
    train(whole, tmp_path / "whole", 3, callbacks=callbacks())
    train(Adapted(), tmp_path / "cut", 1, callbacks=callbacks())
    assert not FROZEN & saved(tmp_path / "cut")["current_model_state"].keys()
    train(second, tmp_path / "cut", 3, "last", callbacks=callbacks())
    assert same(second, whole)


def test_a_base_in_lower_precision_is_rounded_when_it_is_loaded(tmp_path):
    module = Adapted()
    train(module, tmp_path, precision="bf16-true")
    loaded = Adapted.load_from_checkpoint(last(tmp_path))
    assert loaded.base[1].weight.dtype == torch.float32
    assert loaded.base[1].weight.equal(Adapted().base[1].weight.bfloat16().float())


def test_a_checkpoint_of_weights_only_leaves_them_out_too(tmp_path):
    trainer = train(Adapted(), tmp_path)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert checkpoint.load(tmp_path / "weights.ckpt")["frozen_weights"].keys() == FROZEN


def test_it_is_said_of_a_checkpoint_what_it_lacks(tmp_path, capsys):
    train(Adapted(), tmp_path)
    assert main(["checkpoint", "inspect", str(last(tmp_path))]) == 0
    assert re.search(r"left out +6 frozen weights", capsys.readouterr().out)
    assert main(["checkpoint", "convert", str(last(tmp_path)), str(tmp_path / "weights.safetensors")]) == 0
    assert "It lacks 6 frozen weights, which the checkpoint was saved without." in capsys.readouterr().out


def test_what_was_written_to_is_compared_on_xla_at_each_save(tmp_path, monkeypatch):
    compared = []
    checksum = frozen_weights._checksum
    monkeypatch.setattr(frozen_weights, "_checksum", lambda *given: compared.append(1) or checksum(*given))
    train(Adapted(), tmp_path / "cpu", 2)
    assert len(compared) == 6
    train(Adapted(), tmp_path / "cpu", 3, "last")
    assert len(compared) == 6 * 3
    compared.clear()
    train(Adapted(), tmp_path / "xla", 2, accelerator="xla")
    assert len(compared) == 6 * 3
