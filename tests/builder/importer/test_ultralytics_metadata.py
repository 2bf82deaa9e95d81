"""What Ultralytics' exports say about themselves, and archives that claim it."""

from __future__ import annotations

import io
import json
import zipfile

import pytest

from builder.importer.ultralytics_metadata import Exported, from_archive, from_fields

NAMES = {0: "person", 1: "bicycle"}


def archive(member: str, text: str) -> bytes:
    file = io.BytesIO(b"TFL3" * 10)
    with zipfile.ZipFile(file, "a") as opened:
        opened.writestr(member, text)
    return file.getvalue()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("{0: 'person', 1: 'traffic\\nlight'}", ("person", "traffic light")),
        ("{1: 'a', 0: 'b'}", ("b", "a")),
        ("{0: 'a', 2: 'b'}", ()),
        ("['a', 'b']", ()),
        ("{0: ''}", ()),
        ("{0: '\x1b[2J'}", ()),
        ("{0: __import__('os')}", ()),
        ("(" * 5000, ()),
        (None, ()),
    ],
)
def test_class_names_of_an_export(names: str | None, expected: tuple[str, ...]) -> None:
    assert from_fields({} if names is None else {"names": names}).labels == expected


@pytest.mark.parametrize(
    ("member", "text"),
    [
        # As version 8.4 writes it, 8.3, and YOLOv5.
        ("metadata.json", json.dumps({"stride": 32, "task": "detect", "names": NAMES, "imgsz": [320, 320]})),
        ("temp_meta.txt", str({"stride": 32, "task": "detect", "names": NAMES, "imgsz": [320, 320]})),
        ("meta.txt", str({"stride": 32, "task": "detect", "names": NAMES})),
    ],
)
def test_the_archive_behind_a_file_is_read(member: str, text: str) -> None:
    assert from_archive(archive(member, text)) == Exported(("person", "bicycle"), "detect")


@pytest.mark.parametrize("more", [{"end2end": True}, {"args": {"nms": True}}])
def test_a_model_that_ends_in_its_own_choice_says_so(more: dict[str, object]) -> None:
    fields = {"stride": 32, "names": NAMES, **more}
    for made in (archive("metadata.json", json.dumps(fields)), archive("meta.txt", str(fields))):
        assert from_archive(made) == Exported(("person", "bicycle"), is_final=True)
    assert from_fields({name: str(value) for name, value in fields.items()}).is_final
    assert not from_fields({"end2end": "False", "args": "{'nms': False}"}).is_final


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("[17, 3]", (17, 3)),
        ([12, 2], (12, 2)),
        ("(17, 3)", (17, 3)),
        ("[17]", None),
        ("[0, 3]", None),
        ("[17, 4]", None),
        ("[10000000, 3]", None),
        ("['a', 3]", None),
        ("[17, [3]]", None),
        (None, None),
    ],
)
def test_points_of_an_export(shape: object, expected: tuple[int, int] | None) -> None:
    assert from_fields({"kpt_shape": shape}).points == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PK\x05\x06",
        archive("labels.txt", "cat\ndog\n"),
        archive("metadata.json", "{'names': 1"),
        archive("metadata.json", "[1, 2]"),
        archive("metadata.json", "[" * 100_000),
        archive("meta.txt", "x" * (5 << 20)),
        archive("metadata.json", json.dumps({"names": NAMES})),  # of another program
    ],
)
def test_other_archives_say_nothing(raw: bytes) -> None:
    assert from_archive(raw) is None
