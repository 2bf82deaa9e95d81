"""Subgraphs, loops and variables: written out where they are static, states where they are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tflite
from numpy.typing import NDArray

from builder.errors import UnsupportedOperatorError
from builder.importer.tflite.conversion import convert
from builder.importer.tflite.schema import read
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

X: NDArray[np.float32] = np.linspace(-2, 3, 6, dtype=np.float32).reshape(2, 3)


def one_operator(code: str, shape: tuple[int, ...] = (2, 3), **fields: Any) -> FileSubgraph:
    """A subgraph of one operator with one input and one output."""
    graph = FileSubgraph()
    graph.inputs, graph.outputs = [graph.tensor(shape)], [graph.tensor(shape)]
    graph.op(code, graph.inputs, graph.outputs, **fields)
    return graph


def agree(feeds: list[Any], *graphs: FileSubgraph) -> None:
    raw = write(*graphs)
    theirs = run_litert(raw, feeds)
    assert not isinstance(theirs, str), theirs
    assert distance(run_converted(raw, feeds), theirs) < 1e-5


def branches(condition: Any) -> FileSubgraph:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((2, 3))]
    known = condition is not None
    which = graph.constant(np.asarray(condition)) if known else graph.tensor((), "bool")
    graph.inputs += [] if known else [which]
    graph.outputs = [graph.tensor((2, 3))]
    graph.op("IF", [which, 0], graph.outputs, "IfOptions", ThenSubgraphIndex=1, ElseSubgraphIndex=2)
    return graph


@pytest.mark.parametrize("condition", [True, False])
def test_a_branch_that_is_known(condition: bool) -> None:
    agree([X], branches(condition), one_operator("ABS"), one_operator("NEG"))


@pytest.mark.parametrize("condition", [True, False])
def test_a_branch_that_is_chosen_at_run_time(condition: bool) -> None:
    agree([X, np.asarray(condition)], branches(None), one_operator("ABS"), one_operator("NEG"))


def loop(steps: int, *, known: bool = True) -> tuple[FileSubgraph, FileSubgraph, FileSubgraph]:
    """While a counter is below `steps`: x = tanh(x) and the counter grows."""
    main, cond, body = (FileSubgraph() for _ in range(3))
    counter = main.constant(0) if known else main.tensor((), "int32")
    x = main.tensor((2, 3))
    main.inputs = [x] if known else [counter, x]
    last, y = main.tensor((), "int32"), main.tensor((2, 3))
    main.outputs = [y]
    main.op("WHILE", [counter, x], [last, y], "WhileOptions", CondSubgraphIndex=1, BodySubgraphIndex=2)
    cond.inputs = [cond.tensor((), "int32"), cond.tensor((2, 3))]
    cond.outputs = [cond.tensor((), "bool")]
    cond.op("LESS", [0, cond.constant(steps)], cond.outputs)
    body.inputs = [body.tensor((), "int32"), body.tensor((2, 3))]
    body.outputs = [body.tensor((), "int32"), body.tensor((2, 3))]
    body.op("ADD", [0, body.constant(1)], [2], "AddOptions")
    body.op("TANH", [1], [3])
    return main, cond, body


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_loop_of_known_length(steps: int) -> None:
    agree([X], *loop(steps))


def test_a_loop_whose_length_is_not_known() -> None:
    with pytest.raises(UnsupportedOperatorError, match="its length depends on values"):
        run_converted(write(*loop(3, known=False)), [np.asarray(0, np.int32), X])


def test_a_loop_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.importer.tflite.control_flow.MAX_STEPS", 20)
    agree([X], *loop(20))
    with pytest.raises(UnsupportedOperatorError, match="at most 20 steps"):
        run_converted(write(*loop(21)), [X])


def test_a_composite_is_its_definition() -> None:
    main = one_operator(
        "STABLEHLO_COMPOSITE",
        options="StableHLOCompositeOptions",
        Name="odml.abs",
        DecompositionSubgraphIndex=1,
    )
    [result] = run_converted(write(main, one_operator("ABS")), [X])
    assert np.array_equal(result, np.abs(X))


def test_a_subgraph_that_calls_itself() -> None:
    main = one_operator(
        "STABLEHLO_COMPOSITE", options="StableHLOCompositeOptions", DecompositionSubgraphIndex=0
    )
    with pytest.raises(UnsupportedOperatorError, match="too often"):
        run_converted(write(main), [X])


def test_a_subgraph_that_does_not_exist() -> None:
    main = one_operator(
        "STABLEHLO_COMPOSITE", options="StableHLOCompositeOptions", DecompositionSubgraphIndex=7
    )
    with pytest.raises(UnsupportedOperatorError, match="expected one of 1 subgraphs, got 7"):
        run_converted(write(main), [X])


def variable(graph: FileSubgraph) -> int:
    handle = graph.tensor((), "resource")
    graph.op("VAR_HANDLE", [], [handle], "VarHandleOptions", Container="c", SharedName="v")
    return handle


def with_variable(*, counts: bool, first: NDArray[np.float32] = X) -> tuple[FileSubgraph, FileSubgraph]:
    """Add a variable, which is set once, to x; with `counts`, also write the sum back."""
    main, setup = FileSubgraph(), FileSubgraph()
    setup.op("ASSIGN_VARIABLE", [variable(setup), setup.constant(first)], [], "AssignVariableOptions")
    main.inputs = [main.tensor((2, 3))]
    main.op("CALL_ONCE", [], [], "CallOnceOptions", InitSubgraphIndex=1)
    handle, value, total = variable(main), main.tensor((2, 3)), main.tensor((2, 3))
    main.op("READ_VARIABLE", [handle], [value], "ReadVariableOptions")
    main.op("ADD", [0, value], [total], "AddOptions")
    if counts:
        main.op("ASSIGN_VARIABLE", [handle, total], [], "AssignVariableOptions")
    main.outputs = [total]
    return main, setup


def test_a_variable_that_is_only_read() -> None:
    agree([X], *with_variable(counts=False))


def in_steps(count: int, *graphs: FileSubgraph) -> list[NDArray[Any]]:
    """Check that a stream of runs agrees with the interpreter's; return its outputs."""
    raw = write(*graphs)
    rng = np.random.default_rng(3)
    model = read(raw, "file")
    inputs = [model.subgraphs[0].tensors[index] for index in model.subgraphs[0].inputs]
    steps = []
    for _ in range(count):
        values = [np.asarray(rng.uniform(-9, 9, each.shape)) for each in inputs]
        steps.append(
            [
                np.asarray(v > 0 if t.dtype == "bool" else v, t.dtype)
                for v, t in zip(values, inputs, strict=True)
            ]
        )
    theirs = run_litert(raw, [], steps=steps)
    assert not isinstance(theirs, str), theirs
    ours = run_converted(raw, [], steps=steps)
    assert distance(ours, theirs) < 1e-5
    return ours


FIRST: dict[str, NDArray[Any]] = {
    "zeros": np.zeros((2, 3), np.float32),
    "one number": np.full((2, 3), 0.1, np.float32),
    "different numbers": X,
    "negative zeros": np.full((2, 3), -0.0, np.float32),
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_a_variable_that_counts_is_a_state(first: NDArray[np.float32]) -> None:
    in_steps(4, *with_variable(counts=True, first=first))


def test_only_states_that_begin_with_different_numbers_need_a_flag() -> None:
    for first, count in ((FIRST["one number"], 1), (X, 2)):
        model = read(write(*with_variable(counts=True, first=first)), "file")
        assert len(convert(model, "file").states) == count


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_a_window_of_bytes_begins_with_its_zero_point(dtype: str) -> None:
    """As streaming keyword models have it: the last two rows of the window go into the next one."""
    scales: dict[str, Any] = {"scales": [0.1], "zeros": [0 if dtype == "int16" else 17]}
    zero = scales["zeros"][0]
    main, setup = FileSubgraph(), FileSubgraph()
    rows = setup.constant(np.full((1, 2, 3), zero, dtype), **scales)
    setup.op("ASSIGN_VARIABLE", [variable(setup), rows], [], "AssignVariableOptions")
    x = main.tensor((1, 1, 3), dtype, **scales)
    main.op("CALL_ONCE", [], [], "CallOnceOptions", InitSubgraphIndex=1)
    handle, before = variable(main), main.tensor((1, 2, 3), dtype, **scales)
    window, after = main.tensor((1, 3, 3), dtype, **scales), main.tensor((1, 2, 3), dtype, **scales)
    main.op("READ_VARIABLE", [handle], [before], "ReadVariableOptions")
    main.op("CONCATENATION", [before, x], [window], "ConcatenationOptions", Axis=1)
    start, sizes = main.constant(np.array([0, 1, 0])), main.constant(np.array([1, 2, 3]))
    main.op("SLICE", [window, start, sizes], [after])
    main.op("ASSIGN_VARIABLE", [handle, after], [], "AssignVariableOptions")
    main.inputs, main.outputs = [x], [window]
    first = in_steps(3, main, setup)[0]
    assert np.array_equal(first[0, :2], np.full((2, 3), zero))


def test_a_variable_that_is_written_before_it_is_read_is_no_state() -> None:
    main, setup = FileSubgraph(), FileSubgraph()
    setup.op("ASSIGN_VARIABLE", [variable(setup), setup.constant(X)], [], "AssignVariableOptions")
    x, doubled, value, y = (main.tensor((2, 3)) for _ in range(4))
    main.op("CALL_ONCE", [], [], "CallOnceOptions", InitSubgraphIndex=1)
    handle = variable(main)
    main.op("ADD", [x, x], [doubled], "AddOptions")
    main.op("ASSIGN_VARIABLE", [handle, doubled], [], "AssignVariableOptions")
    main.op("READ_VARIABLE", [handle], [value], "ReadVariableOptions")
    main.op("ADD", [x, value], [y], "AddOptions")
    main.op("ASSIGN_VARIABLE", [handle, y], [], "AssignVariableOptions")
    main.inputs, main.outputs = [x], [y]
    in_steps(3, main, setup)
    assert convert(read(write(main, setup), "file"), "file").states == ()


@pytest.mark.parametrize("reads", [True, False])
def test_a_variable_that_one_branch_sets(reads: bool) -> None:
    """It keeps what it had where the other branch is taken."""
    main, setup, sets, leaves = (FileSubgraph() for _ in range(4))
    setup.op("ASSIGN_VARIABLE", [variable(setup), setup.constant(X)], [], "AssignVariableOptions")
    for graph in (sets, leaves):
        graph.inputs = graph.outputs = [graph.tensor((2, 3))]
    sets.op("ASSIGN_VARIABLE", [variable(sets), 0], [], "AssignVariableOptions")
    x, which, same, value, y = (main.tensor((2, 3), "bool" if i == 1 else "float32") for i in range(5))
    main.tensors[which].shape = ()
    main.op("CALL_ONCE", [], [], "CallOnceOptions", InitSubgraphIndex=1)
    handle = variable(main)
    if reads:
        main.op("READ_VARIABLE", [handle], [main.tensor((2, 3))], "ReadVariableOptions")
    main.op("IF", [which, x], [same], "IfOptions", ThenSubgraphIndex=2, ElseSubgraphIndex=3)
    main.op("READ_VARIABLE", [handle], [value], "ReadVariableOptions")
    main.op("ADD", [same, value], [y], "AddOptions")
    main.inputs, main.outputs = [x, which], [y]
    in_steps(6, main, setup, sets, leaves)


def test_a_variable_that_changes_its_shape() -> None:
    main, setup = with_variable(counts=True)
    main.operators.pop()
    both = main.tensor((4, 3))
    main.op("CONCATENATION", [0, 0], [both], "ConcatenationOptions", Axis=0)
    main.op("ASSIGN_VARIABLE", [main.operators[1].outputs[0], both], [], "AssignVariableOptions")
    with pytest.raises(UnsupportedOperatorError, match=r"expected float32\[2, 3\].*got float32\[4, 3\]"):
        run_converted(write(main, setup), [X])


def test_a_variable_that_nothing_sets() -> None:
    main = FileSubgraph()
    main.inputs = [main.tensor((2, 3))]
    value, total = main.tensor((2, 3)), main.tensor((2, 3))
    main.op("READ_VARIABLE", [variable(main)], [value], "ReadVariableOptions")
    main.op("ADD", [0, value], [total], "AddOptions")
    main.outputs = [total]
    with pytest.raises(UnsupportedOperatorError, match="nothing sets its variable"):
        run_converted(write(main), [X])


def test_operators_are_of_the_schema() -> None:
    from builder.importer.tflite.control_flow import STATIC

    assert all(hasattr(tflite.BuiltinOperator, name) for name in STATIC)
