from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder.bundles.node_report import write_report
from builder.bundles.package import NodeFate, Package
from builder.errors import PackageError
from tests.bundles import make_manifest

PACKAGE = Package(
    make_manifest(),
    {},
    nodes=(
        NodeFate("<script>conv", "Conv", "kernel", ("fused_conv2d_relu",), ("relu",)),
        NodeFate("shape", "Shape", "folded"),
    ),
)


def test_the_report_has_every_node(tmp_path: Path) -> None:
    write_report(PACKAGE, tmp_path / "nodes.json")
    nodes = json.loads((tmp_path / "nodes.json").read_text())["nodes"]
    assert [node["name"] for node in nodes] == ["<script>conv", "shape"]
    assert nodes[0]["kernels"] == ["fused_conv2d_relu"]


def test_names_from_a_model_are_escaped(tmp_path: Path) -> None:
    write_report(PACKAGE, tmp_path / "nodes.html")
    page = (tmp_path / "nodes.html").read_text()
    assert "&lt;script&gt;conv" in page
    assert "<script>conv" not in page
    assert "1 folded" in page


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="cannot be written"):
        write_report(PACKAGE, tmp_path / "absent" / "nodes.json")
