"""How a model is called: one signature for the calls of `AsyncModel`, of `Model`, and of `Model.submit`.

They differ only in what a call returns: something to await, the answer, or a future. Importing this loads
neither messages nor arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from edgebundle.defaults import DEADLINE_S
from edgebundle.errors import UsageError

_Result_co = TypeVar("_Result_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call.

    Attributes
    ----------
    data, image, deadline_s, traceparent, tracestate, progress, tensors, audio, row, raw
        As `Asking.__call__` has them.
    """

    data: object
    image: object = None
    deadline_s: float = DEADLINE_S
    traceparent: str | None = None
    tracestate: str | None = None
    progress: Callable[[str], None] | None = None
    tensors: Mapping[str, Any] | None = None
    audio: object = None
    row: object = None
    raw: bool = False


class Asking(ABC, Generic[_Result_co]):
    """A callable that sends one request to a model."""

    def __call__(
        self,
        data: object = None,
        /,
        *,
        image: object = None,
        audio: object = None,
        row: object = None,
        raw: bool = False,
        deadline_s: float = DEADLINE_S,
        traceparent: str | None = None,
        tracestate: str | None = None,
        progress: Callable[[str], None] | None = None,
        **tensors: Any,  # noqa: ANN401 - whatever numpy takes
    ) -> _Result_co:
        """Ask the model.

        Parameters
        ----------
        data
            The model's only input as an array; several inputs as a mapping from names to arrays; or a
            `Request`.
        image
            A picture, for a model that declares preprocessing: the path of a JPEG or PNG, its bytes, a
            picture of Pillow, or pixels (uint8, shape (height, width, 3), red first).
        audio
            A recording, for a model that declares audio: the path of a WAV file, its bytes, or samples at the
            model's rate (float32 from -1 to 1 or int16, shape (n,)).
        row
            A row of a table, for a model that declares columns: a mapping from their names to numbers, truth
            values or texts, or the values in the columns' order. None and NaN are missing values.
        raw
            Whether to answer with the model's own outputs, without the postprocess that its bundle declares.
        deadline_s
            Seconds until an answer is of no use. Until then the request is sent again if it is lost; the
            agent does not start to compute after that.
        traceparent, tracestate
            W3C Trace Context; the answer carries them on.
        progress
            Called with one line when the request has to wait; by default the client's.
        tensors
            Inputs by name, as arrays. An input whose name is one of those above goes into `data`.

        Returns
        -------
        Answer
            Arrays by name, `labels`, `boxes`, `timing`. `AsyncModel` returns a coroutine of it, and
            `Model.submit` a future, whose `cancel` gives the request up.

        Raises
        ------
        ClientError
            If there is no answer: `edgebundle.errors` lists the reasons.
        OSError
            If a file cannot be read.
        """
        return self._ask(
            Call(data, image, deadline_s, traceparent, tracestate, progress, tensors, audio, row, raw)
        )

    @abstractmethod
    def _ask(self, call: Call) -> _Result_co:
        """Ask with these arguments."""


def wants_raw(raw: object) -> bool:
    """Return the argument `raw` of a call.

    Raises
    ------
    UsageError
        If it is neither True nor False, such as an array for an input of that name.
    """
    if not isinstance(raw, bool):
        raise UsageError(
            f"raw: expected True or False, got {type(raw).__name__}",
            hint="an input of that name goes into the first argument: model({'raw': array})",
        )
    return raw
