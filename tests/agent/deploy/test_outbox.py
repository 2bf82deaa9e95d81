"""Retained messages reach the broker although the broker was away or the agent restarted."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

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

    version = 5
    max_packet_bytes = 1 << 20

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


class Refusing:
    """A database on a disk that cannot be written, and perhaps not read."""

    def __init__(self, database: sqlite3.Connection, *, readable: bool) -> None:
        self._database = database
        self._readable = readable
        self.in_transaction = False

    def execute(self, text: str, *values: Any) -> sqlite3.Cursor:
        if text.startswith("SELECT") and self._readable:
            return self._database.execute(text, *values)
        raise sqlite3.OperationalError("disk I/O error")

    def close(self) -> None: ...


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


async def test_without_a_folder_messages_are_kept_in_memory_until_there_is_one(
    broker: Broker, tmp_path: Path
) -> None:
    box = opened(broker, tmp_path / "none")
    await box.publish(JOB, b"x", retain=True)
    assert (broker.came, box.waiting) == ([], 1)
    box.use_file()
    (tmp_path / "none").mkdir()
    box.use_file()
    box.close()
    second = opened(broker, tmp_path / "none")
    second.on_connected()
    assert broker.came == [(JOB, b"x")]


@pytest.mark.parametrize("readable", [True, False])
async def test_disk_that_refuses_while_the_agent_runs_costs_no_message(
    broker: Broker, tmp_path: Path, readable: bool
) -> None:
    box = opened(broker, tmp_path)
    await box.publish(JOB, b"before", retain=True)
    await box.publish("edge/v1/kitchen/jobs/8", b"kept", retain=True)
    assert box._database is not None
    file = box._database
    box._database = Refusing(file, readable=readable)  # type: ignore[assignment]
    await box.publish(JOB, b"after", retain=True)
    assert (box.waiting, box.dropped) == (2 if readable else 1, 0)
    file.close()
    box.use_file()
    assert box.waiting == 2
    box.close()
    second = opened(broker, tmp_path)
    second.on_connected()
    assert sorted(broker.came) == [(JOB, b"after"), ("edge/v1/kitchen/jobs/8", b"kept")]


async def test_message_that_was_delivered_from_memory_is_not_sent_again_by_the_next_agent(
    broker: Broker, tmp_path: Path
) -> None:
    box = opened(broker, tmp_path)
    await box.publish(JOB, b"before", retain=True)
    assert box._database is not None
    file = box._database
    box._database = Refusing(file, readable=False)  # type: ignore[assignment]
    broker.connected = True
    box.publish(JOB, b"after", retain=True)
    await broker.settle(reason(0))
    file.close()
    box.use_file()
    assert box.waiting == 0


@pytest.mark.parametrize("jump_s", [1.7e9, -1.7e9])
async def test_clock_that_jumps_drops_nothing(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    wall_s = time.time()
    monkeypatch.setattr(time, "time", lambda: wall_s)
    box = opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    box.close()
    wall_s += jump_s
    box = opened(broker, tmp_path)
    await box.publish(REPORTED, b"y", retain=True)
    assert (box.waiting, box.dropped) == (2, 0)


async def test_folder_in_the_place_of_the_file_is_moved_away(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / FILE / "sub").mkdir(parents=True)
    box = opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    box.close()
    assert opened(broker, tmp_path).waiting == 1


async def test_file_of_another_version_is_replaced(broker: Broker, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("PRAGMA user_version = 9")
    database.close()
    assert opened(broker, tmp_path).waiting == 0
