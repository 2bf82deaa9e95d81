"""The digits of scikit-learn as little pictures, and the split that training and tests share.

The data set has 1797 scans of 8x8 grey levels. A *picture* here is what a scanner would hand over: 64x64
pixels, grey, white on black. Nothing downstream sees the 8x8 originals: the model learns from pictures that
went through the declared preprocessing (`preprocess.toml`), and is judged on PNG files that did.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 64  # pixels of a picture's edge
HELD_OUT = 450  # a quarter of the data, never trained on
SEED = 20261
MEAN, STD = 0.3, 0.4  # of a grey level in 0..1; preprocess.toml declares the same

# Digit -> which of its held-out pictures is committed as a PNG file: ones that people read easily too.
SAMPLES = {7: 12, 3: 2, 4: 4, 0: 8, 5: 5}

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def enlarge(scan: NDArray[np.float64]) -> Image.Image:
    """Make a picture of one scan (8x8, grey levels 0 to 16)."""
    grey = Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8))
    return grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def load() -> tuple[list[Image.Image], NDArray[np.int64], list[Image.Image], NDArray[np.int64]]:
    """Give the training pictures, their classes, the held-out pictures and theirs."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    pictures = [enlarge(digits.images[index]) for index in order]
    classes = digits.target[order].astype(np.int64)
    cut = len(pictures) - HELD_OUT
    return pictures[:cut], classes[:cut], pictures[cut:], classes[cut:]


def preprocess(images: list[Image.Image]) -> NDArray[np.float32]:
    """Do what preprocess.toml declares: the mean of each 8x8 block, scaled and shifted: [n, 8, 8, 1]."""
    pixels = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    blocks = pixels.reshape(len(images), 8, SIDE // 8, 8, SIDE // 8).mean(axis=(2, 4))
    values: NDArray[np.float32] = ((blocks / 255 - MEAN) / STD)[..., None].astype(np.float32)
    return values


def jitter(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Turn by up to 8 degrees, scale by up to 8 per cent, shift by up to 5 pixels."""
    angle, scale = np.deg2rad(rng.uniform(-8, 8)), rng.uniform(0.92, 1.08)
    cos, sin, middle = np.cos(angle) * scale, np.sin(angle) * scale, SIDE / 2
    x, y = middle + rng.uniform(-5, 5, 2)
    matrix = (cos, -sin, x - (cos - sin) * middle, sin, cos, y - (sin + cos) * middle)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def write_samples(folder: Path) -> list[Path]:
    """Write the pictures of SAMPLES as `seven.png` and so on."""
    _, _, images, classes = load()
    written = []
    for digit, which in SAMPLES.items():
        path = folder / f"{NAMES[digit]}.png"
        images[int(np.flatnonzero(classes == digit)[which])].save(path, optimize=True)
        written.append(path)
    return written
