"""Changes repeat, and most keep a file well-formed."""

from __future__ import annotations

import io
import json
import random
import zipfile
from typing import Any

import pytest

from builder.errors import ModelError
from builder.importer.tflite.schema import read
from tests.nightly.fuzz import mutations, onnx_models, other_files
from tests.nightly.fuzz.tflite_models import changed_graph

DOCUMENT = {"a": [1, 2, {"b": "c"}], "d": {"e": 0.5, "f": True}}


def changed(seed: int) -> Any:
    return mutations.document(DOCUMENT, random.Random(seed))


def test_documents_change_and_stay_documents() -> None:
    found = {mutations.to_json(changed(seed)) for seed in range(300)}
    assert len(found) > 150
    assert mutations.to_json(changed(5)) == mutations.to_json(changed(5))
    readable = 0
    for text in found:
        try:
            json.loads(text)
            readable += 1
        except RecursionError:
            pass
    assert readable > 0.8 * len(found)
    assert DOCUMENT == {"a": [1, 2, {"b": "c"}], "d": {"e": 0.5, "f": True}}


def test_messages_change_and_stay_messages() -> None:
    seen = set()
    for seed in range(100):
        model = onnx_models.sound_models()[seed % 4]
        mutations.message(model, random.Random(seed))
        seen.add(model.SerializeToString())
    assert len(seen) > 80


def test_most_graphs_and_tables_are_decoded() -> None:
    """So that the checks behind the decoder are reached."""
    decoded = 0
    for seed in range(60):
        raw = changed_graph(random.Random(seed))
        for content in (raw, mutations.tables(raw, random.Random(seed))):
            try:
                read(content, "file")
                decoded += 1
            except ModelError:
                pass
    assert 20 < decoded < 120


def test_archives_change_and_stay_archives() -> None:
    whole = other_files.pt2_files()[0].content
    for seed in range(50):
        changed = mutations.archive(whole, random.Random(seed), mutations.damaged)
        with zipfile.ZipFile(io.BytesIO(changed)) as archive:
            assert archive.namelist()


@pytest.mark.parametrize("change", [mutations.damaged, mutations.lines, mutations.tables])
def test_bytes_of_any_length_can_be_changed(change: Any) -> None:
    for length in (0, 1, 3, 9, 400):
        for seed in range(40):
            assert isinstance(change(bytes(length), random.Random(seed)), bytes)
