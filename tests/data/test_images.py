"""Decoding: the right pixels, no more work than the target size needs, and a reason if an image can't be decoded."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from footplate.data.pipeline.images import (
    BadImage,
    ImageFormat,
    cover,
    decode,
    jpeg_size,
    looks_like_image,
    write_planes,
)


def gradient(height: int, width: int) -> np.ndarray:
    ramp = np.linspace(0, 255, height)[:, None] * np.ones(width)
    return np.stack([ramp, ramp[::-1], np.full((height, width), 40.0)], axis=2).astype(np.uint8)


def encode(image: np.ndarray, kind: str) -> np.ndarray:
    return cv2.imencode(kind, image)[1]


@pytest.mark.parametrize("kind", [".jpg", ".png", ".webp", ".bmp", ".tiff"])
def test_usual_formats_are_recognised_and_decoded(kind: str) -> None:
    data = encode(gradient(60, 50), kind)
    assert looks_like_image(data.tobytes())
    image = decode(data, ImageFormat(3, None))
    assert np.abs(image.astype(int) - gradient(60, 50)).max() <= 12


@pytest.mark.parametrize(("height", "width"), [(2000, 2500), (1000, 900), (500, 700), (300, 240)])
def test_a_large_jpeg_decoded_at_a_fraction_looks_like_the_whole(height: int, width: int) -> None:
    noise = np.random.default_rng(0).integers(0, 9, (height, width, 3), np.uint8)
    data = encode(np.minimum(gradient(height, width), 240) + noise, ".jpg")
    assert jpeg_size(data) == (height, width)
    small = decode(data, ImageFormat(3, (100, 100)))
    full = cv2.imdecode(data, cv2.IMREAD_COLOR)
    assert full is not None
    whole = cover(full, (100, 100))
    assert small.shape == whole.shape == (100, 100, 3)
    assert np.abs(small.astype(int) - whole).mean() < 3


def test_planes_come_red_first() -> None:
    out = np.empty((3, 4, 5), np.uint8)
    write_planes(np.full((4, 5, 3), (1, 2, 3), np.uint8), out)
    assert out[:, 0, 0].tolist() == [3, 2, 1]


def test_colour_can_become_grey_and_grey_colour() -> None:
    assert decode(encode(gradient(9, 9), ".png"), ImageFormat(1, None)).shape == (9, 9)
    assert decode(encode(gradient(9, 9)[:, :, 0], ".png"), ImageFormat(3, None)).shape == (9, 9, 3)


@pytest.mark.parametrize("kind", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("keep", [0.95, 0.5, 0.01])
def test_a_truncated_image_is_never_handed_out(kind: str, keep: float) -> None:
    data = encode(gradient(200, 200) + np.random.default_rng(0).integers(0, 9, (200, 200, 3), np.uint8), kind)
    with pytest.raises(BadImage):
        decode(data[: int(len(data) * keep)], ImageFormat(3, None))


def test_what_is_no_jpeg_has_no_jpeg_size() -> None:
    assert jpeg_size(np.frombuffer(b"nothing", np.uint8)) is None
    assert jpeg_size(np.frombuffer(b"\xff\xd8\xff\xe0\x00", np.uint8)) is None
