"""A model that is run in steps: what a session keeps of it from one request to the next.

Promises that a step changes a `Stream` only in `commit`: a request that fails, or whose answer cannot be
sent, can be sent again. The device and the workstation run this same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.bundle.manifest import Manifest
from agent.bundle.state import requested, state_bytes
from agent.runtime.audio import Hearing, Listener
from agent.runtime.graph_executor import GraphModule
from agent.runtime.postprocess import Value
from agent.runtime.state import StateMemory
from agent.runtime.storage import Array
from agent.runtime.wav import Recording


@dataclass(slots=True)
class Stream:
    """What one session keeps.

    Attributes
    ----------
    states
        The model's states, in the manifest's order.
    hearing
        What was heard, or None for a model that takes no audio.
    """

    states: list[Array]
    hearing: Hearing | None


class StreamingModel:
    """A loaded model with states, with audio, or with both.

    Parameters
    ----------
    manifest
        Its manifest.
    module
        The graph with its weights.
    labels
        Names of the classes in UTF-8, or empty.

    Raises
    ------
    FormatError
        If the declarations do not fit together.
    """

    def __init__(self, manifest: Manifest, module: GraphModule, labels: Sequence[bytes] = ()) -> None:
        self.listener = None if manifest.audio is None else Listener(manifest, labels)
        self._module = module
        self._memory = StateMemory(manifest, module)
        kept = [state.output for state in manifest.states or ()]
        names = [spec.name for spec in manifest.outputs]
        self._outputs = {
            spec.name: module.output_view(names.index(spec.name))
            for spec in requested(manifest.outputs, kept)
        }
        self._heard: Hearing | None = None
        self._ran = False

    def begin(self) -> Stream:
        """Return a session before its first step."""
        return Stream(self._memory.begin(), None if self.listener is None else self.listener.begin())

    def run(self, stream: Stream) -> Mapping[str, Array]:
        """Run one step on the inputs that were set; return the outputs, which the next run overwrites.

        Raises
        ------
        SessionGoneError
            If a state would exceed its largest value.
        """
        self._heard, self._ran = stream.hearing, False
        self._memory.enter(stream.states)
        self._module.run()
        self._memory.check()
        self._ran = True
        return self._outputs

    def listen(
        self,
        stream: Stream,
        recording: Recording | None,
        *,
        end: bool,
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, Value]:
        """Run the model on all windows of the next part of a recording.

        Parameters
        ----------
        stream
            The session.
        recording
            The part, or None for no samples.
        end
            Whether the recording ends here.
        check
            Called before each run; may raise.

        Returns
        -------
        dict
            As `Listener.listen` describes it. Its errors are raised, too.
        """
        listener = self.listener
        assert listener is not None
        assert stream.hearing is not None
        target = self._module.input_view(listener.audio.input)
        self._ran = False

        def run(window: Array) -> Mapping[str, Array]:
            check()
            if self._ran:
                self._memory.advance()
            else:
                self._memory.enter(stream.states)
            target[...] = window
            self._module.run()
            self._memory.check()
            self._ran = True
            return self._outputs

        self._heard, results = listener.listen(stream.hearing, recording, run, end=end)
        return results

    def commit(self, stream: Stream) -> None:
        """Let a session keep what the last step made; no other step may have begun."""
        if self._ran:
            self._memory.leave(stream.states)
        stream.hearing = self._heard


def is_streaming(manifest: Manifest) -> bool:
    """Return whether requests of this model are steps of sessions, or recordings."""
    return manifest.states is not None or manifest.audio is not None


def session_bytes(manifest: Manifest) -> int:
    """Return the most memory that one session takes."""
    heard = 0
    if manifest.audio is not None:
        features = manifest.audio.features
        heard = 4 * manifest.audio.window + 8 * (0 if features is None else features.bands)
    return state_bytes(manifest.states, manifest.inputs) + heard + _OVERHEAD_BYTES


# Names, counters, and numpy's objects.
_OVERHEAD_BYTES: Final = 4096
