"""Compiling a model: reproducible, described in the manifest, compared with the reference."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm

from agent.bundle.graph import Graph
from builder import Identity, Options, Package, compile, run
from builder.codegen.link.linker import describe
from builder.errors import ModelError, ParityError
from builder.importer import ImportedModel, import_onnx
from builder.target.presets import PRESETS
from tests.patience import PROGRAM_PATIENCE_S

DIGITS = Path(__file__).parents[3] / "examples" / "digits"


@pytest.fixture(scope="module")
def digits(digits_bundle: Path) -> Package:
    return Package.load(digits_bundle)


@pytest.mark.slow
def test_the_manifest_describes_the_model_and_its_parity(digits: Package) -> None:
    manifest = digits.manifest
    source = hashlib.sha256((DIGITS / "digits.onnx").read_bytes()).hexdigest()
    assert manifest.name == "digits"
    assert manifest.provenance.source_sha256 == source
    assert manifest.provenance.parity_error is not None
    assert manifest.provenance.parity_error < 1e-5
    assert manifest.runtime.glibc == describe(digits.members["mod.so"]).glibc
    assert manifest.resources.thread_bytes is not None
    assert set(manifest.files) == set(digits.members)


@pytest.mark.slow
def test_tvm_reads_the_parameters(digits: Package) -> None:
    params = tvm.runtime.load_param_dict(digits.members["mod.params"])
    graph = Graph.from_json(digits.members["mod.json"])
    nulls = {node.name for node in graph.nodes if node.is_null}
    assert set(params) == nulls - {"image"}


def small_model() -> onnx.ModelProto:
    """Two convolutions, a mean and a matrix product: one kernel of each, which compile soon."""
    random = np.random.default_rng(5)
    shapes = {"w": (8, 3, 3, 3), "v": (16, 8, 1, 1), "m": (16, 10)}
    weights = [
        onnx.numpy_helper.from_array(random.standard_normal(shape).astype("float32"), name)
        for name, shape in shapes.items()
    ]
    node = onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "v"], ["c"]),
        node("ReduceMean", ["c"], ["d"], axes=[2, 3], keepdims=0),
        node("MatMul", ["d", "m"], ["y"]),
    ]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "small", [info("x", 1, [1, 3, 8, 8])], [info("y", 1, [1, 10])], weights
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def small_network() -> ImportedModel:
    return import_onnx(small_model())


SCRIPT = """
import sys
from builder.compiler import compile
from builder.bundles.key_files import read_private
from builder.compiling.options import Options
package = compile(sys.argv[1], sys.argv[2], Options(postprocess="softmax,top3"))
package.sign(read_private(sys.argv[3])).save(sys.argv[4])
"""


@pytest.mark.slow
def test_two_processes_in_two_folders_write_identical_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another machine, because then the kernels are also compiled for this one, to compare them."""
    from builder.bundles.key_files import generate

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    key = generate(tmp_path / "keys").private
    digests = set()
    for name in ("one", "another-place"):
        folder = tmp_path / name
        folder.mkdir()
        model = folder / "small.onnx"
        onnx.save(small_model(), model)
        command = [sys.executable, "-c", SCRIPT, str(model), "rpi4", str(key), str(folder / "out.bundle")]
        subprocess.run(command, cwd=folder, check=True, timeout=PROGRAM_PATIENCE_S)
        digests.add(hashlib.sha256((folder / "out.bundle").read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in PRESETS if name != "host"])
def test_every_target_gets_a_bundle_that_agrees_with_the_reference(target: str) -> None:
    package = compile(small_network(), target)
    assert package.manifest.target.triple.split("-")[0] in package.manifest.compatible[0]
    assert package.manifest.provenance.parity_error is not None
    assert package.manifest.provenance.parity_error < 1e-5


@pytest.mark.slow
def test_no_package_is_made_beyond_the_tolerance() -> None:
    with pytest.raises(ParityError, match="expected a relative error of at most 0"):
        compile(small_network(), options=Options(tolerance=0.0))


@pytest.mark.slow
def test_a_single_wrong_weight_is_caught_by_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    from builder.compiling import compilation

    original = compilation.dump_params  # type: ignore[attr-defined]

    def with_one_weight_off(params: object) -> bytes:
        raw = bytearray(original(params))  # type: ignore[arg-type]
        top = next(i for i in range(len(raw) - 1, 0, -4) if raw[i])  # panels end in zeros
        raw[top] ^= 0x40  # an exponent bit of the last weight
        return bytes(raw)

    monkeypatch.setattr(compilation, "dump_params", with_one_weight_off)
    with pytest.raises(ParityError):
        compile(small_network())


IDENTITIES = [
    (Identity(name="../etc"), "name: expected"),
    (Identity(name="UPPER"), "name: expected"),
    (Identity(name="a" * 65), "name: expected"),
    (Identity(version="1"), "version: expected"),
    (Identity(version="01.0.0"), "version: expected"),
    (Identity(version="1.0.0-" + "a" * 74), "version: expected at most 64 characters, got 80"),
    (Identity(security_counter=-1), "security_counter: expected"),
    (Identity(security_counter=1 << 63), "security_counter: expected"),
    (Identity(compatible=["a b"]), "compatible: expected"),
    (Identity(compatible=["x" * 129]), "compatible: expected"),
    (Identity(compatible=[]), "compatible: expected 1 to 64 device types, got 0"),
    (Identity(compatible="abc"), "expected a sequence of compatible strings, got 'abc'"),
]


@pytest.mark.parametrize(("identity", "says"), IDENTITIES, ids=[says for _, says in IDENTITIES])
def test_an_identity_that_no_manifest_allows_is_refused_before_anything_is_read(
    identity: Identity, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        compile("absent.onnx", identity=identity)


@pytest.mark.parametrize(
    "identity",
    [
        Identity(
            name="a",
            version="1.0.0-rc.1+build.7",
            security_counter=(1 << 63) - 1,
            counter_ahead_of_time=True,
        ),
        Identity(name="a" * 64, compatible=["raspberrypi,4-model-b"] * 64),
    ],
)
def test_every_identity_that_a_manifest_allows_passes(identity: Identity) -> None:
    identity.check()


def test_a_refused_name_gets_an_example_that_is_allowed() -> None:
    with pytest.raises(ModelError) as caught:
        Identity(name="ResNet 50 (v2)").check()
    assert caught.value.hint == "for example resnet-50-v2"


TABLE = onnx.numpy_helper.from_array(np.arange(40, dtype="float32").reshape(10, 4), "table")
ONES = onnx.numpy_helper.from_array(np.ones((3, 4), "float32"), "updates")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "ids", "rows", "more"),
    [
        ("Gather", [1, 3], [1, 3, 4], []),
        ("GatherElements", [3, 4], [3, 4], []),
        ("GatherND", [3, 1], [3, 4], []),
        ("ScatterND", [3, 1], [10, 4], [ONES]),
        ("ScatterElements", [3, 4], [10, 4], [ONES]),
    ],
)
def test_an_index_out_of_range_reads_only_its_table(
    operator: str, ids: list[int], rows: list[int], more: list[onnx.TensorProto]
) -> None:
    """A request with wrong indices must not make a kernel read or write other memory."""
    names = ["table", "ids", *(tensor.name for tensor in more)]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(operator, names, ["rows"])],
        "lookup",
        [onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ids)],
        [onnx.helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, rows)],
        [TABLE, *more],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    package = compile(import_onnx(model), identity=Identity(name="lookup"))
    wrong = np.zeros(ids, "int64")
    wrong.flat[:2] = 10**12, -(10**12)
    answer = run(package, {"ids": wrong}).get_output("output_0")
    assert np.isin(answer, np.arange(40)).all()


def test_security_counter_is_the_time_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    before = int(time.time())
    assert before <= Identity().counter() <= time.time()
    assert Identity(security_counter=7).counter() == 7
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert Identity().counter() == 1_700_000_000
    assert Identity(security_counter=0).counter() == 0


@pytest.mark.parametrize("stated", ["", "yesterday", "-1", "1.5", "\u0663"])
def test_time_of_the_build_that_cannot_be_read_is_refused(
    stated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", stated)
    with pytest.raises(ModelError, match="expected a number of seconds in SOURCE_DATE_EPOCH"):
        Identity().check()
