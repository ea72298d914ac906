"""Precisions: the types of stored and computed values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.small import Classifier, loader

import footplate as fp
from footplate import checkpoint
from footplate.hardware.cpu import CPU
from footplate.step.precision import NAMES, Precision


class Looks(Classifier):
    """Records the types of its parameters, inputs, outputs and new tensors."""

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


def test_what_configure_model_makes_has_the_type_of_the_parameters(make_trainer):
    class Late(Classifier):
        def configure_model(self):
            self.angles = torch.complex(torch.rand(2), torch.rand(2))

    model = Late()
    make_trainer(precision="64-true", fast_dev_run=True).fit(model, loader())
    assert model.angles.dtype == torch.complex128
    assert torch.get_default_dtype() == torch.float32


F32, F64, B16, INT = torch.float32, torch.float64, torch.bfloat16, (torch.int64, torch.int64)
EXPECTED = {
    "32-true": {"parameters": F32, "buffer": F32, "integers": INT, "input": F32, "output": F32, "new": F32},
    "bf16-mixed": {"parameters": F32, "buffer": F32, "integers": INT, "input": F32, "output": B16, "new": F32},
    "bf16-true": {"parameters": B16, "buffer": B16, "integers": INT, "input": B16, "output": B16, "new": B16},
    "64-true": {"parameters": F64, "buffer": F64, "integers": INT, "input": F64, "output": F64, "new": F64},
}


@pytest.mark.parametrize("precision", EXPECTED)
def test_training_and_evaluation_are_done_in_these_types(precision, make_trainer):
    model = Looks()
    trainer = make_trainer(precision=precision, max_epochs=1)
    trainer.fit(model, loader())
    assert model.seen == EXPECTED[precision]
    trainer.validate(model, loader(20), verbose=False)
    assert model.seen == EXPECTED[precision]
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.isfinite(value) for value in trainer.callback_metrics.values())


@pytest.mark.parametrize("precision", EXPECTED)
def test_it_learns_and_resumes_in_every_precision(precision, make_trainer):
    torch.manual_seed(0)
    whole = Classifier()
    make_trainer(precision=precision, max_epochs=2, enable_checkpointing=False).fit(whole, loader())
    torch.manual_seed(0)
    first = make_trainer(precision=precision, max_epochs=1)
    first.fit(Classifier(), loader())
    saved = checkpoint.load(first.checkpoint_callback.last_model_path)
    resumed = Classifier()
    make_trainer(precision=precision, max_epochs=2).fit(resumed, loader(), ckpt_path="last")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert saved["state_dict"]["net.0.weight"].dtype == EXPECTED[precision]["parameters"]


def test_mixed_and_whole_precision_agree_about_as_well_as_their_types(make_trainer):
    results = {}
    for precision in ("64-true", "32-true", "bf16-mixed"):
        torch.manual_seed(0)
        trainer = make_trainer(precision=precision, max_epochs=2)
        trainer.fit(Classifier(), loader())
        results[precision] = trainer.callback_metrics["train_loss_epoch"].item()
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


def test_on_the_cpu_16_mixed_is_a_plain_loop_under_autocast_to_bfloat16(make_trainer, caplog):
    def fresh() -> Classifier:
        torch.manual_seed(0)
        model = Classifier()
        model.net[2].p = 0.0  # a trainer's dropout draws numbers of its own
        return model

    model, plain = fresh(), fresh()
    make_trainer(precision="16-mixed", max_epochs=1).fit(model, loader(shuffle=False))
    assert caplog.text.count('a CPU trains in "bf16-mixed" instead') == 1

    optimizer = plain.configure_optimizers()
    for x, y in loader(shuffle=False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", ["16-true"])
def test_what_a_device_does_not_train_in_is_refused_with_what_it_does(name, make_trainer):
    with pytest.raises(fp.ConfigError, match=r"cpu does not support it.*bf16-mixed"):
        make_trainer(precision=name)


class Half(CPU):
    """The CPU, allowed to train in float16. Scaling has the same effect there."""

    precisions = CPU.precisions | {"16-mixed"}


class ByHand(fp.Module):
    """Two optimizers, stepped after one backward pass for both. It records the norms that a hook sees."""

    automatic_optimization = False

    def __init__(self, clip: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.clip = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1), clip
        self.norms: list[float] = []

    def on_train_start(self) -> None:
        scaler = self.trainer.step._scaler
        if scaler is not None:  # small enough that nothing overflows, and another after each update
            scaler._init_scale = 4.0
            scaler.set_growth_interval(1)

    def on_before_optimizer_step(self, optimizer) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.second(self.first(batch[0]).tanh()).square().mean())
        for optimizer in optimizers:
            self.clip_gradients(optimizer, self.clip)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]


@pytest.mark.parametrize("clip", [0.01, 0.0])
def test_gradients_of_manual_optimisation_are_unscaled_once_for_clipping_hooks_and_steps(clip, make_trainer):
    models = {}
    for precision in ("32-true", "16-mixed"):
        model = models[precision] = ByHand(clip)
        make_trainer(accelerator=Half(), precision=precision, max_steps=16, max_epochs=-1).fit(model, loader())
    assert len(models["32-true"].norms) == 16
    assert models["16-mixed"].norms == pytest.approx(models["32-true"].norms, rel=0.02)
    torch.testing.assert_close(
        models["16-mixed"].state_dict(), models["32-true"].state_dict(), rtol=0.01, atol=1e-3 if clip else 1e-2
    )


def test_clipping_between_two_backward_passes_of_one_step_is_an_error(make_trainer):
    class Mixes(ByHand):
        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            for _ in range(2):
                self.manual_backward(self.second(self.first(batch[0]).tanh()).square().mean())
                self.clip_gradients(first, 0.1)

    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        make_trainer(accelerator=Half(), precision="16-mixed", max_epochs=1).fit(Mixes(0.1), loader())


@pytest.mark.parametrize("name", ["64-true", "bf16-true"])
def test_complex_parameters_and_buffers_keep_their_imaginary_part(name):
    module = torch.nn.Linear(2, 2)
    values = torch.complex(torch.ones(2), torch.full((2,), 2.0))
    module.register_buffer("frequencies", values.clone())
    module.register_parameter("phase", torch.nn.Parameter(values.clone()))
    Precision.parse(name).convert_module(module)
    assert torch.equal(module.frequencies, values)
    assert torch.equal(module.phase, values)
    assert module.weight.dtype is Precision.parse(name).parameters
