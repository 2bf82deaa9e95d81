"""Which session a request is a step of: three user properties, or three keys of an envelope.

Promises that a name is short and printable, and a step a number that every language can count to. Leaves what
a session keeps, and for how long, to `agent.runtime.sessions`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.errors import InputError
from agent.wire.properties import SESSION, SESSION_END, SESSION_STEP

if TYPE_CHECKING:
    # A worker reads steps and has no connection.
    from agent.mqtt.properties import Properties

# A UUID has 36 characters.
MAX_SESSION_CHARACTERS: Final = 64
# At a thousand steps a second, this lasts for 285 000 years; JavaScript counts no further.
MAX_STEP: Final = (1 << 53) - 1
_NAME: Final = re.compile(rf"[A-Za-z0-9._~:@+-]{{1,{MAX_SESSION_CHARACTERS}}}", re.ASCII)
_STEP: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One request of a session.

    Attributes
    ----------
    name
        1 to 64 of `A-Z`, `a-z`, `0-9` and `._~:@+-`. Each client has its own names.
    step
        The number of the request in its session, from 0, which begins again. None for a client that does not
        count: the session goes on, or begins.
    end
        Whether the session ends with this request.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    name: str
    step: int | None = None
    end: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"session: expected 1 to {MAX_SESSION_CHARACTERS} letters, digits and ._~:@+-, "
                f"got {self.name[:80]!a}"
            )
        if self.step is not None and not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"session_step: expected 0 to {MAX_STEP}, got {self.step}")

    def properties(self) -> tuple[tuple[str, str], ...]:
        """Return the user properties of a request."""
        step = () if self.step is None else ((SESSION_STEP, str(self.step)),)
        return ((SESSION, self.name), *step, *(((SESSION_END, "1"),) if self.end else ()))

    @classmethod
    def of(cls, properties: Properties) -> SessionStep | None:
        """Read a request's user properties; None without a session.

        Raises
        ------
        InputError
            If one is repeated or has another form, or there is a step without a session.
        """
        given = {name: properties.all(name) for name in (SESSION, SESSION_STEP, SESSION_END)}
        for name, values in given.items():
            if len(values) > 1:
                raise InputError(f"{name}: expected one user property of that name, got {len(values)}")
        step, end = given[SESSION_STEP], given[SESSION_END]
        if not given[SESSION]:
            if step or end:
                raise InputError("session_step and session_end need a session, got none")
            return None
        if step and not _STEP.fullmatch(step[0]):
            raise InputError(f"session_step: expected a number from 0, got {step[0][:40]!a}")
        if end and end[0] not in ("0", "1"):
            raise InputError(f"session_end: expected 0 or 1, got {end[0][:40]!a}")
        return make_step(given[SESSION][0], int(step[0]) if step else None, end=end == ("1",))


def make_step(name: str, step: int | None, *, end: bool) -> SessionStep:
    """Return a step of a session that a requester named; a value out of its range raises InputError."""
    try:
        return SessionStep(name, step, end)
    except ValueError as error:
        raise InputError(str(error)) from error
