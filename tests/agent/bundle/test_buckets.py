from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.bundle.buckets import EDGE, Buckets, Dimension, InputAxis, OutputAxis
from agent.bundle.manifest import Manifest
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError
from tests.bundles import FILES, make_manifest

SEQUENCE = Dimension("sequence", 1, 64, (16, 32, 64))
IDS = TensorSpec("ids", "INT64", (1, 64))
MASK = TensorSpec("mask", "BOOL", (1, 64))
OUT = TensorSpec("y", "FP32", (1, 64, 8))
BUCKETS = Buckets(
    (SEQUENCE,),
    (InputAxis("ids", 1, "sequence", value=2.0), InputAxis("mask", 1, "sequence")),
    (OutputAxis("y", 1, "sequence"),),
)
INPUTS = {"ids": IDS, "mask": MASK}
MEMBERS = {**FILES, "buckets/00.json": b"{}", "buckets/01.json": b"{}"}


def manifest(**changes: Any) -> Manifest:
    return make_manifest(MEMBERS, **{"inputs": (IDS, MASK), "outputs": (OUT,), "buckets": BUCKETS, **changes})


def test_a_manifest_with_buckets_is_read_as_it_was_written() -> None:
    raw = manifest().to_bytes()
    assert Manifest.from_bytes(raw) == manifest()
    assert b'"high":64' in raw


def test_the_smallest_bucket_that_holds_a_request() -> None:
    assert [BUCKETS.smallest_for((n,)) for n in (1, 16, 17, 32, 33, 64)] == [0, 0, 1, 1, 2, 2]
    assert BUCKETS.members() == ("buckets/00.json", "buckets/01.json", "mod.json")


def test_buckets_of_two_dimensions_are_numbered_as_their_sizes() -> None:
    batch = Dimension("batch", 1, 4, (1, 4))
    both = Buckets((batch, SEQUENCE), (InputAxis("x", 0, "batch"), InputAxis("x", 1, "sequence")), ())
    sizes = list(both.sizes())
    assert sizes[-1] == (4, 64)
    for wanted in [(1, 1), (2, 16), (1, 33), (4, 20)]:
        got = sizes[both.smallest_for(wanted)]
        assert all(a >= b for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"ids": (1, 65)}, r"sequence must be from 1 to 64"),
        ({"ids": (1, 0)}, r"sequence must be from 1 to 64"),
        ({"ids": (1, 10**40)}, r"got \[1,huge\]"),
        ({"ids": (64,)}, r"expects INT64\[1,sequence=1\.\.64\], got \[64\]"),
        ({"ids": (1, 5), "mask": (1, 6)}, "one size of sequence, got 5 in input 'ids' and 6 in 'mask'"),
    ],
)
def test_sizes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BUCKETS.sizes_of(shapes, INPUTS)


def test_sizes_from_the_number_of_bytes() -> None:
    assert BUCKETS.shapes_of_bytes(9 * 5, INPUTS) == {"ids": (1, 5), "mask": (1, 5)}
    for nbytes in (0, 9 * 5 + 1, 9 * 65, 10**12):
        with pytest.raises(InputError, match=r"sequence=1\.\.64"):
            BUCKETS.shapes_of_bytes(nbytes, INPUTS)


def test_an_output_whose_size_is_computed() -> None:
    strided = OutputAxis("y", 1, "sequence", multiply=2, add=3, divide=4, offset=1)
    assert [strided(n) for n in (1, 4, 5, 64)] == [3, 3, 5, 33]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimensions": ()}, "1 to 4 dimensions"),
        ({"dimensions": (SEQUENCE, SEQUENCE)}, "same name"),
        ({"inputs": (InputAxis("ids", 1, "other"),)}, "follows 'other'"),
        ({"inputs": (InputAxis("ids", 2, "sequence"),)}, "no axis 2"),
        ({"inputs": (InputAxis("nope", 1, "sequence"),)}, "no axis 1 of input 'nope'"),
        ({"inputs": (InputAxis("ids", 0, "sequence"),)}, "expected 64, the largest sequence"),
        ({"inputs": (InputAxis("ids", 1, "sequence", value=0.5),)}, "not a value of INT64"),
        ({"inputs": (InputAxis("ids", 1, "sequence", value=2.0**63),)}, "not a value of INT64"),
        ({"inputs": (InputAxis("mask", 1, "sequence", value=2.0),)}, "not a value of BOOL"),
        ({"outputs": (OutputAxis("y", 1, "sequence", multiply=2),)}, "expected 128, got 64"),
        ({"batch": "sequence"}, "first axis of every input and output"),
        ({"inputs": (*BUCKETS.inputs, BUCKETS.inputs[0])}, "duplicate"),
    ],
)
def test_rules_that_do_not_fit_the_model(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manifest(buckets=replace(BUCKETS, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"low": 0},
        {"high": 1 << 40},
        {"sizes": (32, 16, 64)},
        {"sizes": (16, 32)},
        {"sizes": ()},
        {"name": ""},
    ],
)
def test_dimensions_without_sense(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(SEQUENCE, **change)


def test_padding_with_an_edge_has_no_value() -> None:
    assert InputAxis("x", 1, "n", EDGE).value == 0
    for pad, value in ((EDGE, 1.0), ("mirror", 0.0)):
        with pytest.raises(ValueError, match="expected"):
            InputAxis("x", 1, "n", pad, value)


def test_graphs_and_buckets_must_agree() -> None:
    with pytest.raises(FormatError, match=r"lack buckets/01\.json"):
        make_manifest(
            {k: v for k, v in MEMBERS.items() if k != "buckets/01.json"},
            inputs=(IDS, MASK),
            outputs=(OUT,),
            buckets=BUCKETS,
        ).to_bytes()
    with pytest.raises(FormatError, match=r"buckets/02\.json, the graph of no bucket"):
        make_manifest(
            {**MEMBERS, "buckets/02.json": b"{}"}, inputs=(IDS, MASK), outputs=(OUT,), buckets=BUCKETS
        ).to_bytes()
