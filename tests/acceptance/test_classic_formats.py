"""Other readers accept mod.json and mod.params: a reader written from the format's rules, and TVM's loaders.

The reader below uses no code of this project. It follows the loader of TVM 0.18's graph executor: which keys
a document must have, which others are errors, how entries are numbered, and how storage is sized.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from builder import Package, compile, run

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
REQUIRED = {"nodes", "arg_nodes", "heads", "attrs", "node_row_ptr"}
TAGS = {"dltype": "list_str", "storage_id": "list_int", "shape": "list_shape", "device_index": "list_int"}
SIZES = {"float32": 4, "int64": 8, "int32": 4, "bool": 1, "float64": 8, "int8": 1, "uint8": 1, "float16": 2}


class ClassicReader:
    """Runs a graph like the classic executor: a pool for each storage id, a packed call for each node."""

    def __init__(self, text: str, module: Any) -> None:
        document = json.loads(text)
        assert set(document) - {"metadata"} == REQUIRED
        self.nodes, self.row_ptr = document["nodes"], document["node_row_ptr"]
        self.heads, self.arg_nodes = document["heads"], document["arg_nodes"]
        for name, (tag, _) in document["attrs"].items():
            assert TAGS[name] == tag
        self.attrs = {name: values for name, (_, values) in document["attrs"].items()}
        assert all(len(values) == self.row_ptr[-1] for values in self.attrs.values())
        for i, node in enumerate(self.nodes):
            assert set(node) <= {"op", "name", "inputs", "attrs", "control_deps"}
            assert {"op", "name", "inputs"} <= set(node)
            assert node["op"] in ("null", "tvm_op")
            assert (node["op"] == "null") == (i in self.arg_nodes)
            if node["op"] == "tvm_op":
                attrs = node["attrs"]
                assert {"func_name", "num_inputs", "num_outputs", "flatten_data"} <= set(attrs)
                assert all(isinstance(value, str) for value in attrs.values())
                assert int(attrs["num_inputs"]) == len(node["inputs"])
                assert self.row_ptr[i + 1] - self.row_ptr[i] == int(attrs["num_outputs"])
        self._set_up_storage()
        self.module = module

    def entry(self, reference: list[int]) -> int:
        return self.row_ptr[reference[0]] + reference[1]

    def _set_up_storage(self) -> None:
        sizes: dict[int, int] = {}
        for eid in range(self.row_ptr[-1]):
            nbytes = SIZES[self.attrs["dltype"][eid]] * prod(self.attrs["shape"][eid])
            sid = self.attrs["storage_id"][eid]
            sizes[sid] = max(sizes.get(sid, 0), nbytes)
        self.pools = {sid: tvm.runtime.empty(((n + 3) // 4,), "float32") for sid, n in sizes.items()}
        self.tensors = []
        for eid in range(self.row_ptr[-1]):
            pool = self.pools[self.attrs["storage_id"][eid]]
            view = pool._create_view(tuple(self.attrs["shape"][eid]), self.attrs["dltype"][eid])
            self.tensors.append(view)

    def set_input(self, name: str, value: Any) -> None:
        (nid,) = [i for i in self.arg_nodes if self.nodes[i]["name"] == name]
        self.tensors[self.row_ptr[nid]].copyfrom(value)

    def run(self) -> list[np.ndarray]:
        for i, node in enumerate(self.nodes):
            if node["op"] == "null" or node["attrs"]["func_name"] == "__nop":
                continue
            arguments = [self.tensors[self.entry(e)] for e in node["inputs"]]
            arguments += [self.tensors[eid] for eid in range(self.row_ptr[i], self.row_ptr[i + 1])]
            self.module[node["attrs"]["func_name"]](*arguments)
        return [self.tensors[self.entry(head)].numpy() for head in self.heads]


@pytest.fixture(scope="module")
def package() -> Package:
    return compile(DIGITS / "digits.onnx")


def test_independent_reader_computes_the_same_output(package: Package, tmp_path: Path) -> None:
    (tmp_path / "mod.so").write_bytes(package.members["mod.so"])
    module = tvm.runtime.load_module(str(tmp_path / "mod.so"))
    reader = ClassicReader(package.members["mod.json"].decode(), module)
    for name, value in tvm.runtime.load_param_dict(package.members["mod.params"]).items():
        reader.set_input(name, value)
    image = np.random.default_rng(3).standard_normal((1, 1, 8, 8)).astype("float32")
    reader.set_input("image", image)
    (output,) = reader.run()
    np.testing.assert_array_equal(output, run(package, {"image": image}).get_output("output_0"))


@pytest.mark.slow
def test_independent_reader_runs_a_network_with_weights_transformed_at_load(
    resnet18_package: Package, tmp_path: Path
) -> None:
    package = resnet18_package
    (tmp_path / "mod.so").write_bytes(package.members["mod.so"])
    module = tvm.runtime.load_module(str(tmp_path / "mod.so"))
    reader = ClassicReader(package.members["mod.json"].decode(), module)
    assert any("winograd" in node["attrs"]["func_name"] for node in reader.nodes if node["op"] == "tvm_op")
    for name, value in tvm.runtime.load_param_dict(package.members["mod.params"]).items():
        reader.set_input(name, value)
    (spec,) = package.manifest.inputs
    image = np.random.default_rng(3).standard_normal(spec.shape).astype("float32")
    reader.set_input(spec.name, image)
    (output,) = reader.run()
    ours = run(package, {spec.name: image}).get_output("output_0")
    np.testing.assert_allclose(output, ours, rtol=0, atol=1e-6 * np.abs(ours).max())
