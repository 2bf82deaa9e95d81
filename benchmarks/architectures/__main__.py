"""`python -m benchmarks.architectures resnet50 -o resnet50.onnx`."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx

from benchmarks.architectures import ARCHITECTURES, generate


def main() -> None:
    """Generate the named model and write it to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures", description="Write a generated ONNX model."
    )
    parser.add_argument("name", choices=sorted(ARCHITECTURES))
    parser.add_argument("-o", "--output", type=Path, help="default: NAME.onnx")
    parser.add_argument("--seed", type=int, default=0)
    for parameter in ("layers", "hidden", "heads", "vocabulary", "positions", "size", "classes"):
        parser.add_argument(f"--{parameter}", type=int)
    arguments = vars(parser.parse_args())
    name, seed = arguments.pop("name"), arguments.pop("seed")
    output = arguments.pop("output") or Path(f"{name}.onnx")
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        model = generate(name, seed, **given)
    except TypeError as error:
        parser.error(f"{name} has no such parameter: {error}")
    onnx.save(model, output)
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB, {len(model.graph.node)} nodes")


if __name__ == "__main__":
    main()
