"""State of a model: outputs that are inputs of the next run, kept on the device between requests.

Promises that a declaration fits the model's tensors. Leaves keeping the values to `agent.runtime.state`, and
who may have how many of them to `agent.runtime.sessions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.bundle.canonical_json import LATER
from agent.bundle.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class State:
    """One tensor that is kept: an output of a run that is an input of the next run.

    Attributes
    ----------
    input, output
        Names of the model's input and output, of the same shape and datatype.
    initial
        Value of every element before the first run. None means 0.
    most
        Largest value after a run; a step beyond it is refused, because the state is full. Only of an integer:
        the length of caches, for example. None means any.
    """

    input: str
    output: str
    initial: float | None = field(default=None, metadata=LATER)
    most: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if self.initial is not None and not math.isfinite(self.initial):
            raise ValueError(f"initial: expected a finite number, got {self.initial}")
        if self.most is not None and not 0 <= self.most < 1 << 31:
            raise ValueError(f"most: expected 0 to {(1 << 31) - 1}, got {self.most}")


def check_states(
    states: Sequence[State], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    """Check that a model can be run with these states.

    Raises
    ------
    ValueError
        If a tensor does not exist or is declared twice, an input and its output differ in shape or datatype,
        an initial value is out of the datatype's range, or no input or no output is left for requests.
    """
    if not states:
        raise ValueError("states: expected at least one, or no such key, got none")
    given = {spec.name: spec for spec in inputs}
    made = {spec.name: spec for spec in outputs}
    for state in states:
        for kind, name, known in (("input", state.input, given), ("output", state.output, made)):
            if name not in known:
                raise ValueError(f"states: the {kind} {name!r:.80} does not exist")
        before, after = given[state.input], made[state.output]
        if (before.datatype, before.shape) != (after.datatype, after.shape):
            raise ValueError(f"states: expected the same datatype and shape, got {before} and {after}")
        _check_initial(state, before)
        if state.most is not None and (before.datatype, before.shape) != ("INT64", (1,)):
            raise ValueError(f"states: expected a state with a largest value as INT64[1], got {before}")
    for kind, names, count in (
        ("input", [state.input for state in states], len(inputs)),
        ("output", [state.output for state in states], len(outputs)),
    ):
        if len(set(names)) != len(names):
            raise ValueError(f"states: expected each {kind} once, got a duplicate")
        if len(names) == count:
            raise ValueError(f"states: expected an {kind} besides the states, got none")


def state_bytes(states: Sequence[State] | None, inputs: Sequence[TensorSpec]) -> int:
    """Return the bytes of one session's state."""
    names = {state.input for state in states or ()}
    return sum(spec.nbytes for spec in inputs if spec.name in names)


def requested(specs: Sequence[TensorSpec], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Return the tensors that requests and answers have: those that are not among the states' `names`."""
    kept = set(names)
    return tuple(spec for spec in specs if spec.name not in kept)


def _check_initial(state: State, spec: TensorSpec) -> None:
    value = state.initial or 0.0
    if spec.datatype.startswith("FP"):
        return
    bits = 8 * spec.itemsize
    low, high = (0, 1) if spec.datatype == "BOOL" else (0, (1 << bits) - 1)
    if spec.datatype.startswith("INT"):
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if not (value.is_integer() and low <= value <= high):
        raise ValueError(f"states: expected an initial value of {spec.datatype}, got {value}")
