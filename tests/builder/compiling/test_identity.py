"""Names, versions and counters of bundles."""

from __future__ import annotations

import time

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


@pytest.mark.parametrize(
    ("counter", "hint"),
    [
        (int(time.time()) * 1000, f"use seconds: --security-counter {int(time.time())}"),
        (int(time.time()) + 3 * 86_400, "--counter-ahead-of-time if it is meant"),
        ((1 << 63) - 1, "--counter-ahead-of-time if it is meant"),
    ],
    ids=["milliseconds", "three days ahead", "the largest"],
)
def test_counter_that_devices_would_refuse_is_refused_unless_it_is_meant(counter: int, hint: str) -> None:
    with pytest.raises(ModelError, match=f"would lock out later builds.*got {counter}") as caught:
        Identity(security_counter=counter).check()
    assert hint in (caught.value.hint or "")
    Identity(security_counter=counter, counter_ahead_of_time=True).check()


def test_build_whose_date_lies_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(int(time.time()) + 3 * 86_400))
    with pytest.raises(ModelError, match="would lock out later builds"):
        Identity().check()


@pytest.mark.parametrize(
    "counter", [0, 1, 2, 3, int(time.time()) + 86_400], ids=["0", "1", "2", "3", "a day ahead"]
)
def test_small_counters_and_a_clock_that_is_a_day_ahead_are_fine(counter: int) -> None:
    Identity(security_counter=counter).check()
