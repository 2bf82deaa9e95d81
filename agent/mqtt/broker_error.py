"""What is raised when a broker cannot be used, and how a failed attempt is told."""

from __future__ import annotations

import os
import ssl

from agent.errors import EdgeError
from agent.mqtt.reason_codes import Reason
from agent.mqtt.settings import BrokerSettings


class BrokerError(EdgeError):
    """The broker cannot be reached, or refuses what was asked."""

    code = "ERR_BROKER"

    def __init__(self, message: str, why: Reason, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = why


def describe(error: BaseException, settings: BrokerSettings) -> str:
    """Say in a few words what an exception of a connection attempt means, and where it helps what to do."""
    if isinstance(error, ssl.SSLError):
        from agent.mqtt.failure import explain_error  # memory that an agent which is connected can do without

        failure = explain_error(error, settings)
        return f"{failure.message}; {failure.hint}"
    if isinstance(error, EdgeError) and error.hint is not None:
        return f"{error}; {error.hint}"
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio puts its own words in place of these
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
