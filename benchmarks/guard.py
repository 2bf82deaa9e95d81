"""Fails if the kernels of small networks got slower, by exact counts of executed steps.

Small networks, those of `benchmarks.zoo.small` among them, are compiled without records for an x86-64 core
with AVX2 and for a Cortex-A72, and one inference of each is counted under qemu. The total is compared as a
ratio to ONNX Runtime's count for the same network, and each kind of kernel with its count when `guard.json`
was recorded. A busy machine does not change the counts. A step is an instruction; on x86-64, where an
instruction may include a load, an access to memory is a step too.

    python -m benchmarks.guard              # compare
    python -m benchmarks.guard --record     # after an intended change; as root, in .venv
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from benchmarks.architectures.bert import bert
from benchmarks.architectures.network import Network
from benchmarks.instructions.emulator import AGENT_PACKAGES, PACKAGES, Emulator, marks_on_this_machine
from benchmarks.layers import kind_of
from benchmarks.quantised import quantised
from benchmarks.requirements import RequirementError
from benchmarks.zoo.small import NETWORKS

RECORDED: Final = Path(__file__).with_name("guard.json")
WORST: Final = 1.15
X86, ARM = "x86-64-v3", "cortex-a72"
TARGETS: Final = {X86: "x86-64-v3", ARM: "rpi4"}
SEQUENCE: Final = 32
# A kind with a smaller share of the total changes too much with each change of fusion.
LEAST_SHARE: Final = 0.02


def convolutions() -> onnx.ModelProto:
    """Return a network with each kind of layer: stem, 3x3, 1x1, depthwise, strided, pooling, classifier."""
    net = Network("small-convolutions", 0)
    x = net.input("input", (1, 3, 64, 64))
    x = net.node("Relu", net.batch_norm(net.conv(x, "stem", (3, 32), 7, stride=2), "stem.bn", 32))
    x = net.node("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    branch = net.node("Relu", net.conv(x, "same.0", (32, 32), 3, bias=True))
    branch = net.conv(branch, "same.1", (32, 32), 3, bias=True, gain=0.5)
    x = net.node("Relu", net.node("Add", x, branch))
    x = net.node("Relu", net.conv(x, "wide", (32, 64), 1, bias=True))
    x = net.node("Relu", net.conv(x, "deep.0", (64, 64), 3, groups=64, bias=True))
    x = net.node("Relu", net.conv(x, "deep.1", (64, 64), 3, stride=2, groups=64, bias=True))
    x = net.node("Relu", net.conv(x, "strided", (64, 128), 3, stride=2, bias=True))
    x = net.node("Flatten", net.node("GlobalAveragePool", x), axis=1)
    net.output("output", net.gemm(x, "classifier", (128, 100), 0.1), (1, 100))
    return net.model(opset=17, ir_version=8)


def attention() -> onnx.ModelProto:
    """Return one layer of BERT, with embeddings and mask."""
    return bert(0, layers=1, hidden=192, heads=4, vocabulary=200, positions=64)


def int8() -> onnx.ModelProto:
    """Return the network with each kind of layer in int8."""
    return quantised(convolutions())


MODELS: Final = {"convolutions": convolutions, "attention": attention, "int8": int8, **NETWORKS}
IDS: Final = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, slots=True)
class Count:
    """Steps of an inference.

    Attributes
    ----------
    kinds
        Kind of kernel -> steps.
    onnxruntime
        Steps of ONNX Runtime, 0 if it was not counted.
    """

    kinds: Mapping[str, int]
    onnxruntime: int

    @property
    def total(self) -> int:
        """Steps of all kinds of kernel."""
        return sum(self.kinds.values())


def prepare(model: str, core: str, folder: Path) -> Path:
    """Compile a network for a core into a new `folder`, which the guest reads; return the folder."""
    from builder import compile
    from builder.compiling.sample_inputs import make_inputs
    from builder.importer import import_onnx

    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(MODELS[model](), path)
    shapes = {name: [1, SEQUENCE] for name in IDS} if model == "attention" else None
    imported = import_onnx(path, input_shapes=shapes)
    inputs: dict[str, Any] = make_inputs(imported.inputs, imported.onnx)
    np.savez(folder / "inputs.npz", **inputs)
    for member, data in compile(imported, TARGETS[core]).members.items():
        if "/" not in member:
            (folder / member).write_bytes(data)
    return folder


def count(places: Sequence[Path], core: str, emulator: Emulator | None, *, others: bool) -> list[Count]:
    """Count the steps of each prepared network.

    Parameters
    ----------
    places
        Folders that `prepare` returned.
    core
        One of `TARGETS`.
    emulator
        The emulator for ARM; None for x86-64.
    others
        Count ONNX Runtime too.
    """

    def marks(engine: str) -> list[int]:
        if emulator is None:
            return marks_on_this_machine("nodes.py", engine, places)
        return emulator.marks("nodes.py", engine, places, core)

    ours = marks("edgebundle")
    theirs = marks("onnxruntime") if others else [0] * 2 * len(places)
    counts = []
    for place in places:
        kinds: dict[str, int] = {}
        for name in json.loads((place / "nodes.json").read_text()):
            before = ours.pop(0)
            kinds[kind_of(name)] = kinds.get(kind_of(name), 0) + ours[0] - before
        ours.pop(0)  # the end of the last node
        before, after = theirs.pop(0), theirs.pop(0)
        counts.append(Count(kinds, after - before))
    if ours or theirs:
        raise ValueError(f"expected a mark for each node, got {len(ours) + len(theirs)} more")
    return counts


def regressions(name: str, now: Count, recorded: Count) -> list[str]:
    """Return a line for each count that got worse by more than `WORST`.

    The total is compared as a ratio to ONNX Runtime's, so that a faster version of ONNX Runtime
    is noticed too.
    """
    found = []
    reference = now.onnxruntime or recorded.onnxruntime
    ratio, before = now.total / reference, recorded.total / recorded.onnxruntime
    if ratio > WORST * before:
        found.append(f"{name}: {ratio:.3f} of ONNX Runtime's steps, {before:.3f} when it was recorded")
    # If kinds appeared or vanished, other kernels were chosen: only the total says whether they are better.
    for kind in recorded.kinds.keys() & now.kinds.keys():
        was, is_now = recorded.kinds[kind], now.kinds[kind]
        if (
            was > LEAST_SHARE * recorded.total
            and is_now > WORST * was
            and now.kinds.keys() == recorded.kinds.keys()
        ):
            found.append(f"{name}: {kind} takes {is_now} steps, {was} when it was recorded")
    return found


def recorded() -> dict[tuple[str, str], Count]:
    """Read `guard.json`; return the counts by model and core."""
    document = json.loads(RECORDED.read_text())
    return {
        (model, core): Count(entry["kinds"], entry["onnxruntime"])
        for model, cores in document.items()
        for core, entry in cores.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare with `guard.json`, or record it; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.guard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write the counts to guard.json")
    parser.add_argument("--cores", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    args = parser.parse_args(arguments)
    try:
        found = _compared(args.cores, record=args.record)
    except RequirementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for regression in found:
        print(f"worse: {regression}", file=sys.stderr)
    return 1 if found else 0


def _compared(cores: Sequence[str], *, record: bool) -> list[str]:
    """Count every network for `cores`; return what got worse, or write `guard.json` if `record`."""
    known = recorded() if RECORDED.exists() else {}
    found: list[str] = []
    for core in cores:
        emulator = None
        if core == ARM:
            emulator = Emulator.prepare(PACKAGES if record else AGENT_PACKAGES)
        with tempfile.TemporaryDirectory() as folder:
            places = [prepare(model, core, Path(folder, model)) for model in MODELS]
            counts = count(places, core, emulator, others=record or core == X86)
        for model, now in zip(MODELS, counts, strict=True):
            kinds = ", ".join(f"{kind} {number / 1e6:.2f}" for kind, number in sorted(now.kinds.items()))
            others = f", ONNX Runtime {now.onnxruntime / 1e6:.2f}" if now.onnxruntime else ""
            print(f"{model}, {core}: {now.total / 1e6:.2f} ({kinds}){others} million steps")
            if record:
                known[model, core] = now
            else:
                found += regressions(f"{model}, {core}", now, known[model, core])
    if record:
        document: dict[str, dict[str, object]] = {}
        for (model, core), each in sorted(known.items()):
            entry = {"kinds": dict(sorted(each.kinds.items())), "onnxruntime": each.onnxruntime}
            document.setdefault(model, {})[core] = entry
        RECORDED.write_text(json.dumps(document, indent=1) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
