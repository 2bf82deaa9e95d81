from __future__ import annotations

import pytest

from builder.compiling.identity import Identity, bundle_name
from builder.errors import ModelError


def test_a_name_is_made_of_a_files_name() -> None:
    assert bundle_name("ResNet 50 (v2)") == "resnet-50-v2"
    assert bundle_name("...") == "model"


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (Identity(name="No Spaces"), "name: expected"),
        (Identity(version="1.0"), "version: expected"),
        (Identity(security_counter=-1), "security_counter: expected"),
        (Identity(compatible=["a b"]), "compatible: expected"),
        (Identity(compatible="raspberrypi,4-model-b"), "a sequence of compatible strings"),
    ],
)
def test_what_the_manifest_does_not_allow_is_refused(identity: Identity, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        identity.check()


def test_the_counter_is_the_time_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert Identity().counter() == 1_700_000_000
    assert Identity(security_counter=3).counter() == 3
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(ModelError, match="SOURCE_DATE_EPOCH"):
        Identity().counter()
