from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from agent.bundle.manifest import Manifest, Resources
from agent.bundle.processing import Detect, Postprocess, Softmax
from agent.bundle.provenance import ShippedRecords, Tuning
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError
from tests.agent.bundle.documents import drop, put


def encode(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def encode_reversed(raw: bytes) -> bytes:
    document = json.loads(raw)
    return json.dumps(dict(reversed(document.items())), separators=(",", ":")).encode()


def test_manifest_survives_the_round_trip(kit: Any) -> None:
    manifest = kit.manifest()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert "labels.txt" in manifest.files


def test_detection_steps_survive_the_round_trip(kit: Any) -> None:
    outputs = (TensorSpec("boxes", "FP32", (1, 9, 4)), TensorSpec("scores", "FP32", (1, 9, 2)))
    steps = (Softmax("scores", 2), Detect("boxes", "scores", 0.5, 0.3, 100, "corners", True, True))
    manifest = kit.manifest(outputs=outputs, postprocess=Postprocess(steps), preprocess=None)
    assert Manifest.from_bytes(manifest.to_bytes()).postprocess == Postprocess(steps)


def test_types_of_the_numbers_in_bytes_survive_the_round_trip(kit: Any) -> None:
    outputs = (TensorSpec("bits", "UINT8", (4,)), TensorSpec("small", "INT8", (4,)))
    types = {"small": "INT4", "bits": "FLOAT8E4M3FN"}
    manifest = kit.manifest(outputs=outputs, postprocess=None, number_types=types)
    assert Manifest.from_bytes(manifest.to_bytes()).number_types == types


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ({"none": "INT4"}, "no input or output"),
        ({"wide": "INT4"}, "no input or output of bytes"),
        ({"bits": "float8"}, "expected a name"),
        ({"bits": "F" * 40}, "expected a name"),
    ],
)
def test_types_of_numbers_that_are_no_bytes_are_refused(kit: Any, types: dict[str, str], said: str) -> None:
    outputs = (TensorSpec("bits", "UINT8", (4,)), TensorSpec("wide", "FP32", (4,)))
    with pytest.raises(ValueError, match=f"number_types.*{said}"):
        kit.manifest(outputs=outputs, postprocess=None, number_types=types)


def test_whole_numbers_are_written_as_fractions_where_fractions_are_declared(kit: Any) -> None:
    preprocess = replace(kit.manifest().preprocess, scale=1, mean=(0, 0, 0), std=(1, 1, 1))
    raw = kit.manifest(preprocess=preprocess).to_bytes()
    assert b'"scale":1.0' in raw
    assert Manifest.from_bytes(raw).preprocess == preprocess


def test_manifest_cannot_be_changed(kit: Any) -> None:
    manifest = kit.manifest()
    with pytest.raises(FrozenInstanceError):
        manifest.name = "other"
    with pytest.raises(TypeError):
        manifest.files["mod.so"] = None


def test_later_field_is_left_out_if_unset_so_that_older_bundles_can_be_read(kit: Any) -> None:
    manifest = kit.manifest()
    assert b"shipped_records" not in manifest.to_bytes()
    shipped = ShippedRecords("cortex-a72", "0" * 64, 3, False)
    later = replace(manifest, provenance=replace(manifest.provenance, shipped_records=shipped))
    assert Manifest.from_bytes(later.to_bytes()) == later
    assert b"thread_bytes" not in manifest.to_bytes()
    later = replace(manifest, resources=Resources(64, 3, 0))
    assert b'"thread_bytes":0' in later.to_bytes()
    assert Manifest.from_bytes(later.to_bytes()) == later


BAD: dict[str, Callable[[Any], None]] = {
    "unknown key": put("extra", to=1),
    "null for a later field": put("provenance", "shipped_records", to=None),
    "unknown nested key": put("target", "extra", to=1),
    "missing key": drop("version"),
    "missing nested key": drop("runtime", "abi"),
    "missing nullable key": drop("preprocess"),
    "future format": put("format", to=2),
    "format as boolean": put("format", to=True),
    "counter as string": put("security_counter", to="7"),
    "counter as fraction": put("security_counter", to=7.0),
    "counter negative": put("security_counter", to=-1),
    "counter beyond 64 bits": put("security_counter", to=1 << 63),
    "counter not ahead of time": put("counter_ahead_of_time", to=False),
    "counter ahead of time by a number": put("counter_ahead_of_time", to=1),
    "name with a slash": put("name", to="../pets"),
    "name with upper case": put("name", to="Pets"),
    "name too long": put("name", to="p" * 65),
    "name with a newline": put("name", to="pets\n"),
    "name null": put("name", to=None),
    "version not semantic": put("version", to="1.2"),
    "version with a leading zero": put("version", to="01.2.3"),
    "version too long": put("version", to="1.0.0-" + "a" * 59),
    "version in other digits": put("version", to="1.2.٣"),
    "compatible empty": put("compatible", to=[]),
    "compatible not a list": put("compatible", to="linux-x86_64"),
    "compatible with a space": put("compatible", to=["linux x86"]),
    "features not sorted": put("target", "features", to=["crc32", "asimd"]),
    "features twice": put("target", "features", to=["asimd", "asimd"]),
    "executor unknown": put("runtime", "executor", to="vm"),
    "glibc not a version": put("runtime", "glibc", to="2"),
    "inputs empty": put("inputs", to=[]),
    "inputs twice": lambda d: d["inputs"].append(d["inputs"][0]),
    "input of bytes": put("inputs", 0, "datatype", to="BYTES"),
    "shape negative": put("inputs", 0, "shape", 0, to=-1),
    "shape of fractions": put("inputs", 0, "shape", 0, to=1.0),
    "shape enormous": put("inputs", 0, "shape", to=[1 << 40]),
    "preprocess of an unknown input": put("preprocess", "input", to="sound"),
    "preprocess std zero": put("preprocess", "std", to=[0.0]),
    "preprocess two means": put("preprocess", "mean", to=[0.5, 0.5]),
    "preprocess resize of three": put("preprocess", "resize", to=[2, 2, 2]),
    "preprocess resize enormous": put("preprocess", "resize", to=[2, 1 << 20]),
    "preprocess scale an integer": put("preprocess", "scale", to=1),
    "postprocess of an unknown output": put("postprocess", "steps", 0, "output", to="image"),
    "postprocess of an unknown kind": put("postprocess", "steps", 0, "kind", to="shell"),
    "postprocess without kind": drop("postprocess", "steps", 0, "kind"),
    "postprocess empty": put("postprocess", "steps", to=[]),
    "tolerance negative": put("samples", "rtol", to=-1.0),
    "digest in upper case": put("files", "mod.so", "sha256", to="A" * 64),
    "digest short": put("files", "mod.so", "sha256", to="a" * 63),
    "size negative": put("files", "mod.so", "size", to=-1),
    "size over the member's limit": put("files", "mod.so", "size", to=1 << 30),
    "file that is not a member": put("files", "../mod.so", to={"sha256": "a" * 64, "size": 1}),
    "file is the manifest": put("files", "manifest.json", to={"sha256": "a" * 64, "size": 1}),
    "file missing": drop("files", "mod.so"),
    "samples missing": drop("files", "samples/inputs.params"),
    "provenance without source": put("provenance", "source_sha256", to=None),
}


@pytest.mark.parametrize("name", BAD)
def test_manifest_that_is_not_exactly_right_is_refused(kit: Any, name: str) -> None:
    document = json.loads(kit.manifest().to_bytes())
    assert encode(document) == kit.manifest().to_bytes()
    BAD[name](document)
    with pytest.raises(FormatError):
        Manifest.from_bytes(encode(document))


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "space": lambda raw: raw.replace(b":", b": ", 1),
        "newline at the end": lambda raw: raw + b"\n",
        "duplicate key": lambda raw: raw.replace(b'{"', b'{"name":"other","', 1),
        "same key twice": lambda raw: raw.replace(b'"name":"pets"', b'"name":"pets","name":"pets"'),
        "escaped letter": lambda raw: raw.replace(b'"pets"', b'"\\u0070ets"'),
        "other order": encode_reversed,
        "exponent": lambda raw: raw.replace(b'"rtol":0.0001', b'"rtol":1e-4'),
        "trailing zero": lambda raw: raw.replace(b'"rtol":0.0001', b'"rtol":0.00010'),
        "minus zero": lambda raw: raw.replace(b'"security_counter":7', b'"security_counter":-0'),
        "not a number": lambda raw: raw.replace(b'"rtol":0.0001', b'"rtol":NaN'),
        "infinity": lambda raw: raw.replace(b'"rtol":0.0001', b'"rtol":1e999'),
        "byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
        "UTF-16": lambda raw: raw.decode().encode("utf-16"),
        "raw UTF-8": lambda raw: raw.replace(b"edgebundle 0", "édgebundle 0".encode()),
        "more digits than Python takes": lambda raw: raw.replace(b'"size":', b'"size":' + b"9" * 5000, 1),
        "second document": lambda raw: raw + raw,
        "empty": lambda _: b"",
        "array": lambda _: b"[]",
        "deep": lambda _: b"[" * 200_000,
    }.items(),
)
def test_manifest_in_another_encoding_is_refused(
    kit: Any, name: str, change: Callable[[bytes], bytes]
) -> None:
    raw = kit.manifest().to_bytes()
    changed = change(raw)
    assert changed != raw
    with pytest.raises(FormatError):
        Manifest.from_bytes(changed)


def test_manifest_over_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(EndlessDataError):
        Manifest.from_bytes(b"[" * (512 * 1024 + 1))


def test_message_names_the_place_and_both_sides(kit: Any) -> None:
    document = json.loads(kit.manifest().to_bytes())
    document["target"]["cpu"] = 5
    with pytest.raises(FormatError, match=r"manifest\.target\.cpu: expected a string, got 5"):
        Manifest.from_bytes(encode(document))


def test_incomplete_manifest_is_not_written(kit: Any) -> None:
    with pytest.raises(FormatError, match=r"mod\.json"):
        kit.manifest(files={}).to_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [("board", ""), ("board", "a\nb"), ("speedup", 0.0), ("low", -1.0), ("high", float("inf")), ("pairs", 0)],
)
def test_impossible_tuning_result_is_refused(field: str, value: object) -> None:
    fields = {
        "board": "pi:9091", "untuned_ms": 2.0, "tuned_ms": 1.0,
        "speedup": 2.0, "low": 1.9, "high": 2.1, "pairs": 21,
    }  # fmt: skip
    assert Tuning(**fields).speedup == 2.0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        Tuning(**{**fields, field: value})  # type: ignore[arg-type]
