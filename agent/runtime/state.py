"""A model's state in memory: copied into its inputs before a run, and from its outputs after it.

Promises that each run reads what the run before wrote, also where an output shares its memory with an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent.bundle.manifest import Manifest
from agent.errors import SessionGoneError
from agent.runtime.graph_executor import GraphModule
from agent.runtime.storage import Array


class StateMemory:
    """The state inputs and outputs of one loaded model; without states, nothing is copied."""

    def __init__(self, manifest: Manifest, module: GraphModule) -> None:
        states = manifest.states or ()
        order = [spec.name for spec in manifest.outputs]
        self._inputs = [module.input_view(state.input) for state in states]
        self._outputs = [module.output_view(order.index(state.output)) for state in states]
        self._limits = [
            (view, state.most)
            for view, state in zip(self._outputs, states, strict=True)
            if state.most is not None
        ]
        self._initial = [state.initial or 0 for state in states]
        # An output that is an input unchanged (a delay line) is that input's memory.
        self._overlaps = any(
            np.shares_memory(after, before) for after in self._outputs for before in self._inputs
        )

    def begin(self) -> list[Array]:
        """Return the state before the first run."""
        pairs = zip(self._inputs, self._initial, strict=True)
        return [np.full(view.shape, value, view.dtype) for view, value in pairs]

    def enter(self, kept: Sequence[Array]) -> None:
        """Copy a state into the model's inputs."""
        for view, value in zip(self._inputs, kept, strict=True):
            np.copyto(view, value)

    def check(self) -> None:
        """Check that the last run's states may be kept: none exceeds its largest value (SessionGoneError)."""
        for view, most in self._limits:
            if int(view[0]) > most:
                raise SessionGoneError(
                    f"the session is full: its state holds {most} steps, expected no more",
                    hint="begin again, with session_step 0",
                )

    def advance(self) -> None:
        """Copy what the last run wrote into the inputs of the next one."""
        outputs = [view.copy() for view in self._outputs] if self._overlaps else self._outputs
        self.enter(outputs)

    def leave(self, kept: Sequence[Array]) -> None:
        """Copy what the last run wrote into a state."""
        for value, view in zip(kept, self._outputs, strict=True):
            np.copyto(value, view)
