"""Precisions: what is kept and computed in which type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate import checkpoint
from footplate.step.precision import NAMES, Precision


class Looks(Classifier):
    """Writes down the types of its parameters, inputs, outputs and new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.register_buffer("running", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def look(self, batch) -> None:
        self.seen = {
            "parameters": self.net[0].weight.dtype,
            "buffer": self.running.dtype,
            "integers": (self.count.dtype, batch[1].dtype),
            "input": batch[0].dtype,
            "output": self.net[0](batch[0]).dtype,
            "new": torch.zeros(1).dtype,
        }

    def training_step(self, batch, batch_idx):
        self.look(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.look(batch)
        super().validation_step(batch, batch_idx)


F32, F64, B16, INT = torch.float32, torch.float64, torch.bfloat16, (torch.int64, torch.int64)
EXPECTED = {
    "32-true": {"parameters": F32, "buffer": F32, "integers": INT, "input": F32, "output": F32, "new": F32},
    "bf16-mixed": {"parameters": F32, "buffer": F32, "integers": INT, "input": F32, "output": B16, "new": F32},
    "bf16-true": {"parameters": B16, "buffer": B16, "integers": INT, "input": B16, "output": B16, "new": B16},
    "64-true": {"parameters": F64, "buffer": F64, "integers": INT, "input": F64, "output": F64, "new": F64},
}


@pytest.mark.parametrize("precision", EXPECTED)
def test_training_and_evaluation_are_done_in_these_types(precision, trainer):
    model = Looks()
    made = trainer(precision=precision, max_epochs=1)
    made.fit(model, loader())
    assert model.seen == EXPECTED[precision]
    made.validate(model, loader(20), verbose=False)
    assert model.seen == EXPECTED[precision]
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.isfinite(value) for value in made.callback_metrics.values())


@pytest.mark.parametrize("precision", EXPECTED)
def test_it_learns_and_resumes_in_every_precision(precision, trainer):
    torch.manual_seed(0)
    whole = Classifier()
    trainer(precision=precision, max_epochs=2, enable_checkpointing=False).fit(whole, loader())
    torch.manual_seed(0)
    first = trainer(precision=precision, max_epochs=1)
    first.fit(Classifier(), loader())
    saved = checkpoint.load(first.checkpoint_callback.last_model_path)
    resumed = Classifier()
    trainer(precision=precision, max_epochs=2).fit(resumed, loader(), ckpt_path="last")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert saved["state_dict"]["net.0.weight"].dtype == EXPECTED[precision]["parameters"]


def test_mixed_and_whole_precision_agree_about_as_well_as_their_types(trainer):
    results = {}
    for precision in ("64-true", "32-true", "bf16-mixed"):
        torch.manual_seed(0)
        made = trainer(precision=precision, max_epochs=2)
        made.fit(Classifier(), loader())
        results[precision] = made.callback_metrics["train_loss_epoch"].item()
    assert results["32-true"] == pytest.approx(results["64-true"], rel=0.05)
    assert results["bf16-mixed"] == pytest.approx(results["32-true"], rel=0.05)
    assert results["bf16-mixed"] != results["32-true"]


@pytest.mark.parametrize(
    ("given", "name"), [(32, "32-true"), ("32", "32-true"), ("bf16", "bf16-mixed"), (16, "16-mixed"), (64, "64-true")]
)
def test_lightnings_shorter_spellings(given, name):
    assert Precision.parse(given).name == name


def test_an_unknown_one_is_named_with_the_nearest():
    with pytest.raises(fp.ConfigError, match=r'precision="bf16-mixd" is unknown. Did you mean "bf16-mixed"'):
        Precision.parse("bf16-mixd")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_says_what_it_keeps_and_what_it_computes_in(name):
    precision = Precision.parse(name)
    assert (precision.autocast is not None) == name.endswith("mixed")
    assert precision.plain == (name == "32-true")


@pytest.mark.parametrize("name", ["16-mixed", "16-true"])
def test_what_a_device_does_not_train_in_is_refused_with_what_it_does(name, trainer):
    with pytest.raises(fp.ConfigError, match=r"cpu does not train in it.*bf16-mixed"):
        trainer(precision=name)
