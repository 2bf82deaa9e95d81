"""Requests of a model with states or audio: each is a step of a session, or a whole recording.

A request without a session is allowed only with a recording, which then begins and ends in it. Tensors for a
model with states need a session: an answer from the initial state would look like any other, and be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from agent.bundle.manifest import Manifest
from agent.errors import DeadlineError, IncompatibleError, InputError, PayloadError
from agent.runtime.graph_executor import GraphModule
from agent.runtime.postprocess import Value
from agent.runtime.sessions import Sessions, Visit
from agent.runtime.streaming import Stream, StreamingModel, session_bytes
from agent.runtime.wav import Recording
from agent.worker.frames import Answer, Load, Request

# The part of `compute_limit_s` that a recording may take; the agent's clock began earlier.
_SHARE_OF_LIMIT: Final = 0.8


class Streams:
    """The sessions of the model that a worker serves.

    Raises FormatError if the declarations do not fit together, and IncompatibleError if not even one session
    fits into the limit of bytes.
    """

    def __init__(self, manifest: Manifest, module: GraphModule, labels: Sequence[bytes], load: Load) -> None:
        self._model = StreamingModel(manifest, module, labels)
        self._has_states = manifest.states is not None
        self._name = manifest.name
        self._limit_s = load.compute_limit_s * _SHARE_OF_LIMIT
        most = most_sessions(manifest, load.sessions, load.session_bytes)
        self._sessions: Sessions[Stream] = Sessions(most, load.session_idle_s, self._model.begin)

    def enter(self, request: Request, recording: Recording | None, clock: Callable[[], float]) -> Step | None:
        """Begin a request; None for tensors of a model without states, which are no step.

        Raises InputError if it needs a session and names none, and SessionGoneError or SessionStepError if
        its session has ended, or it is not its next step.
        """
        if request.session is None:
            if recording is None and self._has_states:
                raise InputError(
                    f"model {self._name} keeps a state: expected a session, got none",
                    hint="name one with the user property session, or in the JSON",
                )
            if recording is None:
                return None
            visit = Visit(("", ""), 0, self._model.begin())
            return Step(self._model, visit, recording, self._checker(request, clock), None, end=True)
        if recording is None and not self._has_states:
            raise InputError(
                f"model {self._name} keeps nothing between requests with tensors: expected no session"
            )
        visit = self._sessions.enter(request.client, request.session, request.step)
        return Step(
            self._model,
            visit,
            recording,
            self._checker(request, clock),
            self._sessions,
            end=request.session_end,
        )

    def close(self, request: Request) -> None:
        """End a session without computing anything; it does not matter whether there is one.

        Raises SessionStepError if the request counts, and this is not the session's next step.
        """
        assert request.session is not None
        self._sessions.end(request.client, request.session, request.step)

    def counted(self, answer: Answer, step: Step | None) -> Answer:
        """Return an answer with the number of its step and of the sessions."""
        number = None if step is None else step.number
        return replace(answer, step=number, sessions=len(self._sessions), evicted=self._sessions.evicted)

    def _checker(self, request: Request, clock: Callable[[], float]) -> Callable[[], None]:
        deadline_s, end_s = request.deadline_s, clock() + self._limit_s

        def check() -> None:
            now_s = clock()
            if deadline_s is not None and now_s >= deadline_s:
                raise DeadlineError("the deadline passed within the recording")
            if self._limit_s and now_s >= end_s:
                raise PayloadError(
                    f"the recording takes longer than {self._limit_s:g} s",
                    hint="send it in parts, as the steps of a session",
                )

        return check


class Step:
    """One request of a session, or one whole recording.

    `visit` is what the session keeps; `sessions` is None for a recording without one. `recording` is None for
    tensors that are in the model's inputs. `check` is called before each window of a recording, and may
    raise. `end` says whether the session ends. `heard` is what was heard in the recording; None before `run`,
    and for tensors.
    """

    def __init__(
        self,
        model: StreamingModel,
        visit: Visit[Stream],
        recording: Recording | None,
        check: Callable[[], None],
        sessions: Sessions[Stream] | None,
        *,
        end: bool,
    ) -> None:
        self.heard: Mapping[str, Value] | None = None
        self._model = model
        self._visit = visit
        self._recording = recording
        self._check = check
        self._sessions = sessions
        self._end = end

    @property
    def number(self) -> int | None:
        """Its number in its session."""
        return None if self._sessions is None else self._visit.step

    def run(self) -> None:
        """Run the model; the errors are those of `StreamingModel`."""
        if self._recording is None:
            self._model.run(self._visit.kept)
            return
        self.heard = self._model.listen(self._visit.kept, self._recording, end=self._end, check=self._check)

    def commit(self) -> None:
        """Let the session keep what this step made.

        Raises DeadlineError if the deadline has passed, so that the answer is not sent: the step did not
        happen then.
        """
        if self._sessions is not None:
            self._check()
            self._model.commit(self._visit.kept)
            self._sessions.leave(self._visit, end=self._end)


def most_sessions(manifest: Manifest, sessions: int, nbytes: int) -> int:
    """Return how many sessions a model may have, or raise IncompatibleError if not even one fits."""
    each = session_bytes(manifest)
    if each > nbytes:
        raise IncompatibleError(
            f"a session of {manifest.name} takes {each} bytes, expected at most {nbytes}",
            hint="raise worker.session_bytes in the agent's configuration",
        )
    return min(sessions, nbytes // each)
