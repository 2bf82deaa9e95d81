"""Strict JSON: repeated keys and constants that are not JSON."""

from __future__ import annotations

import json

import pytest

from agent.bundle.strict_json import refuse_constant, unique_object


def test_duplicate_key_is_named() -> None:
    with pytest.raises(ValueError, match="duplicate key 'a'"):
        json.loads('{"a":1,"b":{"a":1},"a":2}', object_pairs_hook=unique_object)


def test_long_duplicate_key_is_cut() -> None:
    with pytest.raises(ValueError, match="duplicate key") as caught:
        json.loads('{{"{}":1,"{}":2}}'.format("é" * 1000, "é" * 1000), object_pairs_hook=unique_object)
    assert len(str(caught.value)) < 100
    assert str(caught.value).isascii()


def test_same_key_in_different_objects_is_no_duplicate() -> None:
    assert json.loads('{"a":{"a":1}}', object_pairs_hook=unique_object) == {"a": {"a": 1}}


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_are_refused(constant: str) -> None:
    with pytest.raises(ValueError, match=f"{constant} is not a JSON number"):
        json.loads(f'{{"a":[{constant}]}}', parse_constant=refuse_constant)
