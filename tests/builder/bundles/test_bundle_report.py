from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.archive import MANIFEST, pack
from agent.bundle.columns import Column, InputColumns
from agent.bundle.keyring import Keyring, key_id
from agent.bundle.processing import Postprocess, Softmax, TopK
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, MixAndMatchError, SignatureError
from builder.bundles.bundle_report import WIDTH, BundleReport, inspect_bundle
from builder.errors import PackageError
from tests.bundles import FILES, KEY, KEYRING, build, make_manifest, signed_members

STRANGERS = Keyring.of([ec.generate_private_key(ec.SECP256R1()).public_key()])


def report(folder: Path, content: bytes, keyring: Keyring | None = None) -> BundleReport:
    path = folder / "a.bundle"
    path.write_bytes(content)
    return inspect_bundle(path, keyring)


def row(found: BundleReport, name: str) -> str:
    return next(line for line in found.lines() if line.startswith(f"  {name} "))


def unsigned(files: Mapping[str, bytes] = FILES) -> bytes:
    return pack({**files, MANIFEST: make_manifest(files).to_bytes()})


def test_unsigned_bundle_is_described_and_marked(tmp_path: Path) -> None:
    found = report(tmp_path, unsigned())
    assert (found.signed, found.key_id, found.digest, found.refusal) == (False, None, None, None)
    assert found.lines()[0] == "echo 1.0.0"
    assert "devices refuse this bundle" in row(found, "signature")


def test_the_type_of_the_numbers_in_bytes_is_shown(tmp_path: Path) -> None:
    spec = TensorSpec("y", "UINT8", (1, 4))
    manifest = make_manifest(outputs=(spec,), number_types={"y": "FLOAT8E5M2"})
    found = report(tmp_path, pack({**FILES, MANIFEST: manifest.to_bytes()}))
    assert row(found, "output").endswith("y UINT8 [1, 4], each byte holds FLOAT8E5M2")


def test_without_keys_the_signature_is_not_checked(tmp_path: Path) -> None:
    found = report(tmp_path, build())
    assert found.signed
    assert "not checked" in row(found, "signature")
    assert found.to_json()["verified"] is False


def test_trusted_key_is_named_with_the_digest(tmp_path: Path) -> None:
    found = report(tmp_path, build(), KEYRING)
    signer = key_id(KEY.public_key())
    assert found.key_id == signer
    assert found.to_json()["verified"] is True
    assert f"verified, by key {signer}" in row(found, "signature")
    assert found.digest is not None
    assert found.digest in row(found, "digest")


def test_wrong_key_is_reported_and_not_raised(tmp_path: Path) -> None:
    found = report(tmp_path, build(), STRANGERS)
    assert isinstance(found.refusal, SignatureError)
    assert found.key_id is None
    assert "DOES NOT VERIFY (ERR_ARBITRARY_SOFTWARE)" in row(found, "signature")
    assert found.to_json()["refusal"] == "ERR_ARBITRARY_SOFTWARE"


def test_changed_file_is_reported(tmp_path: Path) -> None:
    found = report(tmp_path, pack({**signed_members(), "mod.so": b"\x7fELF evil"}), KEYRING)
    assert isinstance(found.refusal, MixAndMatchError | SignatureError)
    assert found.key_id is None


def test_lines_are_no_longer_than_a_terminal(tmp_path: Path) -> None:
    device_types = tuple(f"vendor,board-{i}" for i in range(20))
    steps = Postprocess((Softmax("y"), TopK("y", 5)))
    found = report(tmp_path, build(compatible=device_types, postprocess=steps))
    assert all(len(line) <= WIDTH for line in found.lines())
    assert "softmax of y, then the 5 largest of y" in row(found, "after")


def test_texts_of_columns_are_listed_with_what_others_count_as(tmp_path: Path) -> None:
    cities = tuple(f"city {place}" for place in range(10))
    columns = (Column("wall", ("red", "blue")), Column("city", cities, -1), Column("height"))
    spec = TensorSpec("x", "FP32", (1, 3))
    found = report(tmp_path, build(inputs=(spec,), columns=(InputColumns("x", columns),)))
    lines = " ".join(" ".join(line.split()) for line in found.lines())
    assert "text wall: red, blue; any other is refused" in lines
    assert "city 7 and 2 more; any other counts as unknown" in lines
    assert "height" not in lines


def test_sizes_are_in_units_that_people_read(tmp_path: Path) -> None:
    found = report(tmp_path, unsigned({**FILES, "mod.params": bytes(3 << 20)}))
    assert any("mod.params" in line and "3.0 MiB" in line for line in found.lines())


def test_file_that_is_not_a_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        report(tmp_path, b"x" * 2048)
    with pytest.raises(FormatError, match=r"no manifest\.json"):
        report(tmp_path, pack(FILES))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"cannot read the bundle .*absent"):
        inspect_bundle(tmp_path / "absent")


def test_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((FormatError, PackageError)):
        inspect_bundle(tmp_path / "pipe")
