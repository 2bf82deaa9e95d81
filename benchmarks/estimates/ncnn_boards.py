"""Checks estimates against published times: ncnn's own networks on Raspberry Pi 3 B+, 4 B and 5.

    python -m benchmarks.estimates.ncnn_boards NCNN/benchmark/models

The argument is that folder of a checkout of https://github.com/Tencent/ncnn, whose `benchmark/README.md` has
the published times. Each network is run under qemu as ncnn's `benchncnn` runs it, by the ncnn of the arm64
root folder, which is newer than those that were timed. On the Raspberry Pi 5 it computes in half precision,
as it did there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.estimates.board import boards
from benchmarks.estimates.inference import estimated, recorded
from benchmarks.instructions.emulator import Emulator
from benchmarks.requirements import RequirementError

# Board -> network -> published milliseconds with one thread and with four: the shortest of a few runs.
PUBLISHED: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "rpi3": {
        "shufflenet_v2": (74.28, 46.76),
        "squeezenet": (125.34, 84.74),
        "mobilenet_v2": (158.69, 110.64),
        "mobilenet": (204.62, 107.84),
        "mnasnet": (148.12, 95.53),
        "efficientnet_b0": (240.94, 134.87),
        "resnet18": (379.21, 270.86),
        "alexnet": (270.13, 157.79),
    },
    "rpi4": {
        "shufflenet_v2": (41.62, 24.37),
        "squeezenet": (73.35, 46.28),
        "mobilenet_v2": (92.98, 61.63),
        "mobilenet": (123.76, 60.74),
        "mnasnet": (83.60, 51.80),
        "efficientnet_b0": (129.45, 73.92),
        "resnet18": (190.80, 122.27),
        "alexnet": (139.34, 75.75),
    },
    "rpi5": {
        "shufflenet_v2": (7.07, 3.37),
        "squeezenet": (11.77, 6.74),
        "mobilenet_v2": (16.21, 10.46),
        "mobilenet": (20.24, 9.00),
        "mnasnet": (12.93, 6.83),
        "efficientnet_b0": (24.12, 12.28),
        "resnet18": (29.54, 19.84),
        "alexnet": (35.24, 21.21),
    },
}
# Overlaps and L2 bandwidths of `board.py` were chosen with these; the others test them.
CHOSEN_WITH: Final = ("shufflenet_v2", "mobilenet_v2", "squeezenet")
SIZES: Final = {"squeezenet": 227, "alexnet": 227}
USUAL_SIZE: Final = 224


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each network and board, and the distribution of the ratios; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.estimates.ncnn_boards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", type=Path, help="the folder benchmark/models of a checkout of ncnn")
    names = list(PUBLISHED["rpi4"])
    parser.add_argument("--networks", nargs="+", choices=names, default=names)
    parser.add_argument("--boards", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    args = parser.parse_args(arguments)
    missing = [name for name in args.networks if not (args.models / f"{name}.param").exists()]
    if missing:
        print(f"error: {args.models}: expected {missing[0]}.param, got no such file", file=sys.stderr)
        return 2
    try:
        emulator = Emulator.prepare()
    except RequirementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ratios: dict[tuple[str, bool], list[float]] = {}
    for network in args.networks:
        for preset in args.boards:
            one, four = predicted(emulator, args.models / f"{network}.param", preset)
            known = PUBLISHED[preset][network]
            found = (one / known[0], four / known[1])
            ratios.setdefault((preset, network in CHOSEN_WITH), []).extend(found)
            print(
                f"{network:16} {preset}  1 thread: {one:6.1f} ms, published {known[0]:6.1f}, {found[0]:.2f}  "
                f"4 threads: {four:6.1f} ms, published {known[1]:6.1f}, {found[1]:.2f}",
                flush=True,
            )
    for (preset, chosen), each in ratios.items():
        which = "networks that chose the figures" if chosen else "other networks"
        print(
            f"{preset}, {which}: {len(each)} ratios, "
            f"geometric mean {statistics.geometric_mean(each):.2f}, {min(each):.2f} to {max(each):.2f}"
        )
    return 0


def predicted(emulator: Emulator, param: Path, preset: str) -> tuple[float, float]:
    """Return the estimated milliseconds of a network with one thread and with all."""
    board = boards()[preset]
    size = str(SIZES.get(param.stem, USUAL_SIZE))
    traffic = recorded(emulator, board, "ncnn_param.py", str(param.resolve()), size, size, "3")
    times = estimated(traffic, board)
    return times[1][0].ns / 1e6, times[board.cores][0].ns / 1e6


if __name__ == "__main__":
    sys.exit(main())
