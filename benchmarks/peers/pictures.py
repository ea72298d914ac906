"""Write DIRECTORY/folder/LABEL/NUMBER.jpg: a number of JPEGs made from real photographs.

    python pictures.py DIRECTORY KIND ROWS

The photographs come with scikit-image and scikit-learn. Each picture is a random part of one of them, mirrored at random,
scaled, with the noise of a sensor, so that all differ. `small` pictures have 224 to 300 pixels a side and 20 to 40 KB;
`photos` have 1 to 2 million pixels and mostly 300 to 600 KB. Making a picture takes longer than decoding it, so a limited
number is made and then written repeatedly. This makes no difference to the decoder.
"""

import sys
from pathlib import Path

import cv2
import numpy as np
import skimage.data
import sklearn.datasets

NAMES = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "immunohistochemistry", "retina", "rocket")
DIFFERENT = {"small": 2000, "photos": 300}
QUALITY = {"small": 93, "photos": 90}
LABELS = 10


def photographs():
    """The source photographs, in OpenCV's channel order: blue, green, red."""
    photographs = [getattr(skimage.data, name)() for name in NAMES] + sklearn.datasets.load_sample_images().images
    return [np.ascontiguousarray(image[:, :, 2::-1]) for image in photographs]


def size(kind, rng):
    """(height, width) of a picture."""
    if kind == "small":
        return tuple(int(side) for side in rng.integers(224, 301, 2))
    pixels, shape = rng.uniform(1e6, 2e6), rng.choice([3 / 4, 4 / 3, 2 / 3, 3 / 2])
    return round((pixels * shape) ** 0.5), round((pixels / shape) ** 0.5)


def picture(kind, sources, rng):
    """Make one JPEG."""
    height, width = size(kind, rng)
    source = sources[rng.integers(len(sources))]
    room = min(source.shape[0] / height, source.shape[1] / width)
    scale = min(room, 1.5) * rng.uniform(0.7, 1.0)  # source pixels per picture pixel
    part = round(height * scale), round(width * scale)
    top, left = (int(rng.integers(whole - cut + 1)) for whole, cut in zip(source.shape, part, strict=False))
    image = source[top : top + part[0], left : left + part[1]][:, :: rng.choice([1, -1])]
    image = cv2.resize(np.ascontiguousarray(image), (width, height), interpolation=cv2.INTER_CUBIC)
    noise = rng.normal(0, 4, (height, width, 1)) + rng.normal(0, 2, (height, width, 3))
    image = np.clip(image + noise, 0, 255).astype(np.uint8)
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY[kind]])[1].tobytes()


def main(directory, kind, rows):
    rng = np.random.default_rng(0)
    sources = photographs()
    pictures = [picture(kind, sources, rng) for _ in range(min(rows, DIFFERENT[kind]))]
    for label in range(LABELS):
        (directory / "folder" / str(label)).mkdir(parents=True)
    for number in range(rows):
        (directory / "folder" / str(number % LABELS) / f"{number:08}.jpg").write_bytes(pictures[number % len(pictures)])
    print(f"{kind}: {np.percentile([len(jpeg) for jpeg in pictures], [10, 50, 90]) / 1024} KB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
