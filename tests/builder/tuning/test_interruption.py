from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from builder.tuning.interruption import Interruption, deferred


@pytest.fixture(params=[signal.SIG_IGN, signal.default_int_handler], ids=["ignored", "default"])
def handler(request: pytest.FixtureRequest) -> Iterator[object]:
    """SIGINT as a shell leaves it for a background process, and as Python sets it."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_the_first_sigint_waits_for_a_check(handler: object) -> None:
    with deferred() as interruption:
        interruption.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_second_sigint_is_not_deferred() -> None:
    interruption = Interruption()
    interruption.on_signal(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        interruption.on_signal(signal.SIGINT, None)


def test_another_thread_leaves_the_handler_alone(handler: object) -> None:
    found: list[object] = []

    def run() -> None:
        with deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [handler]
