"""Train a random forest on twenty sensor readings, and export it to ONNX with skl2onnx.

    python examples/sensors/train.py               # writes sensors.onnx, columns.csv, readings.csv

The sensors are simulated: a grid of light sensors looks at scikit-learn's handwritten digits, 8 sensors at
the rows, 8 at the columns and 4 at the quadrants. Each reads the mean brightness of what it sees, 0 to 1. The
forest says which digit lies on the grid. Training is seeded.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

Array = NDArray[np.float32]
NAMES: Final = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
TREES: Final = 60
LEAVES: Final = 64
SENSORS: Final = (
    *(f"row_{place}" for place in range(8)),
    *(f"column_{place}" for place in range(8)),
    *("upper_left", "upper_right", "lower_left", "lower_right"),
)
# The last quarter is held out, as in the digits example.
HELD_OUT: Final = 450


def read_sensors(pictures: Array) -> Array:
    """Return the readings of all sensors, [n, 20], for pictures, [n, 8, 8], with grey levels of 0 to 16."""
    light = pictures / np.float32(16)
    quadrants = light.reshape(-1, 2, 4, 2, 4).mean(axis=(2, 4)).reshape(-1, 4)
    return np.concatenate([light.mean(2), light.mean(1), quadrants], 1).astype(np.float32)


def load() -> tuple[Array, NDArray[np.str_], Array, NDArray[np.str_]]:
    """Return readings and names to train with, and those held out."""
    digits = load_digits()
    readings, names = read_sensors(digits.images.astype(np.float32)), NAMES[digits.target]
    return readings[:-HELD_OUT], names[:-HELD_OUT], readings[-HELD_OUT:], names[-HELD_OUT:]


def main() -> None:
    """Train, export, and write the held-out readings as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent)
    folder = parser.parse_args().output
    from skl2onnx import to_onnx

    readings, names, others, expected = load()
    forest = RandomForestClassifier(TREES, max_leaf_nodes=LEAVES, random_state=0)
    forest.fit(readings, names)
    print(f"held out: {(forest.predict(others) == expected).mean():.1%} of {HELD_OUT} are right")
    model = to_onnx(forest, readings[:1], target_opset={"": 18, "ai.onnx.ml": 3}, options={"zipmap": False})
    (folder / "sensors.onnx").write_bytes(model.SerializeToString())
    with (folder / "columns.csv").open("w", newline="") as file:
        csv.writer(file).writerow(SENSORS)
    with (folder / "readings.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*SENSORS, "label"])
        table.writerows([*map(str, reading), name] for reading, name in zip(others, expected, strict=True))
    print(f"the first reading is a {expected[0]}")


if __name__ == "__main__":
    main()
