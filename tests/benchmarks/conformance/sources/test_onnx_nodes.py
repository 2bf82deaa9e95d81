"""A sample of ONNX's node tests, as `make conformance` runs all of them."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from onnx.backend.test.case import test_case

from benchmarks.conformance import trial
from benchmarks.conformance.case import Case, read, write
from benchmarks.conformance.sources import onnx_nodes
from benchmarks.conformance.trial import try_case
from benchmarks.conformance.verdict import APART, FIXED, REFUSED, RIGHT, WRONG

# What a run tries. Another seed tries others; all of them take half an hour.
SEED = 33
MODULES = 20
CASES = 2  # of each


def sample() -> list[tuple[str, int]]:
    chosen = random.Random(SEED).sample(onnx_nodes.modules(), MODULES)
    return [(module, number) for module in sorted(chosen) for number in range(CASES)]


def made(case: test_case.TestCase, folder: Path) -> Case:
    write(folder / "case", onnx_nodes.make(case, folder))
    return read(folder / "case")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "number"), sample())
def test_a_sampled_node_test_is_right_or_refused(module: str, number: int, tmp_path: Path) -> None:
    cases = [case for case in onnx_nodes.collected([module]) if case.data_sets]
    case = cases[random.Random(SEED + number).randrange(len(cases))]
    verdict = try_case(made(case, tmp_path))
    assert verdict.kind in (RIGHT, FIXED, REFUSED, APART), (case.name, verdict)


def test_a_wrong_number_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = [case for case in onnx_nodes.collected(["add"]) if case.name == "test_add"]
    found = made(case, tmp_path)
    assert try_case(found).kind == RIGHT
    # Where ONNX Runtime agrees with us, the source is disputed.
    assert try_case(dataclasses.replace(found, outputs=[found.outputs[0] + 1])).kind == APART
    monkeypatch.setattr(trial, "_run", lambda *_: ("", [found.outputs[0] + 1]))
    wrong = try_case(found)
    assert wrong.kind == WRONG
    assert "60 of 60 elements differ" in wrong.reason


def test_a_shape_as_an_input_is_fixed(tmp_path: Path) -> None:
    [case] = [
        case
        for case in onnx_nodes.collected(["split"])
        if case.name == "test_split_variable_parts_1d_opset18"
    ]
    assert try_case(made(case, tmp_path)).kind == FIXED


def test_random_numbers_are_counted_apart(tmp_path: Path) -> None:
    [case] = [case for case in onnx_nodes.collected(["bernoulli"]) if case.name == "test_bernoulli"]
    verdict = try_case(made(case, tmp_path))
    assert (verdict.kind, verdict.reason) == (APART, "random numbers")
