from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.bundle.archive import MANIFEST, pack
from agent.bundle.verify import verify
from agent.errors import MixAndMatchError
from builder.bundles.package import Package
from builder.errors import PackageError
from tests.bundles import FILES, KEY, KEYRING, build, make_manifest


@pytest.fixture
def package() -> Package:
    return Package(make_manifest(), FILES)


@pytest.mark.parametrize("signed", [False, True])
def test_saved_package_is_loaded_again(package: Package, tmp_path: Path, signed: bool) -> None:
    package = package.sign(KEY) if signed else package
    package.save(tmp_path / "a.bundle")
    assert Package.load(tmp_path / "a.bundle") == package
    assert package.to_bytes() == (tmp_path / "a.bundle").read_bytes()


def test_signed_package_verifies_on_a_device(package: Package, tmp_path: Path) -> None:
    package.sign(KEY).save(tmp_path / "a.bundle")
    with verify(tmp_path / "a.bundle", KEYRING) as bundle:
        assert bundle.manifest == package.manifest


def test_signing_twice_gives_the_same_bytes(package: Package) -> None:
    assert package.sign(KEY).to_bytes() == package.sign(KEY).sign(KEY).to_bytes()


@pytest.mark.parametrize(
    "members",
    [
        {**FILES, "mod.so": b"other code"},
        {name: data for name, data in FILES.items() if name != "mod.so"},
        {**FILES, "labels.txt": b"cat\n"},
    ],
    ids=["changed", "missing", "unlisted"],
)
def test_package_that_does_not_match_its_manifest_is_not_signed(
    package: Package, members: dict[str, bytes]
) -> None:
    with pytest.raises(MixAndMatchError, match=r"the manifest of echo does not match (mod\.so|labels\.txt)"):
        replace(package, members=members).sign(KEY)


def test_failed_save_leaves_the_old_file(package: Package, tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(PackageError, match="cannot be written"):
        package.save(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"PK\3\4", bytes(10240), b"x" * 2048, build()[:-512]])
def test_file_that_is_not_a_bundle_gets_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "not.bundle"
    path.write_bytes(content)
    with pytest.raises(PackageError, match="expected a bundle") as caught:
        Package.load(path)
    assert "\n" not in str(caught.value)


def test_bundle_without_a_manifest_is_refused(tmp_path: Path) -> None:
    assert MANIFEST not in FILES
    (tmp_path / "a.bundle").write_bytes(pack(FILES))
    with pytest.raises(PackageError, match=r"it has no manifest\.json"):
        Package.load(tmp_path / "a.bundle")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"absent\.bundle: cannot be read"):
        Package.load(tmp_path / "absent.bundle")
