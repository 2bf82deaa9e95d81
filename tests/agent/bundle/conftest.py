"""A small but complete bundle, and the tools to take it apart and put it together wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.archive import pack
from agent.bundle.graph import Graph
from agent.bundle.keyring import Keyring
from agent.bundle.manifest import Manifest, Resources, Runtime, Samples, Target
from agent.bundle.node import Node, NodeEntry
from agent.bundle.params import dump_params
from agent.bundle.processing import Postprocess, Preprocess, Softmax, TopK
from agent.bundle.provenance import Provenance
from agent.bundle.tensor_spec import TensorSpec
from tests.bundles import KEY, KEYRING, make_manifest, sha256, signed


def small_graph() -> Graph:
    nodes = [
        Node.null("image"),
        Node.null("p0"),
        Node.call("dense", "fused_dense", [NodeEntry(0), NodeEntry(1)], hash="1f"),
        Node.call("reshape_nop", "__nop", [NodeEntry(2)]),
    ]
    shapes = [(1, 3, 2, 2), (12, 4), (4, 1), (1, 4)]
    return Graph.build(nodes, [NodeEntry(3)], ["float32"] * 4, [0, 1, 2, 2], shapes)


@dataclass
class Kit:
    """Makes bundles of a model `pets`; a test passes only what differs from a good bundle."""

    key: ec.EllipticCurvePrivateKey = KEY
    keyring: Keyring = KEYRING
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = TensorSpec("0/image", "FP32", (1, 3, 2, 2))
        self.files = {
            "labels.txt": b"cat\ndog\ncow\nowl\n",
            "mod.json": small_graph().to_json(),
            "mod.params": dump_params([(TensorSpec("p0", "INT8", (3,)), b"abc")]),
            "mod.so": b"\x7fELF no code in here",
            "samples/inputs.params": dump_params([(spec, bytes(48))]),
            "samples/outputs.params": dump_params([(TensorSpec("0/scores", "FP32", (1, 4)), bytes(16))]),
        }

    def manifest(self, files: Mapping[str, bytes] | None = None, **changes: Any) -> Manifest:
        good = {
            "name": "pets",
            "version": "1.2.3",
            "security_counter": 7,
            "compatible": ("linux-x86_64", "raspberrypi,4-model-b"),
            "target": Target("aarch64-linux-gnu", "cortex-a72", ("asimd", "crc32")),
            "runtime": Runtime("0.27.0.post1", "0.1.14.post1", "graph", "tvm-ffi-0.1", "2.28"),
            "inputs": (TensorSpec("image", "FP32", (1, 3, 2, 2)),),
            "outputs": (TensorSpec("scores", "FP32", (1, 4)),),
            "preprocess": Preprocess(
                input="image",
                colour="RGB",
                resize=(2, 2),
                resize_mode="stretch",
                interpolation="bilinear",
                crop=None,
                scale=1 / 255,
                mean=(0.485, 0.456, 0.406),
                std=(0.229, 0.224, 0.225),
                layout="NCHW",
            ),
            "postprocess": Postprocess((Softmax("scores"), TopK("scores", 2))),
            "samples": Samples(1, 1e-4, 1e-5),
            "resources": Resources(64, 3),
            "provenance": Provenance(
                sha256(b"model"), "edgebundle 0.1.0", None, 2.5e-7, "onnxruntime 1.31.0"
            ),
        }
        return make_manifest(self.files if files is None else files, **(good | changes))

    def members(self, files: Mapping[str, bytes] | None = None, **changes: Any) -> dict[str, bytes]:
        files = self.files if files is None else files
        return self.sign({**files, "manifest.json": self.manifest(files, **changes).to_bytes()})

    def sign(self, members: Mapping[str, bytes]) -> dict[str, bytes]:
        return signed(members, self.key, name="pets")

    def bundle(self) -> bytes:
        return pack(self.members())


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
