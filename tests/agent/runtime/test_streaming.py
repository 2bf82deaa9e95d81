"""A model that is run in steps: what it keeps, and when."""

from __future__ import annotations

import numpy as np
import pytest

from agent.bundle.graph import Graph
from agent.bundle.manifest import Manifest
from agent.bundle.state import State
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import SessionGoneError
from agent.runtime.graph_executor import create
from agent.runtime.streaming import StreamingModel
from tests.bundles import make_manifest
from tests.fake_module import FakeModule, GraphBuilder


def spec(name: str) -> TensorSpec:
    return TensorSpec(name, "FP32", (2,))


def described(*states: State, outputs: int = 2, inputs: tuple[str, ...] = ("x", "s")) -> Manifest:
    return make_manifest(
        {},
        inputs=tuple(map(spec, inputs)),
        outputs=tuple(spec(f"y{i}") for i in range(outputs)),
        states=states,
    )


def sums() -> Graph:
    """y0 = x + s, and y1 = 2 y0, the next s."""
    g = GraphBuilder()
    total = g.call("add", [g.input("x", (2,)), g.input("s", (2,))], (2,))
    return g.graph(total, g.call("double", [total], (2,)))


def step(model: StreamingModel, stream: object, module: object, x: float, *, commit: bool = True) -> float:
    module.set_input("x", np.full(2, x, np.float32))  # type: ignore[attr-defined]
    out = float(model.run(stream)["y0"][0])  # type: ignore[arg-type]
    if commit:
        model.commit(stream)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize(("initial", "first"), [(None, 1.0), (0.5, 1.5), (-3.0, -2.0)])
def test_a_stream_begins_with_the_declared_value_and_keeps_its_own(
    initial: float | None, first: float
) -> None:
    module = create(sums(), FakeModule())
    model = StreamingModel(described(State("s", "y1", initial)), module)
    a, b = model.begin(), model.begin()
    assert step(model, a, module, 1) == first
    assert step(model, a, module, 1) == 2 * first + 1
    assert step(model, b, module, 1) == first
    assert step(model, a, module, 0) == 2 * (2 * first + 1)


def test_a_step_that_is_not_committed_did_not_happen() -> None:
    module = create(sums(), FakeModule())
    model = StreamingModel(described(State("s", "y1")), module)
    stream = model.begin()
    step(model, stream, module, 5, commit=False)
    assert step(model, stream, module, 1) == 1
    assert step(model, stream, module, 0) == 2


def test_states_that_share_memory_are_not_mixed() -> None:
    """A delay line: the next `b` is `a` itself, and the next `a` is computed."""
    g = GraphBuilder()
    x, a, b = (g.input(name, (2,)) for name in ("x", "a", "b"))
    graph = g.graph(g.call("add", [a, b], (2,)), g.call("double", [x], (2,)), a)
    module = create(graph, FakeModule())
    # In this order, copying the first state would overwrite the second.
    states = (State("a", "y1"), State("b", "y2"))
    model = StreamingModel(described(*states, outputs=3, inputs=("x", "a", "b")), module)
    stream = model.begin()
    assert [step(model, stream, module, x) for x in (1, 2, 3, 4)] == [0, 2, 4 + 2, 6 + 4]
    model._memory.enter(stream.states)
    module.set_input("x", np.full(2, 9, np.float32))
    module.run()
    model._memory.advance()
    assert (module.get_input("a")[0], module.get_input("b")[0]) == (18, 8)


def counting(most: int | None, dtype: str = "INT64") -> Manifest:
    """A model that counts: the next `s` is x + s."""
    count = (TensorSpec("x", dtype, (1,)), TensorSpec("s", dtype, (1,)))
    outputs = (TensorSpec("y0", dtype, (1,)), TensorSpec("y1", dtype, (1,)))
    return make_manifest({}, inputs=count, outputs=outputs, states=(State("s", "y1", most=most),))


def test_a_step_beyond_the_largest_value_is_refused_and_did_not_happen() -> None:
    g = GraphBuilder()
    total = g.call("add", [g.input("x", (1,), "int64"), g.input("s", (1,), "int64")], (1,), dtype="int64")
    module = create(g.graph(total, g.call("double", [total], (1,), dtype="int64")), FakeModule())
    model = StreamingModel(counting(8), module)
    stream = model.begin()

    def add(number: int) -> int:
        module.set_input("x", np.array([number]))
        total = int(model.run(stream)["y0"][0])
        model.commit(stream)
        return total

    assert [add(1), add(2)] == [1, 4]  # and the state is 8
    with pytest.raises(SessionGoneError, match="the session is full: its state holds 8 steps"):
        add(1)
    assert add(-4) == 4


def test_only_a_length_has_a_largest_value() -> None:
    manifest = counting(8)
    with pytest.raises(ValueError, match=r"a state with a largest value as INT64\[1\], got s FP32"):
        counting(8, "FP32")
    with pytest.raises(ValueError, match="most: expected 0 to 2147483647, got -1"):
        counting(-1)
    assert manifest.states == (State("s", "y1", None, 8),)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ((State("s", "nothing"),), "output 'nothing' does not exist"),
        ((State("y1", "y1"),), "input 'y1' does not exist"),
        ((State("s", "y1"), State("s", "y0")), "got a duplicate"),
        ((State("s", "y1"), State("x", "y0")), "besides the states"),
        ((), "expected at least one"),
    ],
)
def test_states_that_do_not_fit_are_refused(states: tuple[State, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        described(*states)


def test_manifest_with_states_is_read_as_it_was_written() -> None:
    manifest = make_manifest(
        {"mod.so": b"", "mod.json": b"", "mod.params": b""},
        inputs=(spec("x"), spec("s")),
        outputs=(spec("y0"), spec("y1")),
        states=(State("s", "y1", 0.5),),
    )
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert b'"states":[{"initial":0.5,"input":"s","output":"y1"}]' in manifest.to_bytes()
