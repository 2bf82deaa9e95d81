"""The models that are requested, generated with seeded weights in the sizes that the measurements need.

`nothing` adds a number to four others: its kernels take a microsecond, so that a request costs only the
agent's work. `picture` takes a tensor of 600 KB and returns four numbers. The others are convolutions,
repeated until one run takes the wanted time on one thread of this machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.architectures.network import Network
from builder.bundles.package import Package

OPSET, IR_VERSION = 17, 8
SIDE, CHANNELS = 56, 64
# Version of `nothing` -> the number that it adds, so that an answer shows which version computed it.
VERSIONS: Final = {"1.0.0": 1.0, "1.1.0": 2.0}
WANTED_MS: Final = {"three": 3.0, "ten": 10.0, "thirty": 30.0}
_PROBE_LAYERS: Final = 6
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bundles:
    """The signed bundles of one run.

    Attributes
    ----------
    folder
        The folder with the bundles; its folder `trust` holds the public key.
    """

    folder: Path

    def path(self, name: str, version: str = "1.0.0") -> Path:
        """Return a bundle's path."""
        return self.folder / f"{name}-{version}.bundle"


def make(folder: Path, wanted: set[str], progress: Progress) -> Bundles:
    """Compile and sign the models named in `wanted` for this machine."""
    from builder.bundles import key_files

    pair = key_files.generate(folder / "keys")
    trust = folder / "trust"
    trust.mkdir()
    (trust / "signing.pub").write_bytes(pair.public.read_bytes())
    key = key_files.read_private(pair.private)
    bundles = Bundles(folder)

    def save(package: Package, name: str, version: str = "1.0.0") -> None:
        # The versions take turns: with their times of build as counters, one of them would be a downgrade.
        manifest = replace(package.manifest, name=name, version=version, security_counter=0)
        named = replace(package, manifest=manifest)
        named.sign(key).save(bundles.path(name, version))

    if "nothing" in wanted:
        for version, number in VERSIONS.items():
            progress(f"compiling nothing {version}")
            save(_compile(_nothing(number), folder), "nothing", version)
    if "picture" in wanted:
        progress("compiling picture")
        save(_compile(_picture(), folder), "picture")
    timed = [name for name in WANTED_MS if name in wanted]
    if timed:
        progress("measuring one layer")
        layer_ms = _layer_ms(_compile(_layers(_PROBE_LAYERS), folder))
        for name in timed:
            count = max(1, round(WANTED_MS[name] / layer_ms))
            progress(f"compiling {name}: {count} layers")
            package = _compile(_layers(count), folder)
            save(package, name)
            if name == "thirty":
                save(package, "thirty-b")
    return bundles


def _compile(network: Network, folder: Path) -> Package:
    import onnx

    from builder import compile as compile_model
    from builder import load

    path = folder / f"{network.name}.onnx"
    onnx.save(network.model(OPSET, IR_VERSION), str(path))
    return compile_model(load(path))


def _layer_ms(package: Package) -> float:
    from builder.running.local_run import prepared

    module = prepared(package, 1)
    times = []
    for _ in range(30):
        start_s = time.perf_counter()
        module.run()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1e3 / _PROBE_LAYERS


def _nothing(number: float) -> Network:
    network = Network("nothing", seed=1)
    x = network.input("x", (1, 4))
    network.output(
        "y", network.node("Add", x, network.weight("number", np.full((1, 4), number, np.float32))), (1, 4)
    )
    return network


def _picture() -> Network:
    network = Network("picture", seed=2)
    x = network.input("x", (1, 3, 224, 224))
    network.output("y", network.node("GlobalAveragePool", x), (1, 3, 1, 1))
    return network


def _layers(count: int) -> Network:
    network = Network(f"layers{count}", seed=3)
    # A small input: queues of large requests have a separate limit, which is not measured here.
    x = network.input("x", (1, CHANNELS, 1, 1))
    first = network.weight("first.weight", network.normal(1, CHANNELS, SIDE, SIDE, deviation=1.0))
    value = network.node("Add", x, first)
    for index in range(count):
        # Each layer changes its input only a little, so that rounding errors do not grow over a
        # hundred layers.
        drawn = network.normal(CHANNELS, CHANNELS, 3, 3, deviation=0.05 / (9 * CHANNELS) ** 0.5)
        weight = network.weight(f"layer{index}.weight", drawn)
        added = network.node("Conv", value, weight, kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1])
        value = network.node("Add", value, network.node("Relu", added))
    network.output("y", network.node("GlobalAveragePool", value), (1, CHANNELS, 1, 1))
    return network


def input_bytes(name: str) -> int:
    """Return the size of a model's only input in bytes."""
    return {"nothing": 16, "picture": 4 * 3 * 224 * 224}.get(name, 4 * CHANNELS)


def cores() -> list[int]:
    """Return the numbers of the processors that this process may use."""
    return sorted(os.sched_getaffinity(0))
