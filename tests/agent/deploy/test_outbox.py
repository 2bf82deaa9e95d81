"""Retained messages reach the broker although the broker was away or the agent restarted."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from agent.deploy import outbox
from agent.deploy.outbox import FILE, MAX_AGE_S, Outbox
from agent.errors import StoreError
from agent.mqtt.reason_codes import CLOSED, NOT_CONNECTED, QUEUE_FULL, Reason, reason

JOB = "edge/v1/kitchen/jobs/7"
REPORTED = "edge/v1/kitchen/reported"
NOT_AUTHORIZED = reason(0x87)


class Broker:
    """A control connection that a test switches on and off, and whose acknowledgements it triggers."""

    def __init__(self) -> None:
        self.connected = False
        self.came: list[tuple[str, bytes]] = []
        self.open: list[asyncio.Future[Reason]] = []

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False
    ) -> asyncio.Future[Reason]:
        assert (qos, retain) in ((1, True), (0, False))
        self.came.append((topic, payload))
        self.open.append(asyncio.get_running_loop().create_future())
        return self.open[-1]

    def want(self, topic_filter: str, qos: int = 1) -> None: ...

    def unsubscribe(self, topic_filter: str) -> None: ...

    async def settle(self, verdict: Reason) -> None:
        for future in self.open:
            future.set_result(verdict)
        self.open.clear()
        await asyncio.sleep(0)


@pytest.fixture
def broker() -> Broker:
    return Broker()


def opened(broker: Broker, folder: Path) -> Outbox:
    box = Outbox(broker, folder)
    box.open()
    return box


async def test_last_message_of_each_topic_is_sent_by_the_next_agent(broker: Broker, tmp_path: Path) -> None:
    first = opened(broker, tmp_path)
    for state in (b"IN_PROGRESS", b"SUCCEEDED"):
        assert (await first.publish(JOB, state, retain=True)) is NOT_CONNECTED
    await first.publish(REPORTED, b"{}", retain=True)
    await first.publish("edge/v1/kitchen/jobs/1", b"", retain=True)  # removes it from the broker
    assert broker.came == []
    assert first.waiting == 3
    first.close()
    second = opened(broker, tmp_path)
    assert second.waiting == 3
    broker.connected = True
    second.on_connected()
    assert broker.came == [(JOB, b"SUCCEEDED"), (REPORTED, b"{}"), ("edge/v1/kitchen/jobs/1", b"")]
    await broker.settle(reason(0))
    assert second.waiting == 0
    second.close()
    assert opened(broker, tmp_path).waiting == 0


async def test_what_is_not_acknowledged_is_kept_and_not_sent_twice(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = opened(broker, tmp_path)
    box.publish(JOB, b"1", retain=True)
    box.on_connected()
    assert broker.came == [(JOB, b"1")]  # under way: the connection itself sends it again
    await broker.settle(CLOSED)
    assert box.waiting == 1
    box.on_connected()
    assert broker.came == [(JOB, b"1")] * 2


async def test_acknowledgement_of_an_older_message_does_not_delete_a_newer_one(
    broker: Broker, tmp_path: Path
) -> None:
    broker.connected = True
    box = opened(broker, tmp_path)
    box.publish(JOB, b"older", retain=True)
    older, broker.open = broker.open, []
    broker.connected = False
    box.publish(JOB, b"newer", retain=True)
    older[0].set_result(reason(0))
    await asyncio.sleep(0)
    assert box.waiting == 1
    box.on_connected()
    assert broker.came[-1] == (JOB, b"newer")


async def test_refused_report_is_dropped_and_counted(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = opened(broker, tmp_path)
    box.publish(JOB, b"x", retain=True)
    await broker.settle(NOT_AUTHORIZED)
    assert (box.waiting, box.dropped) == (0, 1)


async def test_oldest_messages_are_dropped_when_there_are_too_many(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_MESSAGES", 3)
    box = opened(broker, tmp_path)
    for number in range(5):
        await box.publish(f"edge/v1/kitchen/jobs/{number}", b"x", retain=True)
    assert (box.waiting, box.dropped) == (3, 2)
    box.on_connected()
    assert [topic[-1] for topic, _ in broker.came] == ["2", "3", "4"]


async def test_bytes_are_bounded(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_BYTES", 100)
    box = opened(broker, tmp_path)
    for number in range(5):
        await box.publish(f"edge/v1/kitchen/jobs/{number}", bytes(40), retain=True)
    assert (box.waiting, box.dropped) == (2, 3)


async def test_old_message_is_dropped(broker: Broker, tmp_path: Path) -> None:
    now_s = [1e9]
    box = Outbox(broker, tmp_path, lambda: now_s[0])
    box.open()
    await box.publish(JOB, b"old", retain=True)
    now_s[0] += MAX_AGE_S + 1
    await box.publish(REPORTED, b"new", retain=True)
    assert (box.waiting, box.dropped) == (1, 1)


async def test_what_is_not_retained_is_not_kept(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = opened(broker, tmp_path)
    box.publish("edge/v1/kitchen/bundles/0/want", b"x", qos=0)
    assert broker.came
    assert box.waiting == 0


async def test_transient_refusal_is_retried_at_the_next_connect(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = opened(broker, tmp_path)
    box.publish(JOB, b"x", retain=True)
    await broker.settle(QUEUE_FULL)
    assert (box.waiting, box.dropped) == (1, 0)
    box.on_connected()
    assert len(broker.came) == 2


@pytest.mark.slow
async def test_file_of_another_agent_is_left_alone(broker: Broker, tmp_path: Path) -> None:
    box = opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    with pytest.raises(StoreError, match="in use by another agent"):
        opened(broker, tmp_path)
    box.close()
    assert opened(broker, tmp_path).waiting == 1


async def test_damaged_file_is_replaced(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database" * 1000)
    box = opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    assert box.waiting == 1


async def test_without_a_file_messages_are_sent_but_not_kept(broker: Broker, tmp_path: Path) -> None:
    box = Outbox(broker, tmp_path / "none")
    box.open()
    box.publish(JOB, b"x", retain=True)
    assert broker.came == [(JOB, b"x")]


async def test_file_of_another_version_is_replaced(broker: Broker, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("PRAGMA user_version = 9")
    database.close()
    assert opened(broker, tmp_path).waiting == 0
