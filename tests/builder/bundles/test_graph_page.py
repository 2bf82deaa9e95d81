"""The page of a bundle's graph: its data, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.bundle.graph import Graph
from agent.bundle.layer import Layer
from agent.bundle.node import Node, NodeEntry
from agent.bundle.params import dump_params
from agent.bundle.tensor_spec import TensorSpec
from builder.bundles.graph_page import write_page
from builder.bundles.package import Package
from builder.bundles.profile_report import Report, Row
from builder.errors import PackageError
from tests.bundles import make_manifest
from tests.needs import needed
from tests.patience import PATIENCE_S

EVIL = "</script><script>alert(1)</script>"


def package(calls: int = 6) -> Package:
    """Return a bundle whose graph has a transformed weight, a chain, a long skip and a reshape."""

    def attrs(i: int) -> dict[str, str]:
        return {"flops": "2000000", **Layer.of([("Conv", f"/conv{i}")], "3x3", [(4, 4)], [(4, 4)]).to_attrs()}

    nodes = [Node.null("x"), Node.null("w"), Node.call("pack", "pack", [NodeEntry(1)])]
    for i in range(calls):
        inputs = [NodeEntry(len(nodes) - 1 if i else 0), NodeEntry(2)]
        nodes.append(Node.call(f"call{i}", f"fused_conv2d{i}_relu", inputs, 1, **attrs(i)))
    last = len(nodes) - 1
    nodes.append(Node.call("view", "__nop", [NodeEntry(last)]))
    nodes.append(Node.call("sum", "add", [NodeEntry(last + 1), NodeEntry(3)]))
    storage = [*range(len(nodes))]
    storage[last + 1] = storage[last]
    count = len(nodes)
    graph = Graph.build(nodes, [NodeEntry(count - 1)], ["float32"] * count, storage, [(4, 4)] * count)
    weights = dump_params([(TensorSpec.from_dtype("w", "float32", (4, 4)), memoryview(bytes(64)))])
    members = {"mod.json": graph.to_json(), "mod.params": weights, "mod.so": b"\x7fELF"}
    return Package(make_manifest(members), members)


def profile(calls: int = 6) -> Report:
    layers = [Layer.of([("Conv", f"/conv{i}")]) for i in range(calls)]
    rows = [Row(f"fused_conv2d{i}_relu", 10.0 + i, 2e6, "f", layers=(each,)) for i, each in enumerate(layers)]
    return Report((*rows, Row("add", 5.0, None, "f")), 100.0)


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r"const data = (.*);\n", page.read_text())
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_the_page_has_the_calls_of_a_run_with_their_times_and_memory(tmp_path: Path) -> None:
    write_page(package(), tmp_path / "page.html", profile())
    data = data_of(tmp_path / "page.html")
    calls = [node for node in data["nodes"] if node["kind"] == "call"]
    # The transformed weight is computed at load, and a reshape is no call.
    assert [call["title"] for call in calls] == [*(f"fused_conv2d{i}_relu" for i in range(6)), "add"]
    assert [call["time_us"] for call in calls] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 5.0]
    assert calls[0]["nodes"] == ["Conv /conv0"]
    first, last = calls[0]["id"], calls[-1]["id"]
    assert calls[-1]["sources"] == [calls[-2]["id"], first]
    # The first value stays alive until the sum reads it: two values, then three.
    assert [call["live_bytes"] for call in calls] == [128, 128, 192, 192, 192, 192, 192]
    assert [node["kind"] for node in data["nodes"]].count("output") == 1
    skip = data["nodes"][last]["routes"][1]
    assert len(skip) == 5  # past the five calls between
    assert len({(round(x), y) for x, y in skip} & {(node["x"] + 115, node["y"]) for node in calls}) == 0


def test_nodes_do_not_overlap(tmp_path: Path) -> None:
    write_page(package(12), tmp_path / "page.html")
    data = data_of(tmp_path / "page.html")
    assert data["total"] is None
    width, height = data["box"]
    boxes = [(node["x"], node["y"]) for node in data["nodes"]]
    for i, (x, y) in enumerate(boxes):
        assert all(abs(x - a) >= width or abs(y - b) >= height for a, b in boxes[:i])


def test_no_name_leaves_the_data(tmp_path: Path) -> None:
    bundle = package()
    graph = json.loads(bundle.members["mod.json"])
    graph["nodes"][3]["attrs"]["onnx"] = f"Conv {EVIL}"
    members = {**bundle.members, "mod.json": json.dumps(graph).encode()}
    outputs = (TensorSpec.from_dtype("</script>", "float32", (4, 4)),)
    evil = Package(replace(bundle.manifest, outputs=outputs), members)
    write_page(evil, tmp_path / "page.html", replace(profile(), stages=()))
    text = (tmp_path / "page.html").read_text()
    assert text.count("</script>") == 1
    assert "alert(1)" in json.dumps(data_of(tmp_path / "page.html"))
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)


def test_a_profile_of_another_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="expected a profile of this bundle"):
        write_page(package(5), tmp_path / "page.html", profile(6))
    with pytest.raises(PackageError, match="cannot be written"):
        write_page(package(), tmp_path / "absent" / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_browser_draws_the_graph_and_the_comparison(tmp_path: Path) -> None:
    browser = needed("chromium", "chromium-browser")
    before = replace(profile(), rows=tuple(replace(row, duration_us=20.0) for row in profile().rows))
    page = tmp_path / "page.html"
    write_page(package(), page, profile(), before)
    # What a user does: type into the field, press keys.
    keys = "['ArrowDown', 'ArrowDown', '+']"
    press = f"for (const key of {keys}) dispatchEvent(new KeyboardEvent('keydown', {{key}}));"
    look = "$('find').value = 'conv3'; $('find').dispatchEvent(new Event('input'));"
    page.write_text(page.read_text().replace("</script>", f"{press} {look}</script>"))
    drawn = subprocess.run(
        [
            *(
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={tmp_path / 'profile'}",
            ),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout
    assert drawn.count('<g class="node') == 9
    assert drawn.count(" dim") == 6
    assert "Largest changes" in drawn
    assert "Memory over time" in drawn
    assert "Roofline" in drawn
    detail = drawn.partition('id="detail"')[2].partition('id="parts"')[0]
    assert "fused_conv2d1_relu" in detail
    assert "0.55 times" in detail
