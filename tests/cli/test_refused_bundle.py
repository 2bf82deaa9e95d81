"""A refused bundle is reported with its file, its wire code and a hint, chosen by the class of the error."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import (
    BundleError,
    EndlessDataError,
    FormatError,
    IncompatibleError,
    RollbackError,
    SignatureError,
)
from builder.bundles.package import Package
from builder.cli.refused_bundle import naming_file
from builder.errors import PackageError
from builder.fleet.hints import deployment_hint


def refused(error: BundleError) -> PackageError:
    with pytest.raises(PackageError) as caught, naming_file("my.bundle"):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


def test_message_has_the_file_and_the_wire_code() -> None:
    assert str(refused(RollbackError("counter is 4"))) == "my.bundle: counter is 4 (ERR_ROLLBACK)"


def test_own_hint_of_a_refusal_is_kept() -> None:
    assert refused(SignatureError("not signed", hint="sign it")).hint == "sign it"


@pytest.mark.parametrize("error", [SignatureError, FormatError, EndlessDataError, BundleError])
def test_broken_file_gets_the_hint_for_a_broken_file(error: type[BundleError]) -> None:
    hint = refused(error("no")).hint
    assert hint is not None
    assert hint.startswith("expected the .bundle")


def test_good_file_for_another_device_gets_the_hint_of_a_deployment() -> None:
    hint = refused(IncompatibleError("no")).hint
    assert hint == deployment_hint(IncompatibleError.code)
    assert hint != refused(RollbackError("no")).hint


def test_unknown_code_of_an_agent_has_no_hint() -> None:
    assert deployment_hint("ERR_OF_TOMORROW") == ""
    assert deployment_hint("") == ""


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (b"\x89PNG\r\n", "a PNG picture", "give the bundle instead; pictures are for --inputs"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer", "git lfs pull"),
        (b"\x1f\x8b\x08", "a compressed file", "unpack it first"),
        (b"....TFL3", "a TensorFlow Lite file", "compile a model first: edgebundle compile MODEL"),
    ],
)
def test_a_file_that_is_no_bundle_is_told_by_its_first_bytes(
    tmp_path: Path, content: bytes, what: str, hint: str
) -> None:
    path = tmp_path / "my.bundle"
    path.write_bytes(content)
    with pytest.raises(PackageError, match=f"my.bundle: expected a bundle, got {what}$") as caught:
        Package.load(path)
    assert hint in caught.value.hint
    with (
        pytest.raises(PackageError, match=f"expected a bundle, got {what}$") as caught,
        naming_file(str(path)),
    ):
        raise FormatError("expected whole blocks")
    assert hint in caught.value.hint
