"""Gradients: accumulated, clipped, and examined for anomalies."""

from __future__ import annotations

import pytest
import torch
from models.small import Classifier, loader

from training.fits import Plain, final


def test_accumulated_batches_are_one_large_batch(make_trainer):
    models = []
    for batch_size, accumulate in ((10, 4), (40, 1)):
        torch.manual_seed(0)
        models.append(Plain())
        trainer = make_trainer(accumulate_grad_batches=accumulate, max_epochs=3)
        trainer.fit(models[-1], loader(batch_size=batch_size, shuffle=False))
        assert trainer.global_step == 9
    assert torch.allclose(final(models[0]), final(models[1]), atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "measure"),
    [("norm", lambda grads: torch.linalg.vector_norm(grads)), ("value", lambda grads: grads.abs().max())],
)
def test_gradients_are_clipped_by_norm_or_value_and_only_when_they_are_larger(algorithm, measure, make_trainer):
    class Measures(Plain):
        before: list[float] = []  # noqa: RUF012
        after: list[float] = []  # noqa: RUF012

        def gradients(self) -> torch.Tensor:
            return torch.cat([p.grad.reshape(-1) for p in self.parameters()])

        def on_before_optimizer_step(self, optimizer):
            self.before.append(float(measure(self.gradients())))

        def on_before_zero_grad(self, optimizer):
            if self.net[0].weight.grad is not None:
                self.after.append(float(measure(self.gradients())))

    model = Measures()
    model.before, model.after = [], []
    limit = 0.8 if algorithm == "norm" else 0.3
    make_trainer(max_epochs=2, gradient_clip_val=limit, gradient_clip_algorithm=algorithm).fit(model, loader())
    assert max(model.before) > limit > min(model.before)
    for before, after in zip(model.before, model.after, strict=False):
        assert after == pytest.approx(min(before, limit), rel=1e-3)


def test_detect_anomaly_is_on_while_training_and_off_after(fit):
    seen = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(torch.is_anomaly_enabled())
            return super().training_step(batch, batch_idx)

    fit(Looks, detect_anomaly=True, max_epochs=1)
    assert set(seen) == {True}
    assert not torch.is_anomaly_enabled()
