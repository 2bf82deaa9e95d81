"""Retained messages reach the broker although the broker was away or the agent restarted."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.deploy import outbox
from agent.deploy.outbox import MAX_AGE_S, Outbox
from agent.deploy.store.outbox_file import FILE, OutboxFile
from agent.errors import StoreError
from agent.mqtt.reason_codes import CLOSED, NOT_CONNECTED, QUEUE_FULL, Reason, reason

JOB = "edge/v1/kitchen/jobs/7"
OTHER = "edge/v1/kitchen/jobs/8"
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


class Disk:
    """What the disk does with a change of the file: takes it, refuses it, or hangs until `back` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        self.back = threading.Event()
        self.back.set()
        write = OutboxFile.write

        def slow(file: OutboxFile, *arguments: Any) -> None:
            assert threading.current_thread() is not threading.main_thread()
            self.back.wait()
            if self.refuses:
                file.abandon()
                file._database.execute("PRAGMA query_only = ON")
            write(file, *arguments)

        monkeypatch.setattr(OutboxFile, "write", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.back.set()


@pytest.fixture
def broker() -> Broker:
    return Broker()


async def opened(broker: Broker, folder: Path) -> Outbox:
    box = Outbox(broker, folder)
    await box.open()
    return box


async def test_last_message_of_each_topic_is_sent_by_the_next_agent(broker: Broker, tmp_path: Path) -> None:
    first = await opened(broker, tmp_path)
    for state in (b"IN_PROGRESS", b"SUCCEEDED"):
        assert (await first.publish(JOB, state, retain=True)) is NOT_CONNECTED
    await first.publish(REPORTED, b"{}", retain=True)
    await first.publish("edge/v1/kitchen/jobs/1", b"", retain=True)  # removes it from the broker
    assert broker.came == []
    assert first.waiting == 3
    await first.close()
    second = await opened(broker, tmp_path)
    assert second.waiting == 3
    broker.connected = True
    second.on_connected()
    assert broker.came == [(JOB, b"SUCCEEDED"), (REPORTED, b"{}"), ("edge/v1/kitchen/jobs/1", b"")]
    await broker.settle(reason(0))
    assert second.waiting == 0
    await second.close()
    assert (await opened(broker, tmp_path)).waiting == 0


async def test_what_is_not_acknowledged_is_kept_and_not_sent_twice(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = await opened(broker, tmp_path)
    box.publish(JOB, b"1", retain=True)
    assert broker.came == []
    await box.stored()
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
    box = await opened(broker, tmp_path)
    box.publish(JOB, b"older", retain=True)
    await box.stored()
    older, broker.open = broker.open, []
    broker.connected = False
    box.publish(JOB, b"newer", retain=True)
    await box.stored()
    older[0].set_result(reason(0))
    await asyncio.sleep(0)
    assert box.waiting == 1
    broker.connected = True
    box.on_connected()
    assert broker.came[-1] == (JOB, b"newer")


async def test_refused_report_is_dropped_and_counted(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = await opened(broker, tmp_path)
    box.publish(JOB, b"x", retain=True)
    await box.stored()
    await broker.settle(NOT_AUTHORIZED)
    assert (box.waiting, box.dropped) == (0, 1)


async def test_oldest_messages_are_dropped_when_there_are_too_many(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_MESSAGES", 3)
    box = await opened(broker, tmp_path)
    for number in range(5):
        await box.publish(f"edge/v1/kitchen/jobs/{number}", b"x", retain=True)
    assert (box.waiting, box.dropped) == (3, 2)
    await box.stored()
    broker.connected = True
    box.on_connected()
    assert [topic[-1] for topic, _ in broker.came] == ["2", "3", "4"]


async def test_bytes_are_bounded(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_BYTES", 100)
    box = await opened(broker, tmp_path)
    for number in range(5):
        await box.publish(f"edge/v1/kitchen/jobs/{number}", bytes(40), retain=True)
    assert (box.waiting, box.dropped) == (2, 3)


async def test_old_message_is_dropped(broker: Broker, tmp_path: Path) -> None:
    now_s = [1e9]
    box = Outbox(broker, tmp_path, lambda: now_s[0])
    await box.open()
    await box.publish(JOB, b"old", retain=True)
    now_s[0] += MAX_AGE_S + 1
    await box.publish(REPORTED, b"new", retain=True)
    assert (box.waiting, box.dropped) == (1, 1)


async def test_what_is_not_retained_is_not_kept(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = await opened(broker, tmp_path)
    box.publish("edge/v1/kitchen/bundles/0/want", b"x", qos=0)
    assert broker.came
    assert box.waiting == 0


async def test_transient_refusal_is_retried_at_the_next_connect(broker: Broker, tmp_path: Path) -> None:
    broker.connected = True
    box = await opened(broker, tmp_path)
    box.publish(JOB, b"x", retain=True)
    await box.stored()
    await broker.settle(QUEUE_FULL)
    assert (box.waiting, box.dropped) == (1, 0)
    box.on_connected()
    assert len(broker.came) == 2


@pytest.mark.slow
async def test_file_of_another_agent_is_left_alone(broker: Broker, tmp_path: Path) -> None:
    box = await opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    with pytest.raises(StoreError, match="in use by another agent"):
        await opened(broker, tmp_path)
    await box.close()
    assert (await opened(broker, tmp_path)).waiting == 1


async def test_damaged_file_is_replaced(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database" * 1000)
    box = await opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    assert box.waiting == 1


async def test_without_a_folder_messages_are_kept_in_memory_until_there_is_one(
    broker: Broker, tmp_path: Path
) -> None:
    box = await opened(broker, tmp_path / "none")
    await box.publish(JOB, b"x", retain=True)
    assert (broker.came, box.waiting) == ([], 1)
    await box.open()
    (tmp_path / "none").mkdir()
    await box.open()
    await box.close()
    assert (await opened(broker, tmp_path / "none")).waiting == 1


async def test_disk_that_refuses_while_the_agent_runs_costs_no_message(
    broker: Broker, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    box = await opened(broker, tmp_path)
    await box.publish(JOB, b"before", retain=True)
    await box.publish(OTHER, b"kept", retain=True)
    await box.stored()
    disk.refuses = True
    await box.publish(JOB, b"after", retain=True)
    await box.stored()
    assert "reports are kept in memory" in caplog.text
    assert (box.waiting, box.dropped) == (2, 0)
    disk.refuses = False
    await box.open()
    await box.close()
    second = await opened(broker, tmp_path)
    broker.connected = True
    second.on_connected()
    assert broker.came == [(OTHER, b"kept"), (JOB, b"after")]


async def test_disk_that_does_not_respond_delays_a_report_and_nothing_else(
    broker: Broker, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SAVE_LIMIT_S", 0.1)
    broker.connected = True
    box = await opened(broker, tmp_path)
    disk.back.clear()
    box.publish(JOB, b"1", retain=True)
    box.publish(OTHER, b"2", retain=True)
    box.publish("edge/v1/kitchen/bundles/0/want", b"x", qos=0)
    await asyncio.sleep(0)
    assert [payload for _, payload in broker.came] == [b"x"]
    await box.stored()
    assert [payload for _, payload in broker.came] == [b"x", b"1", b"2"]
    box.publish(JOB, b"3", retain=True)
    assert broker.came[-1] == (JOB, b"3"), "without a file, it is sent at once"
    disk.back.set()
    await box.open()
    assert box.waiting == 2
    await box.close()
    assert (await opened(broker, tmp_path)).waiting == 2


async def test_message_that_is_replaced_again_and_again_is_sent_as_often_as_it_is_stored(
    broker: Broker, tmp_path: Path, disk: Disk
) -> None:
    broker.connected = True
    box = await opened(broker, tmp_path)
    disk.back.clear()
    box.publish(REPORTED, b"1", retain=True)
    await asyncio.sleep(0)  # it is being written
    box.publish(REPORTED, b"2", retain=True)
    box.publish(REPORTED, b"3", retain=True)
    disk.back.set()
    await box.stored()
    assert [payload for _, payload in broker.came] == [b"1", b"3"]
    await broker.settle(reason(0))
    await box.close()
    assert (await opened(broker, tmp_path)).waiting == 0


async def test_file_that_opens_late_is_used_then(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened(broker, tmp_path)
    await first.publish(JOB, b"before", retain=True)
    await first.publish(OTHER, b"kept", retain=True)
    await first.publish(REPORTED, b"before", retain=True)
    await first.close()
    back, open_file = threading.Event(), OutboxFile.open

    def slow(folder: Path) -> OutboxFile:
        back.wait()
        return open_file(folder)

    monkeypatch.setattr(OutboxFile, "open", slow)
    box = Outbox(broker, tmp_path)
    await box.open(0.0)
    await box.publish(JOB, b"after", retain=True)
    broker.connected = True
    box.publish(REPORTED, b"after", retain=True)
    assert broker.came == [(JOB, b"after"), (REPORTED, b"after")]
    broker.open.pop().set_result(reason(0))
    await asyncio.sleep(0)
    back.set()
    await box.open()
    await box.stored()
    assert broker.came[2:] == [(OTHER, b"kept")]
    await box.close()
    assert (await opened(broker, tmp_path)).waiting == 2, "what was delivered meanwhile is not sent again"


@pytest.mark.parametrize("jump_s", [1.7e9, -1.7e9])
async def test_clock_that_jumps_drops_nothing(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    wall_s = time.time()
    monkeypatch.setattr(time, "time", lambda: wall_s)
    box = await opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    await box.close()
    wall_s += jump_s
    box = await opened(broker, tmp_path)
    await box.publish(REPORTED, b"y", retain=True)
    assert (box.waiting, box.dropped) == (2, 0)


async def test_folder_in_the_place_of_the_file_is_moved_away(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / FILE / "sub").mkdir(parents=True)
    box = await opened(broker, tmp_path)
    await box.publish(JOB, b"x", retain=True)
    await box.close()
    assert (await opened(broker, tmp_path)).waiting == 1


async def test_file_of_another_version_is_replaced(broker: Broker, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("PRAGMA user_version = 9")
    database.close()
    assert (await opened(broker, tmp_path)).waiting == 0
