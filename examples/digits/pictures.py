"""scikit-learn's digits as pictures, and the split into training and held-out data.

    python examples/digits/pictures.py FOLDER      # writes 128 training pictures and their classes.csv

The data set has 1797 scans of 8x8 grey levels. They are enlarged to pictures as from a scanner: 64x64 pixels,
grey, white on black. The model is trained on pictures after the declared preprocessing (`preprocess.toml`),
and tested on PNG files after the same preprocessing. It never sees the 8x8 originals.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE: Final = 64  # width and height of a picture, in pixels
HELD_OUT: Final = 450  # a quarter of the data, never trained on
SEED: Final = 20261
MEAN: Final = 0.3  # of grey levels from 0 to 1; mean and std must be those of preprocess.toml
STD: Final = 0.4

# Digit -> index of its held-out picture that is committed as a PNG file; chosen to be easy to read.
SAMPLES: Final = {7: 12, 3: 2, 4: 4, 0: 8, 5: 5}

NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def enlarge(scan: NDArray[np.float64]) -> Image.Image:
    """Enlarge one scan (8x8, grey levels 0 to 16) to a picture."""
    grey = Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8))
    return grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def load() -> tuple[list[Image.Image], NDArray[np.int64], list[Image.Image], NDArray[np.int64]]:
    """Return the training pictures and their classes, then the held-out pictures and their classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    pictures = [enlarge(digits.images[index]) for index in order]
    classes = digits.target[order].astype(np.int64)
    cut = len(pictures) - HELD_OUT
    return pictures[:cut], classes[:cut], pictures[cut:], classes[cut:]


def preprocess(images: list[Image.Image]) -> NDArray[np.float32]:
    """Preprocess as in preprocess.toml: the mean of each 8x8 block, scaled and shifted: [n, 8, 8, 1]."""
    pixels = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    blocks = pixels.reshape(len(images), 8, SIDE // 8, 8, SIDE // 8).mean(axis=(2, 4))
    values: NDArray[np.float32] = ((blocks / 255 - MEAN) / STD)[..., None].astype(np.float32)
    return values


def jitter(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Rotate by up to 8 degrees, scale by up to 8 per cent, shift by up to 5 pixels."""
    angle, scale = np.deg2rad(rng.uniform(-8, 8)), rng.uniform(0.92, 1.08)
    cos, sin, middle = np.cos(angle) * scale, np.sin(angle) * scale, SIDE / 2
    x, y = middle + rng.uniform(-5, 5, 2)
    matrix = (cos, -sin, x - (cos - sin) * middle, sin, cos, y - (sin + cos) * middle)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


def write_samples(folder: Path) -> list[Path]:
    """Write the pictures in `SAMPLES` as `seven.png` and so on, and return their paths."""
    _, _, images, classes = load()
    written = []
    for digit, which in SAMPLES.items():
        path = folder / f"{NAMES[digit]}.png"
        images[int(np.flatnonzero(classes == digit)[which])].save(path, optimize=True)
        written.append(path)
    return written


def write_calibration(folder: Path, count: int = 128) -> None:
    """Write training pictures as `0000.png` and so on, and their classes as `classes.csv`."""
    images, classes, _, _ = load()
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["picture,class"]
    for index, (image, digit) in enumerate(zip(images[:count], classes, strict=False)):
        image.save(folder / f"{index:04}.png")
        lines.append(f"{index:04}.png,{digit}")
    (folder / "classes.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python pictures.py FOLDER")
    write_calibration(Path(sys.argv[1]))
