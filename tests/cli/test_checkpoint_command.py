"""`footplate checkpoint inspect` and `convert`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import safetensors.torch
import torch
from models.small import Classifier, loader
from torch import nn

import footplate as fp
from footplate import checkpoint


@pytest.fixture
def run_dir(make_trainer) -> Path:
    """A run of three epochs that has kept two checkpoints."""
    saver = fp.ModelCheckpoint(monitor="val_loss", mode="max", filename="{epoch}")
    trainer = make_trainer(max_epochs=3, callbacks=[saver])
    trainer.fit(Classifier(), loader(), loader(20))
    return trainer.run_dir


@pytest.fixture
def last(run_dir) -> Path:
    return run_dir / "checkpoints" / "last.ckpt"


def inspected(footplate, *arguments) -> list[dict]:
    return json.loads(footplate("checkpoint", "inspect", *arguments, "--json").out)


def test_what_is_in_a_checkpoint_is_shown(footplate, last):
    result = footplate("checkpoint", "inspect", last)
    assert result.code == 0
    for text in (
        "epoch=2.ckpt",
        "Classifier",
        "195 float32",
        "optimizer_states",
        "rng",
        "36",
        "val_loss",
        "torch",
        "yes",
    ):
        assert text.replace(" ", "") in "".join(result.out.split())


def test_json_holds_everything(footplate, last):
    (info,) = inspected(footplate, last)
    state = checkpoint.load(last)
    assert (info["kind"], info["fault"], info["verified"], info["weights_only"]) == ("checkpoint", "", False, False)
    assert (info["epoch"], info["batch_idx"], info["global_step"]) == (2, 12, 36)
    assert info["weights"] == {"float32": sum(value.numel() for value in state["state_dict"].values())}
    assert info["parts"]["state_dict"] == sum(value.nbytes for value in state["state_dict"].values())
    assert info["parts"]["optimizer_states"] > 2 * info["parts"]["state_dict"]
    assert info["parts"]["lr_schedulers"] == 0 if "lr_schedulers" in info["parts"] else True
    assert {"epoch": 2, "batch": 12}.items() <= info["position"].items()
    assert info["versions"]["torch"] == torch.__version__
    assert info["nbytes"] == sum(file.stat().st_size for file in last.iterdir())


def test_a_runs_checkpoints_are_listed_with_the_newest_marked(footplate, run_dir):
    lines = inspected(footplate, run_dir)
    assert len(lines) == 2
    assert [info["newest"] for info in lines] == [False, True]
    assert lines[1]["path"].endswith("epoch=2.ckpt")
    assert "epoch=2.ckpt (newest)" in footplate("checkpoint", "inspect", run_dir).out


def test_a_damaged_one_is_found_by_its_size_and_by_verifying(footplate, last):
    assert inspected(footplate, last, "--verify")[0]["verified"]
    file = last.resolve() / checkpoint.STATE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert footplate("checkpoint", "inspect", last).code == 0, "headers alone are right"
    result = footplate("checkpoint", "inspect", last, "--verify")
    assert result.code == 1
    assert "checksum" in result.out
    os.truncate(file, 100)
    result = footplate("checkpoint", "inspect", last)
    assert result.code == 1
    assert "100 bytes instead of" in " ".join(result.out.split())


def test_without_a_marker_it_is_said_to_be_incomplete_and_the_others_are_shown(footplate, run_dir):
    (run_dir / "checkpoints" / "epoch=2.ckpt" / checkpoint.META).unlink()
    lines = inspected(footplate, run_dir)
    assert [bool(info["fault"]) for info in lines] == [True, False]
    assert lines[1]["newest"]
    listed = footplate("checkpoint", "inspect", run_dir)
    assert listed.code == 1
    assert "not a complete checkpoint" in " ".join(listed.out.split())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "There is nothing at"),
        ("checkpoints/last", "There are: epoch=0.ckpt"),
        ("empty", "no checkpoint in"),
    ],
)
def test_nothing_to_inspect_is_one_sentence(footplate, run_dir, path, said):
    (run_dir / "empty").mkdir()
    result = footplate("checkpoint", "inspect", run_dir / path)
    assert result.code == 2
    assert said in result.err


def test_a_command_without_an_action_names_the_actions(footplate):
    result = footplate("checkpoint")
    assert result.code == 2
    assert "inspect" in result.err
    assert "convert" in result.err


# Converting


def test_plain_weights_are_read_by_any_reader_of_safetensors(footplate, last, tmp_path):
    target = tmp_path / "weights.safetensors"
    result = footplate("checkpoint", "convert", last, target)
    assert (result.code, result.out.strip()) == (0, f"Wrote {target}.")
    weights = safetensors.torch.load_file(target)
    expected = checkpoint.load(last)["state_dict"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    Classifier().load_state_dict(weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_tied_and_scattered_weights_of_every_type_are_written_whole(footplate, dtype, tmp_path):
    tied = torch.arange(12).reshape(3, 4).to(dtype)
    state = {"a": tied, "b": tied, "transposed": tied.T, "scalar": tied[0, 0], "empty": tied[:0], "extra": "text"}
    checkpoint.save({"state_dict": state}, tmp_path / "a.ckpt", {})
    result = footplate("checkpoint", "convert", tmp_path / "a.ckpt", tmp_path / "w.safetensors")
    assert "It lacks extra: no tensor." in result.out
    weights = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(weights[name], state[name]) for name in ("a", "b", "transposed", "scalar", "empty"))


class LitClassifier(pl.LightningModule):
    """The same network, for Lightning."""

    def __init__(self, lr: float = 1e-2, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, classes))


def test_a_torch_file_is_read_by_torch_and_by_lightning(footplate, last, tmp_path):
    target = tmp_path / "model.pt"
    assert footplate("checkpoint", "convert", last, target).code == 0
    state, expected = torch.load(target, weights_only=True), checkpoint.load(last)
    assert state.keys() == expected.keys()
    assert state["optimizer_states"][0]["param_groups"] == expected["optimizer_states"][0]["param_groups"]
    theirs = LitClassifier.load_from_checkpoint(target, weights_only=True)
    assert theirs.hparams == {"lr": 0.01, "width": 16, "classes": 3}
    assert all(torch.equal(value, expected["state_dict"][name]) for name, value in theirs.state_dict().items())
    ours = Classifier.load_from_checkpoint(target)
    assert all(torch.equal(value, expected["state_dict"][name]) for name, value in ours.state_dict().items())


def test_a_torch_file_can_hold_all_that_a_checkpoint_can(footplate, tmp_path):
    value = {
        "array": np.arange(3), "set": {1, 2}, "bytes": b"x", "complex": 1j, "size": torch.Size([2]), "type": torch.int8,
        "device": torch.device("cpu"), 3: (None, True, "text"), "wide": torch.tensor([1j], dtype=torch.complex128),
    }  # fmt: skip
    checkpoint.save({"state_dict": {}, "value": value}, tmp_path / "a.ckpt", {})
    assert footplate("checkpoint", "convert", tmp_path / "a.ckpt", tmp_path / "a.pt").code == 0
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)["value"]
    assert loaded.pop("array").tolist() == [0, 1, 2]
    assert {name: loaded[name] for name in loaded} == {name: value[name] for name in loaded}


def test_training_continues_from_a_checkpoint_that_was_copied_and_from_a_torch_file(
    footplate, last, tmp_path, make_trainer
):
    results = []
    for target in (last, tmp_path / "copy.ckpt", tmp_path / "model.pt"):
        if target != last:
            assert footplate("checkpoint", "convert", last, target).code == 0
        model = Classifier()
        make_trainer(max_epochs=4, default_root_dir=tmp_path / target.stem).fit(
            model, loader(), loader(20), ckpt_path=target
        )
        results.append(torch.cat([value.flatten() for value in model.state_dict().values()]).tolist())
    assert results[0] == results[1] == results[2]
    assert inspected(footplate, tmp_path / "copy.ckpt")[0]["module"].endswith("Classifier")


def test_what_is_there_is_not_overwritten_unless_forced(footplate, last, tmp_path):
    for name in ("w.safetensors", "m.pt", "c.ckpt"):
        target = tmp_path / name
        target.write_text("mine")
        result = footplate("checkpoint", "convert", last, target)
        assert result.code == 2
        assert "--force" in result.err
        assert target.read_text() == "mine"
        assert footplate("checkpoint", "convert", last, target, "--force").code == 0
    assert checkpoint.is_complete(tmp_path / "c.ckpt")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("weights.onnx", "expected a name that ends in .safetensors, .pt, .pth, .ckpt"),
        ("run/checkpoints/epoch=2.ckpt", "is the source itself"),
    ],
)
def test_targets_that_can_not_be_are_refused(footplate, last, tmp_path, target, said):
    result = footplate("checkpoint", "convert", last, tmp_path / target, "--force")
    assert result.code == 2
    assert said in result.err
    assert checkpoint.is_complete(last)


def test_a_lightning_file_is_inspected_too(footplate, tmp_path):
    maker = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip

    class Small(LitClassifier):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    maker.fit(Small(), loader())
    maker.save_checkpoint(tmp_path / "a.ckpt")
    (info,) = inspected(footplate, tmp_path / "a.ckpt")
    assert (info["kind"], info["epoch"], info["global_step"]) == ("torch file", 1, 12)
    assert info["parts"]["optimizer_states"] == info["parts"]["state_dict"]
    shown = footplate("checkpoint", "inspect", tmp_path / "a.ckpt").out
    assert "Lightning 2.6.6" in shown
