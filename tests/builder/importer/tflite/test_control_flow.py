"""Subgraphs, loops and variables: written out where they are static, refused where they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tflite
from numpy.typing import NDArray

from builder.errors import UnsupportedOperatorError
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


def with_variable(*, counts: bool) -> tuple[FileSubgraph, FileSubgraph]:
    """Add a variable, which is set once, to x; with `counts`, also write the sum back."""
    main, setup = FileSubgraph(), FileSubgraph()
    setup.op("ASSIGN_VARIABLE", [variable(setup), setup.constant(X)], [], "AssignVariableOptions")
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


def test_a_variable_that_counts_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="from one inference to the next"):
        run_converted(write(*with_variable(counts=True)), [X])


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
