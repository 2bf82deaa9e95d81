"""A model becomes a package: reproducible, declared, checked against the reference, or not written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm

from agent.bundle.graph import Graph
from agent.errors import EdgeError
from builder import Identity, Package, compile, run
from builder.codegen.link.linker import describe
from builder.errors import BuildError, ModelError, PackageError, ParityError, ShapeError
from builder.importer import import_onnx
from builder.target.device_target import PRESETS

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
PROCESSING: dict[str, Any] = {
    "preprocess": str(DIGITS / "preprocess.toml"),
    "postprocess": "softmax,top3",
    "labels": DIGITS / "labels.txt",
}


@pytest.fixture(scope="module")
def digits() -> Package:
    return compile(DIGITS / "digits.onnx", **PROCESSING)


def test_a_picture_gets_its_label(digits: Package) -> None:
    result = run(digits, DIGITS / "seven.png")
    assert result.answers is not None
    assert result.answers["labels"][0] == b"seven"
    assert float(result.answers["scores"][0]) > 0.9


def test_the_manifest_says_what_was_compiled_and_how_well_it_agrees(digits: Package) -> None:
    manifest = digits.manifest
    source = hashlib.sha256((DIGITS / "digits.onnx").read_bytes()).hexdigest()
    assert manifest.name == "digits"
    assert manifest.provenance.source_sha256 == source
    assert manifest.provenance.parity_error is not None
    assert manifest.provenance.parity_error < 1e-5
    assert manifest.runtime.glibc == describe(digits.members["mod.so"]).glibc
    assert manifest.resources.params_bytes == len(digits.members["mod.params"])
    assert set(manifest.files) == set(digits.members)


def test_tvm_reads_the_parameters(digits: Package) -> None:
    params = tvm.runtime.load_param_dict(digits.members["mod.params"])
    graph = Graph.from_json(digits.members["mod.json"])
    nulls = {node.name for node in graph.nodes if node.is_null}
    assert set(params) == nulls - {"image"}


def test_what_was_saved_is_loaded(digits: Package, tmp_path: Path) -> None:
    digits.save(tmp_path / "d.bundle")
    assert Package.load(tmp_path / "d.bundle") == digits


SCRIPT = """
import sys
from builder.compiling.compilation import compile
from builder.bundles.keys import read_private
package = compile(sys.argv[1], sys.argv[2], postprocess="softmax,top3")
package.sign(read_private(sys.argv[3])).save(sys.argv[4])
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["host", "rpi4"])
def test_two_processes_in_two_folders_write_identical_bytes(tmp_path: Path, target: str) -> None:
    from builder.bundles.keys import generate

    key = generate(tmp_path / "keys").private
    digests = set()
    for name in ("one", "another-place"):
        folder = tmp_path / name
        folder.mkdir()
        model = folder / "digits.onnx"
        model.write_bytes((DIGITS / "digits.onnx").read_bytes())
        command = [sys.executable, "-c", SCRIPT, str(model), target, str(key), str(folder / "out.bundle")]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
        digests.add(hashlib.sha256((folder / "out.bundle").read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in PRESETS if name != "host"])
def test_every_target_gets_a_bundle_that_agrees_with_the_reference(target: str) -> None:
    package = compile(DIGITS / "digits.onnx", target)
    assert package.manifest.target.triple.split("-")[0] in package.manifest.compatible[0]
    assert package.manifest.provenance.parity_error is not None
    assert package.manifest.provenance.parity_error < 1e-5


def test_beyond_the_tolerance_there_is_no_package() -> None:
    with pytest.raises(ParityError, match=r"nothing was written|relative error"):
        compile(DIGITS / "digits.onnx", tolerance=0.0)


def test_a_wrong_kernel_is_caught_by_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has teeth: one weight that is off does not pass."""
    from builder.compiling import compilation

    original = compilation.dump_params  # type: ignore[attr-defined]

    def with_one_weight_off(params: object) -> bytes:
        raw = bytearray(original(params))  # type: ignore[arg-type]
        raw[-1] ^= 0x40  # an exponent bit of the last weight
        return bytes(raw)

    monkeypatch.setattr(compilation, "dump_params", with_one_weight_off)
    with pytest.raises(ParityError):
        compile(DIGITS / "digits.onnx")


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (Identity(name="../etc"), "name"),
        (Identity(name="UPPER"), "name"),
        (Identity(version="1"), "version"),
        (Identity(security_counter=-1), "security_counter"),
        (Identity(compatible=["a b"]), "compatible"),
    ],
)
def test_an_identity_that_no_device_would_take_is_refused(identity: Identity, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        compile(DIGITS / "digits.onnx", identity=identity)


def test_inputs_are_checked_by_name_shape_and_dtype(digits: Package) -> None:
    with pytest.raises(
        ShapeError, match=r"the input tensor 'imag' is not in the graph. Expected inputs: 'image'"
    ):
        run(digits, {"imag": np.zeros((1, 1, 8, 8), "float32")})
    for wrong in (np.zeros((1, 1, 9, 8), "float32"), np.zeros((1, 1, 8, 8), "int64")):
        with pytest.raises(ShapeError):
            run(digits, {"image": wrong})


def test_a_bundle_for_another_machine_does_not_run_here() -> None:
    package = compile(DIGITS / "digits.onnx", "riscv64")
    with pytest.raises(PackageError, match="got one for riscv64-linux-gnu"):
        run(package)


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\0" * 10240, b"x" * 2048])
def test_a_file_that_is_no_bundle_gets_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "not.bundle"
    path.write_bytes(content)
    with pytest.raises(PackageError, match="expected a bundle"):
        Package.load(path)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"not an npz", b"PK\5\6" + bytes(18)])
def test_inputs_that_are_no_npz_get_one_line(digits: Package, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "inputs.npz"
    path.write_bytes(content)
    if content.startswith(b"PK"):  # an empty archive is an .npz of no arrays: everything is filled
        assert run(digits, path).outputs
        return
    with pytest.raises(BuildError):
        run(digits, path)


def test_an_npz_with_pickled_objects_is_not_unpickled(digits: Package, tmp_path: Path) -> None:
    path = tmp_path / "inputs.npz"
    np.savez(path, image=np.array([{"a": 1}], dtype=object))
    with pytest.raises(BuildError):
        run(digits, path)


TABLE = onnx.numpy_helper.from_array(np.arange(40, dtype="float32").reshape(10, 4), "table")
ONES = onnx.numpy_helper.from_array(np.ones((3, 4), "float32"), "updates")


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
def test_an_index_beyond_its_table_stays_inside_it(
    operator: str, ids: list[int], rows: list[int], more: list[onnx.TensorProto]
) -> None:
    """Wrong indices are the requester's fault; the kernel must stay inside its own memory all the same."""
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


def test_errors_of_both_sides_have_one_base_each() -> None:
    assert not issubclass(BuildError, EdgeError)
