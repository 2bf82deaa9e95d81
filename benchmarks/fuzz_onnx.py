"""Damaged and hostile ONNX files: each is refused in one line, within a time and a memory limit.

`python -m benchmarks.fuzz_onnx --cases 10000` imports that many files in child processes of limited memory.
Most are small models with bytes flipped, cut off, repeated or inserted; the others have hostile contents:
extents, loops, nesting, calls, numbers that do not fit. Each must be imported, or refused by a `BuildError`
with a message of one line. Prints what went wrong with the seed that repeats it: `--seed N --cases 1`.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LIMIT_S: Final = 30.0
MEMORY_BYTES: Final = 2 << 30
CHUNK: Final = 250
CHUNK_TIMEOUT_S: Final = 3600
_LONGEST_MESSAGE: Final = 20_000
# Address space that the libraries reserve before anything is imported.
_LIBRARIES_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a file: `imported`, `refused`, or a fault (`raised`, `slow`, `large`, ...)."""

    seed: int
    kind: str
    detail: str = ""
    seconds: float = 0.0


def _info(name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    nodes: Sequence[onnx.NodeProto], weights: dict[str, np.ndarray], shape: Sequence[int | str] = (1, 3, 8, 8)
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    output = onnx.ValueInfoProto(name=nodes[-1].output[0])
    output.type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(list(nodes), "fuzz", [_info("x", shape)], [output], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def sound_models() -> list[onnx.ModelProto]:
    """Small models of many kinds of nodes, to damage."""
    state = np.random.RandomState(0)

    def weight(*shape: int) -> np.ndarray:
        return state.standard_normal(shape).astype("f4")

    node = helper.make_node
    conv = [
        node("Conv", ["x", "w", "b"], ["a"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["r"], name="relu"),
        node("Resize", ["r", "", "s"], ["u"], name="up", mode="nearest"),
        node("GlobalAveragePool", ["u"], ["g"], name="pool"),
        node("Reshape", ["g", "t"], ["h"], name="flat"),
        node("Gemm", ["h", "m"], ["y"], name="dense", transB=1),
    ]
    weights = {
        "w": weight(4, 3, 3, 3), "b": weight(4), "m": weight(2, 4), "s": np.array([1, 1, 2, 2], "f4"),
        "t": np.array([1, -1]),
    }  # fmt: skip
    attend = [
        node("Reshape", ["x", "t"], ["q"], name="q"),
        node("Attention", ["q", "w"], ["a"], name="attend", domain="com.microsoft", num_heads=2),
        node("SkipLayerNormalization", ["q", "a", "g"], ["n"], name="norm", domain="com.microsoft"),
        node("Split", ["n", "s"], ["p", "r"], name="split", axis=2),
        node("Concat", ["r", "p"], ["y"], name="join", axis=2),
    ]
    more = {"t": np.array([1, 24, 8]), "w": weight(8, 24), "g": weight(8), "s": np.array([3, 5])}
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Add", ["c", "c"], ["d"])],
        "body",
        [_info("i", [], TensorProto.INT64), _info("go", [], TensorProto.BOOL), _info("c", [1, 3, 8, 8])],
        [_info("on", [], TensorProto.BOOL), _info("d", [1, 3, 8, 8])],
    )
    loop = [node("Loop", ["n", "", "x"], ["l"], name="loop", body=body), node("Relu", ["l"], ["y"])]
    dense = [
        node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]),
        node("Slice", ["t", "b", "e"], ["s"]),
        node("Pad", ["s", "p"], ["d"]),
        node("Gather", ["d", "i"], ["g"], axis=1),
        node("Expand", ["g", "z"], ["v"]),
        node("ReduceMean", ["v"], ["y"], axes=[1]),
    ]
    places = {
        "b": np.array([0, 1]), "e": np.array([1, 7]), "p": np.array([0, 1, 0, 0, 0, 0, 1, 0]),
        "i": np.array([0, 2]), "z": np.array([2, 1, 1, 1, 1]),
    }  # fmt: skip
    return [
        _model(conv, weights),
        _model(attend, more),
        _model(loop, {"n": np.array(3)}),
        _model(dense, places),
    ]


def _damaged(model: onnx.ModelProto, choice: random.Random) -> bytes:
    raw = bytearray(model.SerializeToString())
    for _ in range(choice.choice([1, 1, 2, 4, 16])):
        place = choice.randrange(len(raw))
        match choice.randrange(5):
            case 0:
                raw[place] ^= 1 << choice.randrange(8)
            case 1:
                raw[place] = choice.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del raw[place : place + choice.choice([1, 2, 8, 64])]
            case 3:
                raw[place:place] = raw[place : place + choice.choice([1, 8, 64])]
            case _:
                raw[place:place] = bytes(choice.randrange(256) for _ in range(choice.choice([1, 4, 9])))
        if not raw:
            return b""
    return bytes(raw[: choice.randrange(len(raw))]) if choice.random() < 0.1 else bytes(raw)


def _changed_numbers(model: onnx.ModelProto, choice: random.Random) -> bytes:
    """A model with well-formed, hostile numbers: extents, attributes, constants."""
    numbers = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 1 << 20, 2**31 - 1, 2**31, 2**40, 2**63 - 1]
    for _ in range(choice.choice([1, 1, 2, 3])):
        node = choice.choice(model.graph.node)
        tensors = [t for t in model.graph.initializer if t.data_type == TensorProto.INT64]
        match choice.randrange(6):
            case 0 if node.attribute:
                attribute = choice.choice(node.attribute)
                if attribute.ints:
                    attribute.ints[choice.randrange(len(attribute.ints))] = choice.choice(numbers)
                else:
                    attribute.i = choice.choice(numbers)
            case 1 if tensors:
                tensor = choice.choice(tensors)
                if math.prod(tensor.dims) * 8 != len(tensor.raw_data):
                    continue  # changed before
                value = np.array(numpy_helper.to_array(tensor))
                value.reshape(-1)[choice.randrange(value.size)] = choice.choice(numbers)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
            case 2:
                tensor = choice.choice(model.graph.initializer)
                tensor.dims[:] = [choice.choice(numbers) for _ in range(choice.randrange(5))]
            case 3:
                dims = model.graph.input[0].type.tensor_type.shape.dim
                dims[choice.randrange(len(dims))].dim_value = choice.choice(numbers)
            case 4 if node.input:
                values = [name for n in model.graph.node for name in (*n.input, *n.output)]
                node.input[choice.randrange(len(node.input))] = choice.choice(values)
            case _:
                node.op_type = choice.choice(
                    [
                        "Tile",
                        "ConstantOfShape",
                        "OneHot",
                        "Range",
                        "Upsample",
                        "Relu",
                        "Loop",
                        "If",
                        "Scan",
                        "Expand",
                    ]
                )
    return bytes(model.SerializeToString())


def _bomb(shape: Sequence[int]) -> onnx.ModelProto:
    """A small file whose constants are huge: ConstantOfShape, Expand and Tile of nothing."""
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["c"]),
        helper.make_node("Tile", ["c", "n"], ["t"]),
        helper.make_node("ReduceSum", ["t"], ["r"], keepdims=0),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    return _model(nodes, {"s": np.array(shape), "n": np.array([1 << 12] * len(shape))})


def _nested(depth: int) -> onnx.ModelProto:
    """Ifs within Ifs."""
    relu, outputs = helper.make_node("Relu", ["x"], ["o"]), [_info("o", [1, 3, 8, 8])]
    leaf = graph = helper.make_graph([relu], "leaf", [], outputs)
    for level in range(depth):
        node = helper.make_node("If", ["go"], ["o"], then_branch=graph, else_branch=leaf)
        graph = helper.make_graph([node], f"g{level}", [], outputs)
    go = helper.make_node("Cast", ["m"], ["go"], to=TensorProto.BOOL)
    first = helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0)
    return _model([first, go, *graph.node], {})


def _functions(depth: int) -> onnx.ModelProto:
    """Functions that call the next one twice: 2 ** depth nodes when they are inlined."""
    model = _model([helper.make_node("f0", ["x"], ["y"], domain="local")], {})
    model.opset_import.append(helper.make_opsetid("local", 1))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    for level in range(depth):
        last = level == depth - 1
        name, domain = ("Relu", "") if last else (f"f{level + 1}", "local")
        nodes = [
            helper.make_node(name, ["a"], ["b"], domain=domain),
            helper.make_node(name, ["b"], ["c"], domain=domain),
        ]
        model.functions.append(helper.make_function("local", f"f{level}", ["a"], ["c"], nodes, opsets))
    return model


def _recursive() -> onnx.ModelProto:
    model = _functions(2)
    model.functions[1].node[0].op_type = "f0"
    model.functions[1].node[0].domain = "local"
    return model


def _long_loop(trips: int) -> onnx.ModelProto:
    model = sound_models()[2]
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array(trips), "n"))
    return model


def _chain(length: int) -> onnx.ModelProto:
    names = ["x", *(f"v{i}" for i in range(length - 1)), "y"]
    return _model([helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)], {})


HOSTILE: Final[tuple[Callable[[], onnx.ModelProto], ...]] = (
    lambda: _bomb([1 << 20, 1 << 10]),
    lambda: _bomb([1 << 30]),
    lambda: _bomb([1, 1, 1, 1, 1, 1]),
    lambda: _nested(7),
    lambda: _nested(28),
    lambda: _functions(12),
    lambda: _functions(40),
    _recursive,
    lambda: _long_loop(2**40),
    lambda: _long_loop(100_000),
    lambda: _long_loop(-5),
    lambda: _chain(3000),
)


def case(seed: int) -> bytes:
    """The file of a seed; the first seeds are the hostile models."""
    if seed < len(HOSTILE):
        return bytes(HOSTILE[seed]().SerializeToString())
    choice = random.Random(seed)
    model = choice.choice(sound_models())
    return (_damaged if choice.random() < 0.6 else _changed_numbers)(model, choice)


def run(seed: int) -> Verdict:
    """Import the file of a seed, as a file of that content is imported."""
    from builder.errors import BuildError
    from builder.importer import import_onnx
    from builder.importer.model_file import decode

    raw = case(seed)
    start = time.monotonic()
    kind, detail = "imported", ""
    try:
        import_onnx(decode(raw, "fuzz.onnx"))
    except BuildError as error:
        text = f"{error} {error.hint or ''}"
        kind, detail = "refused", type(error).__name__
        if "\n" in text or len(text) > _LONGEST_MESSAGE:
            kind, detail = "long message", text[:200]
    except MemoryError:
        kind, detail = "large", "out of memory"
    except Exception as error:  # noqa: BLE001 - anything else is what this looks for
        kind, detail = "raised", f"{type(error).__name__}: {error}"[:300]
    seconds = time.monotonic() - start
    if seconds > LIMIT_S:
        kind, detail = "slow", f"{kind} after {seconds:.0f} s"
    return Verdict(seed, kind, detail, seconds)


def _child(first: int, count: int) -> None:
    import builder.importer.onnx_import  # noqa: F401 - what the libraries take does not count

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES + _LIBRARIES_BYTES,) * 2)
    for seed in range(first, first + count):
        print(json.dumps(["begin", seed]), flush=True)
        verdict = run(seed)
        print(json.dumps(["end", verdict.kind, verdict.detail, verdict.seconds]), flush=True)


def _chunk(first: int, count: int) -> list[Verdict]:
    """Run cases in a child; after a crash, the case at fault is the last one of the list."""
    command = [sys.executable, "-m", "benchmarks.fuzz_onnx", "--child", f"{first}:{count}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHUNK_TIMEOUT_S, check=False)
        output, said = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        output, said = error.stdout or b"", b"no end"
    found: list[Verdict] = []
    begun: int | None = None
    for line in output.decode().splitlines():
        if line.startswith('["begin"'):
            begun = json.loads(line)[1]
        elif line.startswith('["end"') and begun is not None:
            _, kind, detail, seconds = json.loads(line)
            found.append(Verdict(begun, kind, detail, seconds))
            begun = None
    if begun is not None:
        found.append(Verdict(begun, "crash", said.decode(errors="replace")[-300:]))
    return found


def main() -> None:
    """Import the cases, and print what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_onnx", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="number of files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        first, count = (int(part) for part in arguments.child.split(":"))
        _child(first, count)
        return
    counts: collections.Counter[str] = collections.Counter()
    slowest = Verdict(0, "")
    seed, end = arguments.seed, arguments.seed + arguments.cases
    while seed < end:
        found = _chunk(seed, min(CHUNK, end - seed))
        seed += len(found) or CHUNK
        for verdict in found:
            counts[verdict.kind] += 1
            slowest = max(slowest, verdict, key=lambda v: v.seconds)
            if verdict.kind not in ("imported", "refused"):
                print(f"seed {verdict.seed}: {verdict.kind}: {verdict.detail}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    print(f"slowest: seed {slowest.seed}, {slowest.seconds:.1f} s ({slowest.kind})")
    raise SystemExit(any(kind not in ("imported", "refused") for kind in counts))


if __name__ == "__main__":
    main()
