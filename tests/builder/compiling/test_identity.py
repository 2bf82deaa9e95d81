"""Names, versions and counters of bundles."""

from __future__ import annotations

import pytest

from builder.compiling.identity import Identity, bundle_name
from builder.errors import ModelError


def test_a_files_name_becomes_a_models_name() -> None:
    assert bundle_name("ResNet 50 (v2)") == "resnet-50-v2"
    assert bundle_name("***") == "model"


def test_the_counter_is_the_time_of_the_build_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234")
    assert (Identity().counter(), Identity(security_counter=7).counter()) == (1234, 7)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(ModelError, match="number of seconds"):
        Identity().counter()


def test_a_name_that_no_manifest_allows_gets_an_example() -> None:
    with pytest.raises(ModelError, match="name: expected") as caught:
        Identity("No Spaces").check()
    assert caught.value.hint == "for example no-spaces"


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
