"""Which outputs of a model are inputs of its next run, as a user writes it: `state:stateN`.

Promises states that fit the model's tensors. Leaves keeping them to the device (`agent.runtime.state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agent.bundle.state import State, check_states
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError
from builder.importer.cache_length import capacity_of
from builder.importer.state_patterns import expand_states

_HINT: Final = 'for example --state "h:hn c:cn", an input and the output that it becomes'


def states(
    texts: Sequence[str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    own: Sequence[State] = (),
) -> tuple[State, ...] | None:
    """Declare states.

    `texts`: each `INPUT:OUTPUT` or `INPUT:OUTPUT=INITIAL`, or a pattern such as `past.*:present.*`; several
        may be in one text, separated by spaces.
    Raises `ModelError` if one has another form or does not fit the model.
    """
    names = [[spec.name for spec in specs] for specs in (inputs, outputs)]
    items = expand_states(texts, *names)
    if not items and not own:
        return None
    found = (*own, *(_state(item, inputs, outputs) for item in items))
    try:
        check_states(found, inputs, outputs)
    except ValueError as error:
        raise ModelError(str(error), hint=_HINT) from error
    return found


def split_state(item: str) -> tuple[str, str]:
    """Return the input and the output of a text such as `h:hn`, whose names have no colon."""
    before, _, after = item.partition(":")
    return before, after


def _state(item: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> State:
    # Names may contain ':' and '=', so that the model's decide where one ends.
    pairs = [(before.name, after.name) for before in inputs for after in outputs]
    for before, after in pairs:
        if item == f"{before}:{after}":
            return State(before, after, most=capacity_of(before))
    for before, after in pairs:
        begin = f"{before}:{after}="
        if item.startswith(begin):
            try:
                return State(before, after, float(item[len(begin) :]))
            except ValueError as error:
                raise ModelError(
                    f"--state {item[:80]}: expected a finite number as the initial value",
                    hint="write the number behind the output: --state h:hn=0.5",
                ) from error
    names = [", ".join(spec.name for spec in specs)[:200] for specs in (inputs, outputs)]
    raise ModelError(
        f"--state: expected INPUT:OUTPUT, got {item[:80]!r}; inputs are {names[0]}, outputs {names[1]}",
        hint=_HINT,
    )
