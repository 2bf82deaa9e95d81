"""Whether the state directory can be written: file systems that root mounts, and injected errors."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.deploy.store import storage
from agent.deploy.store.storage import Condition, Finding, StorageWatch, examine
from agent.deploy.trial import Score, Tally
from tests.agent.deploy.rig import Agent, make_bundle
from tests.patience import until

OLD = make_bundle(version="1.0.0")
NEW = make_bundle(version="2.0.0", counter=2, params=b"new")


def mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "full"
    with path.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return path


def test_full_and_read_only_file_systems_are_told_from_one_that_can_be_written(disk: Path) -> None:
    assert examine(disk, write=True).condition is Condition.WRITABLE
    filling = fill(disk)
    assert examine(disk, write=False).condition is Condition.FULL
    filling.unlink()
    mount("-o", "remount,ro", str(disk))
    assert examine(disk, write=False).condition is Condition.READ_ONLY
    assert list(disk.iterdir()) == []


def test_missing_folder_is_made_and_a_file_in_its_place_is_not_removed(tmp_path: Path) -> None:
    assert examine(tmp_path / "state", write=False).condition is Condition.UNAVAILABLE
    assert examine(tmp_path / "state", write=True).condition is Condition.WRITABLE
    (tmp_path / "file").write_bytes(b"")
    assert examine(tmp_path / "file", write=True).condition is Condition.UNAVAILABLE
    assert examine(tmp_path / "none/state", write=True).condition is Condition.UNAVAILABLE


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, Condition.FULL),
        (errno.EDQUOT, Condition.FULL),
        (errno.EROFS, Condition.READ_ONLY),
        (errno.EIO, Condition.FAILING),
        (errno.EACCES, Condition.UNAVAILABLE),
        (errno.ESTALE, Condition.UNAVAILABLE),
    ],
)
def test_error_of_a_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: Condition
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    assert examine(tmp_path, write=True).condition is expected
    assert list(tmp_path.iterdir()) == []


async def test_healthy_disk_is_written_to_rarely_and_a_failed_one_is_tried_each_time(tmp_path: Path) -> None:
    now_s, writes, answer = 0.0, [], Finding(Condition.WRITABLE)
    changes: list[Condition] = []

    def look(_root: Path, *, write: bool, room_bytes: int) -> Finding:
        writes.append((write, room_bytes == storage.ROOM_FROM_BYTES))
        return answer

    watch = StorageWatch(tmp_path, changes.append, look=look, clock=lambda: now_s)
    for _ in range(3):
        await watch.look()
    assert writes == [(True, False), (False, False), (False, False)]
    now_s += storage.TRIAL_INTERVAL_S
    await watch.look()
    assert writes.pop() == (True, False)
    watch.suspect()
    answer = Finding(Condition.FAILING)
    await watch.look()
    assert writes.pop() == (True, False)
    await watch.look()
    assert writes.pop() == (True, True)
    answer = Finding(Condition.WRITABLE)
    await watch.look()
    assert changes == [Condition.FAILING, Condition.WRITABLE]


async def test_disk_that_does_not_respond_has_one_call_waiting(tmp_path: Path) -> None:
    back, calls = threading.Event(), 0
    changes: list[Condition] = []

    def look(_root: Path, **_options: Any) -> Finding:
        nonlocal calls
        calls += 1
        back.wait()
        return Finding(Condition.WRITABLE)

    watch = StorageWatch(tmp_path, changes.append, look=look)
    for _ in range(3):
        await watch.look(0.01)
    assert (calls, changes) == (1, [Condition.NOT_RESPONDING])
    back.set()
    await watch.look()
    assert changes == [Condition.NOT_RESPONDING, Condition.WRITABLE]


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("read-only", "ERR_STORE", "Read-only file system"),
        ("full", "ERR_NO_SPACE", "No space left on device"),
    ],
)
async def test_models_are_served_from_a_disk_that_cannot_be_written_and_a_deployment_waits_for_it(
    disk: Path, fault: str, code: str, words: str
) -> None:
    agent = Agent(disk / "state")
    await agent.start()
    assert (await agent.deploy(OLD, "job-1"))["status"] == "SUCCEEDED"
    await agent.stop()
    with unwritable(disk, fault):
        await agent.start()
        assert agent.models.serving == {"digits": "1.0.0"}
        agent.offer(NEW)
        agent.desire({"digits": NEW.entry("job-2")})
        await reported(agent, lambda error: error is not None)
        error = agent.control.reported()["error"]
        assert (error["code"], words in error["message"]) == (code, True)
        assert agent.models.serving == {"digits": "1.0.0"}
    agent.deployment.disk_changed()
    assert (await agent.finished("job-2"))["status"] == "SUCCEEDED"
    await agent.stop()


@contextmanager
def unwritable(folder: Path, fault: str) -> Iterator[None]:
    if fault == "full":
        filling = fill(folder)
        yield
        filling.unlink()
    else:
        mount("-o", "remount,ro", str(folder))
        yield
        mount("-o", "remount,rw", str(folder))


async def reported(agent: Agent, condition: Callable[[Any], bool]) -> None:
    await until(lambda: condition(agent.control.reported()["error"]))


@pytest.mark.parametrize("damage", ["empty", "truncated", "folder", "fifo", "link"])
@pytest.mark.parametrize(
    "name",
    [
        "active.json",
        "counters.json",
        "desired.json",
        "jobs.json",
        "stopped.json",
        "last_use.json",
        "records.json",
        "format",
    ],
)
async def test_one_damaged_file_of_the_state_is_not_the_end(agent: Agent, name: str, damage: str) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.models.scores["digits"] = Score({"a": Tally(100)})
    agent.deployment.record_use(["digits"], agent.deployment.records())
    await agent.stop()
    path = agent.root / name
    raw = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    match damage:
        case "empty":
            path.touch()
        case "truncated":
            path.write_bytes(raw[: len(raw) // 2])
        case "folder":
            (path / "sub").mkdir(parents=True)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to("gone")
    await agent.start()
    assert agent.models.serving == {"digits": "1.0.0"}
    assert (await agent.deploy(NEW, "job-2"))["status"] == "SUCCEEDED"
    await agent.stop()
