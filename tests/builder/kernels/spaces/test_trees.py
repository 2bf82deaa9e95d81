"""Tree ensembles as one kernel, compared bit by bit with a walk over single nodes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from builder.calls.trees import EQUAL, GREATER, LESS, MEMBER, EnsembleCall
from builder.codegen.lowering import build_kernels
from builder.kernels.spaces.packed_trees import pack
from builder.target.device_target import resolve
from tests.builder.importer.classic.forests import MODES, Forest, draw, reference, samples
from tests.builder.kernels.machines import Result, lower_expression, machine, run

CASES = {
    "shallow": (Forest(), 1),
    "shallow, a tile and a rest": (Forest(trees=5), 11),
    "less only": (Forest(tests=(LESS,)), 3),
    "greater": (Forest(tests=(GREATER | EQUAL,)), 3),
    "missing": (Forest(missing=True, trees=9), 9),
    "missing, greater": (Forest(missing=True, tests=(GREATER,)), 5),
    "every mode": (Forest(tests=MODES, missing=True, trees=20), 9),
    "categories": (Forest(tests=(MEMBER, LESS), missing=True, trees=9), 8),
    "deep and ragged": (Forest(depth=14, full=False, trees=10), 1),
    "deep, many samples": (Forest(depth=12, full=False, trees=3), 19),
    "a tree of one leaf": (Forest(depth=0, trees=3), 2),
    "doubles": (Forest(dtype="float64", missing=True), 4),
    "deep doubles, every mode": (Forest(dtype="float64", depth=11, full=False, tests=MODES), 3),
    "several targets": (Forest(targets=3), 9),
    "many targets, deep": (Forest(targets=7, depth=11, full=False, trees=4), 2),
    "one target a tree": (Forest(targets=4, one_target=True), 2),
    "one target a tree, deep": (Forest(targets=4, one_target=True, depth=11, full=False), 9),
    "minimum": (Forest(aggregate="MIN", targets=2, trees=3), 2),
    "maximum": (Forest(aggregate="MAX", trees=9, depth=10, full=False), 3),
}


def compute(forest: Forest, count: int, seed: int = 0) -> tuple[Result, np.ndarray, np.ndarray]:
    ensemble, x = draw(forest, seed), samples(forest, count, seed)

    def build(*params: relax.Var) -> relax.Expr:
        return EnsembleCall(params[0], ensemble).emit(relax.BlockBuilder.current())

    result = run(build, {"x": x}, machine(8))
    return result, result.outputs[0], reference(ensemble, x)


@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_a_walk(case: str) -> None:
    forest, count = CASES[case]
    result, got, expected = compute(forest, count)
    assert result.schedules == {"trees"}
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_shallow_trees_are_complete_and_others_are_nodes() -> None:
    assert pack(draw(Forest(depth=6)), 5, 8).complete
    assert not pack(draw(Forest(depth=14, full=False)), 5, 8).complete
    assert not pack(draw(Forest(tests=MODES)), 5, 8).complete
    # A test for less than minus infinity lets nothing pass, also not what stands for a missing value.
    lowest = draw(Forest(tests=(LESS,), missing=True))
    assert not pack(lowest, 5, 8).mixed
    lowest.threshold[:] = -np.inf
    assert pack(lowest, 5, 8).mixed


def test_zero_keeps_its_branch_beside_a_denormal_threshold() -> None:
    for test, threshold in ((LESS | EQUAL, -1e-40), (LESS, 1e-40)):
        ensemble = draw(Forest(trees=8, tests=(test,)))
        ensemble.threshold[:] = threshold
        moved = pack(ensemble, 5, 8).arrays[1]
        assert abs(moved).min() >= np.finfo("f4").tiny
        assert (np.sign(moved) == np.sign(threshold)).all()


def test_nodes_are_in_preorder_and_a_leaf_is_its_own_children() -> None:
    ensemble = draw(Forest(depth=12, full=False, trees=2))
    roots, nodes, values = pack(ensemble, 5, 1).arrays
    assert roots[0] == 0
    place = np.arange(len(nodes))
    leaf = nodes[:, 2] == place
    assert (nodes[leaf, 3] == place[leaf]).all()
    assert (nodes[~leaf, 2] == place[~leaf] + 1).all()
    assert (nodes[~leaf, 3] > nodes[~leaf, 2]).all()
    assert len(values) == leaf.sum()


def test_the_last_group_is_completed_without_changing_the_result() -> None:
    packed = pack(draw(Forest(trees=3, targets=2)), 5, 8)
    assert packed.trees == 8
    ensemble = replace(draw(Forest(trees=3)), aggregate="MAX")
    assert pack(ensemble, 5, 8).trees == 8


@pytest.mark.parametrize("forest", [Forest(depth=6, trees=16), Forest(depth=11, full=False, trees=16)])
def test_walks_load_and_do_not_gather(forest: Forest) -> None:
    """A chain of gathers takes up to twice as long as eight chains of loads."""
    target = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids")

    def build(*params: relax.Var) -> relax.Expr:
        return EnsembleCall(params[0], draw(forest)).emit(relax.BlockBuilder.current())

    for count in (1, 9):
        kernels = lower_expression(build, {"x": samples(forest, count)}, target).kernels
        assembly = build_kernels(kernels, target.tvm_target).inspect_source("asm")
        # At most the values of eight samples' leaves, after their walks.
        assert len(re.findall(r"^\s*v\w*gather", assembly, re.MULTILINE)) <= 1


def test_many_samples_of_a_deep_forest_are_shared_among_the_cores() -> None:
    for trees, shared in ((2, False), (400, True)):
        ensemble = draw(Forest(trees=trees, depth=9, full=False))

        def build(*params: relax.Var, ensemble: object = ensemble) -> relax.Expr:
            return EnsembleCall(params[0], ensemble).emit(relax.BlockBuilder.current())  # type: ignore[arg-type]

        lowered = run(build, {"x": samples(Forest(), 64)}, machine(8)).lowered
        (kernel,) = lowered.kernels.functions.values()
        assert ("T.parallel" in kernel.script()) == shared
