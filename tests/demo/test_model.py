"""The demo's model: its schedule, its augmentation and its steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from footplate.demo.model import MAX_SHIFT, FashionNet, augment, warmup_cosine


@given(steps=st.integers(10, 5000))
def test_learning_rate_rises_to_its_peak_and_falls_to_nothing(steps):
    factors = [warmup_cosine(step, steps) for step in range(steps + 1)]
    peak = factors.index(max(factors))
    assert factors[peak] == pytest.approx(1)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[steps] == pytest.approx(0, abs=1e-9)


def test_learning_rate_stays_at_nothing_beyond_its_last_step():
    assert warmup_cosine(500, steps=100) == pytest.approx(0, abs=1e-9)


def test_augmented_image_is_the_original_mirrored_or_shifted_by_a_pixel():
    torch.manual_seed(0)
    image = torch.randint(0, 256, (200, 1, 5, 4), dtype=torch.uint8)
    padded = torch.nn.functional.pad(torch.stack([image, image.flip(3)]), (MAX_SHIFT,) * 4)
    places = [(row, column) for row in range(2 * MAX_SHIFT + 1) for column in range(2 * MAX_SHIFT + 1)]
    candidates = torch.stack([padded[..., row : row + 5, column : column + 4] for row, column in places])
    chosen = (augment(image) == candidates).all(dim=(3, 4, 5))  # (places, mirrored, B)
    assert chosen.flatten(0, 1).any(0).all()
    assert chosen.any(2).all(), "every shift, mirrored and not, comes up among 200 images"


def test_augmentation_keeps_type_and_shape_of_several_channels():
    image = torch.zeros(3, 2, 28, 28, dtype=torch.uint8)
    assert (augment(image).shape, augment(image).dtype) == (image.shape, image.dtype)


def test_predictions_are_the_most_probable_class_with_its_probability():
    model = FashionNet().eval()
    batch = {"image": torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8), "label": torch.arange(5)}
    predicted = model.predict_step(batch, 0)
    probabilities = model(batch["image"]).softmax(1)
    assert torch.equal(predicted["prediction"], probabilities.argmax(1))
    assert torch.equal(predicted["probability"], probabilities.amax(1))


def test_validation_does_not_augment():
    model = FashionNet().eval()
    logged = []
    model.log = lambda name, value, **_: logged.append(float(value.detach()))
    batch = {"image": torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8), "label": torch.arange(16) % 10}
    model.validation_step(batch, 0)
    model.validation_step(batch, 0)
    assert logged[:2] == logged[2:]


def test_one_batch_can_be_learnt():
    torch.manual_seed(0)
    model = FashionNet(width=4)
    model.log = lambda *_, **__: None
    batch = {"image": torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8), "label": torch.arange(16) % 10}
    optimizer = torch.optim.AdamW(model.parameters(), model.hparams.lr)
    losses = []
    for step in range(30):
        loss = model.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
