"""The socket to the broker, without a broker."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import open_socket


async def test_look_up_without_a_thread_is_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    # An error of another kind would end the agent.
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("cannot start a thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="cannot look up the-broker: cannot start"):
            await asyncio.wait_for(open_socket(BrokerSettings("the-broker")), 5)


@pytest.mark.parametrize("host", ["broker..local", ".local", 64 * "a"])
async def test_name_that_no_host_can_have_is_a_failed_attempt(host: str) -> None:
    with pytest.raises(OSError, match="expected the name of a host"):
        await open_socket(BrokerSettings(host))
