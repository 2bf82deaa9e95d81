"""kill -9 at every boundary between steps, and a disk that fills up at every write.

Wherever a deployment is interrupted, at the next start the old or the new version serves, and the job ends.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.deploy import trial_watch
from agent.deploy.fetch.blocks import BLOCK_BYTES
from agent.deploy.store import state_file
from agent.deploy.store.store import SPACE_MARGIN_BYTES, Store
from agent.errors import NoSpaceError
from tests import kills
from tests.agent.deploy.rig import Agent, Bundle, make_bundle
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

OLD = make_bundle(version="1.0.0", counter=1, params=b"old")
NEW = make_bundle(version="2.0.0", counter=2, params=b"new" * 50_000)
FINAL = ("SUCCEEDED", "FAILED", "REJECTED", "TIMED_OUT")
NEVER = 10**6


class Killer:
    """A checkpoint that ends the process at the n-th call."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: list[str] = []

    def __call__(self, name: str) -> None:
        self.seen.append(name)
        if len(self.seen) > self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(scenario: Callable[[], Coroutine[Any, Any, object]]) -> int:
    """Run a scenario in a child process; return the signal that ended it, 0 for none."""
    return kills.in_child(lambda: asyncio.run(scenario()))


async def deploy_new(root: Path, killer: Killer) -> Killer:
    agent = Agent(root)
    agent.checkpoint = killer
    agent.offer(NEW)
    await agent.start()
    agent.version = 10
    agent.desire({"digits": NEW.entry("job-2")})
    await agent.finished("job-2")
    await agent.settle()
    await agent.stop()
    return killer


async def recover(root: Path, killer: Killer | None = None) -> Agent:
    """Start again; the broker delivers the retained document again."""
    agent = Agent(root)
    if killer is not None:
        agent.checkpoint = killer
    agent.offer(NEW)
    await agent.start()
    served_at_once = dict(agent.models.serving)
    agent.version = 10
    agent.desire({"digits": NEW.entry("job-2")})
    state = await agent.finished("job-2")
    await agent.settle()
    await agent.stop()
    agent.models.history.append(str(served_at_once))
    assert state["status"] in FINAL
    return agent


async def deploy_old(root: Path) -> None:
    agent = await Agent(root).start()
    await agent.deploy(OLD, "job-1")
    await agent.stop()


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A state directory in which the old version is active."""
    asyncio.run(deploy_old(tmp_path / "prepared"))
    return tmp_path / "prepared"


class Killed:
    """State directories of agents that were killed at each boundary of the same deployment."""

    def __init__(self, folder: Path) -> None:
        self._prepared = folder / "prepared"
        asyncio.run(deploy_old(self._prepared))
        self.names = asyncio.run(deploy_new(copy(self._prepared, "whole"), Killer(NEVER))).seen

    def copy(self, at: int, target: Path) -> Path:
        """Copy the directory of the agent that was killed at boundary number `at`."""
        killed = self._prepared.parent / f"killed-{at}"
        if not killed.exists():
            copy(self._prepared, killed.name)
            assert in_child(partial(deploy_new, killed, Killer(at))) == signal.SIGKILL, self.names[at]
        shutil.copytree(killed, target)
        return target


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return Killed(tmp_path_factory.mktemp("killed"))


def copy(prepared: Path, name: str) -> Path:
    target = prepared.parent / name
    if prepared.exists():
        shutil.copytree(prepared, target)
    return target


def check_disk(root: Path, agent: Agent) -> None:
    """Only what is needed is left: no temporary file, no part, no third bundle."""
    stored = {path.stem for path in (root / "store").iterdir()}
    active = agent.store.active().get("digits")
    assert active is not None
    needed = {digest[7:] for digest in (active.digest, active.previous) if digest}
    assert needed <= stored <= needed | {NEW.hex}, "what is desired is kept for the next attempt"
    assert not list((root / "partial").iterdir())
    assert not list(root.rglob("*.tmp"))


def test_killed_at_any_boundary_the_old_or_the_new_version_serves(killed: Killed, tmp_path: Path) -> None:
    assert len(killed.names) > 20
    steps = {f"installer:{step}" for step in ("downloading", "testing", "committing", "cleanup")}
    assert steps <= set(killed.names)
    for at, name in enumerate(killed.names):
        root = killed.copy(at, tmp_path / str(at))
        agent = asyncio.run(recover(root))
        served_at_once = agent.models.history[-1]
        assert served_at_once in ("{'digits': '1.0.0'}", "{'digits': '2.0.0'}"), f"killed at {name}"
        assert agent.models.serving == {"digits": "2.0.0"}, f"killed at {name}"
        assert agent.control.job("job-2")["status"] == "SUCCEEDED", f"killed at {name}"
        assert agent.store.committed_counter("digits") == 2
        check_disk(root, agent)


async def deploy_and_die(root: Path, at: int) -> None:
    kills.kill_at_system_call(at)
    await deploy_new(root, Killer(NEVER))


def test_killed_before_any_system_call_that_changes_the_disk(prepared: Path) -> None:
    at = 0
    while True:
        root = copy(prepared, f"killed-{at}")
        if in_child(partial(deploy_and_die, root, at)) == 0:
            break
        agent = asyncio.run(recover(root))
        assert agent.models.history[-1] in ("{'digits': '1.0.0'}", "{'digits': '2.0.0'}"), f"killed at {at}"
        assert agent.models.serving == {"digits": "2.0.0"}, f"killed at call {at}"
        check_disk(root, agent)
        shutil.rmtree(root)
        at += 1
    assert at > 40, "the scenario makes fewer calls than it should"


async def finish_alone(root: Path) -> Agent:
    """Start again with a broker that has forgotten the desired document."""
    agent = Agent(root)
    agent.offer(NEW)
    await agent.start()
    await agent.finished("job-2")
    await agent.settle()
    await agent.stop()
    return agent


def test_job_of_a_durable_document_ends_without_another_delivery(killed: Killed, tmp_path: Path) -> None:
    names = killed.names
    for at in range(names.index("desired.json:written"), len(names)):
        agent = asyncio.run(finish_alone(killed.copy(at, tmp_path / str(at))))
        assert agent.models.serving == {"digits": "2.0.0"}, f"killed at {names[at]}"


def test_killed_again_while_it_recovers(killed: Killed, tmp_path: Path) -> None:
    names = killed.names
    for at in range(0, len(names), 3):
        for again in (0, 2, 5, 9):
            root = killed.copy(at, tmp_path / f"{at}-{again}")
            in_child(partial(recover, root, Killer(again)))
            agent = asyncio.run(recover(root))
            assert agent.models.serving == {"digits": "2.0.0"}, f"killed at {names[at]} and {again} later"
            check_disk(root, agent)


def test_killed_during_a_first_installation_it_is_completed(tmp_path: Path) -> None:
    names = asyncio.run(deploy_new(tmp_path / "whole", Killer(NEVER))).seen
    for at, name in enumerate(names):
        root = tmp_path / f"killed-{at}"
        in_child(partial(deploy_new, root, Killer(at)))
        agent = asyncio.run(recover(root))
        assert agent.models.serving == {"digits": "2.0.0"}, f"killed at {name}"
        check_disk(root, agent)


def counters_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = state_file.write_durably  # type: ignore[attr-defined] # the name that state_file looks up

    def full(path: Path, data: bytes, **options: Any) -> None:
        if path.name == "counters.json" and b'"digits":2' in data:
            raise NoSpaceError("writing counters.json: No space left on device")
        write(path, data, **options)

    monkeypatch.setattr(state_file, "write_durably", full)


def test_a_counter_that_cannot_be_committed_brings_the_old_version_back(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters_cannot_be_written(monkeypatch)
    agent = asyncio.run(recover(copy(prepared, "full")))
    state = agent.control.job("job-2")
    assert (state["status"], state["result"]) == ("FAILED", "FAILED_ROLLBACK_COMPLETE")
    assert state["code"] == "ERR_NO_SPACE"
    assert agent.models.serving == {"digits": "1.0.0"}
    assert agent.store.active()["digits"].digest == OLD.digest
    check_disk(agent.root, agent)


def test_killed_while_it_rolls_back_the_old_version_serves(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters_cannot_be_written(monkeypatch)
    names = asyncio.run(deploy_new(copy(prepared, "whole"), Killer(NEVER))).seen
    assert "installer:rolling_back" in names
    for at in range(names.index("installer:committing") - 3, len(names)):
        root = copy(prepared, f"killed-{at}")
        in_child(partial(deploy_new, root, Killer(at)))
        agent = asyncio.run(recover(root))
        assert agent.models.serving == {"digits": "1.0.0"}, f"killed at {names[at]}"
        assert agent.control.job("job-2")["status"] == "FAILED", f"killed at {names[at]}"
        assert agent.store.committed_counter("digits") == 1


async def test_a_bundle_that_ends_the_agent_is_given_up_after_three_attempts(prepared: Path) -> None:
    def die_while_testing(name: str) -> None:
        if name == "installer:testing":
            os.kill(os.getpid(), signal.SIGKILL)

    class Dying(Killer):
        def __call__(self, name: str) -> None:
            die_while_testing(name)

    root = copy(prepared, "loop")
    ends = [in_child(partial(recover, root, Dying(0))) for _ in range(5)]
    assert ends == [signal.SIGKILL] * 4 + [0]
    agent = await recover(root)
    state = agent.control.job("job-2")
    assert (state["status"], state["result"]) == ("FAILED", "FAILED_NO_STATE_CHANGE")
    assert "interrupted 3 times" in state["message"]
    assert agent.models.serving == {"digits": "1.0.0"}


async def fail_on_trial(root: Path, killer: Killer) -> Agent:
    """Start with the new version on trial, let it fail, and wait for its predecessor."""
    agent = Agent(root)
    agent.checkpoint = killer
    await agent.start()
    agent.models.history.append(str(agent.models.serving))
    if agent.models.serving == {"digits": "2.0.0"}:
        agent.models.fail("digits")
    async with asyncio.timeout(PATIENCE_S):
        while agent.store.active()["digits"].digest != OLD.digest or agent.store.pending:
            await asyncio.sleep(0.001)
        while agent.deployment._installer.switching("digits").locked():
            await asyncio.sleep(0.001)
    assert agent.models.serving == {"digits": "1.0.0"}
    await agent.settle()
    await agent.stop()
    return agent


def test_killed_at_any_boundary_of_a_rollback_one_version_serves_and_the_old_one_in_the_end(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_watch, "INTERVAL_S", 0.001)
    asyncio.run(deploy_new(prepared, Killer(NEVER)))
    killer = Killer(NEVER)
    asyncio.run(fail_on_trial(copy(prepared, "whole"), killer))
    assert {"installer:predecessor runs", "installer:rolled back"} <= set(killer.seen)
    for at, name in enumerate(killer.seen):
        root = copy(prepared, f"killed-{at}")
        assert in_child(partial(fail_on_trial, root, Killer(at))) == signal.SIGKILL, name
        agent = asyncio.run(fail_on_trial(root, Killer(NEVER)))
        served_at_once = next(entry for entry in agent.models.history if entry.startswith("{"))
        assert served_at_once in ("{'digits': '1.0.0'}", "{'digits': '2.0.0'}"), f"killed at {name}"
        active = agent.store.active()["digits"]
        assert (active.digest, active.trial) == (OLD.digest, None), f"killed at {name}"
        assert active.rolled_back is not None
        assert active.rolled_back.digest == NEW.digest
        assert agent.store.committed_counter("digits") == 2
        check_disk(root, agent)


def test_version_that_ends_the_agent_while_it_is_loaded_is_rolled_back(prepared: Path) -> None:
    async def start_and_die(root: Path) -> None:
        agent = Agent(root)
        agent.models.deadly = {NEW.version}
        await agent.start()
        assert agent.models.serving == {"digits": "1.0.0"}
        await agent.stop()

    asyncio.run(deploy_new(prepared, Killer(NEVER)))
    ends = [in_child(partial(start_and_die, prepared)) for _ in range(5)]
    assert ends == [signal.SIGKILL] * 3 + [0, 0]


class FullDisk:
    """Lets `after` writes succeed, then reports a full disk: once, or from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: int, for_good: bool) -> None:
        self.calls = 0
        self.after = after
        self.for_good = for_good
        write, pwrite = os.write, os.pwrite

        def counted(call: Callable[..., int]) -> Callable[..., int]:
            def checked(*arguments: Any) -> int:
                target = str(Path(f"/proc/self/fd/{arguments[0]}").readlink())
                if target.startswith(("/memfd:", "socket:", "pipe:", "anon_inode:")):
                    return call(*arguments)
                self.calls += 1
                if self.calls - 1 == self.after or (self.for_good and self.calls > self.after):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return call(*arguments)

            return checked

        monkeypatch.setattr(os, "write", counted(write))
        monkeypatch.setattr(os, "pwrite", counted(pwrite))


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "from then on"])
def test_a_disk_that_fills_up_at_any_write_leaves_the_old_or_the_new_version_serving(
    prepared: Path, for_good: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch, after=NEVER, for_good=for_good)
        asyncio.run(deploy_new(copy(prepared, "whole"), Killer(NEVER)))
    assert disk.calls > 15
    for after in range(disk.calls):
        root = copy(prepared, f"full-{after}")
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(patch, after=after, for_good=for_good)
            asyncio.run(full_disk_scenario(root))
        agent = asyncio.run(recover(root))
        assert agent.models.serving in ({"digits": "1.0.0"}, {"digits": "2.0.0"})
        assert not list(root.rglob("*.tmp"))


async def full_disk_scenario(root: Path) -> None:
    agent = Agent(root)
    agent.offer(NEW)
    await agent.start()
    agent.version = 10
    agent.desire({"digits": NEW.entry("job-2")})
    await agent.settle()
    if agent.control.reported()["error"] is None:
        await agent.finished("job-2")
        await agent.settle()
    else:
        assert agent.control.reported()["error"]["code"] == "ERR_NO_SPACE"
    assert agent.models.serving in ({"digits": "1.0.0"}, {"digits": "2.0.0"})
    await agent.stop()


async def test_a_bundle_that_does_not_fit_is_refused_before_it_is_downloaded(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    before, sent = agent.disk(), agent.control.sent_bytes
    monkeypatch.setattr(Store, "free_bytes", lambda _self: SPACE_MARGIN_BYTES + len(NEW.raw) - 1)
    state = await agent.deploy(NEW, "job-2")
    assert (state["status"], state["code"]) == ("FAILED", "ERR_NO_SPACE")
    assert agent.disk() == before
    assert agent.control.sent_bytes == sent
    monkeypatch.setattr(Store, "free_bytes", lambda _self: SPACE_MARGIN_BYTES + len(NEW.raw))
    assert (await agent.deploy(NEW, "job-3"))["status"] == "SUCCEEDED"
    await agent.stop()


async def test_unfinished_transfers_are_deleted_when_space_is_short(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.start()
    forgotten = make_bundle(name="other")
    agent.store.part_path(forgotten.digest).write_bytes(b"part")
    free = iter([1000, 10**12])
    monkeypatch.setattr(Store, "free_bytes", lambda _self: next(free, 10**12))
    assert (await agent.deploy(OLD, "job-1"))["status"] == "SUCCEEDED"
    assert not agent.store.part_path(forgotten.digest).exists()
    await agent.stop()


def test_file_size_limit_counts_as_no_space_and_the_old_version_serves(prepared: Path) -> None:
    async def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        agent = Agent(prepared)
        agent.offer(NEW)
        await agent.start()
        agent.version = 10
        agent.desire({"digits": NEW.entry("job-2")})
        state = await agent.finished("job-2")
        assert (state["status"], state["result"]) == ("FAILED", "FAILED_NO_STATE_CHANGE"), state
        assert state["code"] == "ERR_NO_SPACE"
        assert agent.models.serving == {"digits": "1.0.0"}
        await agent.stop()

    assert in_child(limited) == 0


def test_a_bundle_is_small_enough_to_be_worth_these_tests() -> None:
    assert isinstance(NEW, Bundle)
    assert len(NEW.raw) > 2 * BLOCK_BYTES, "several blocks, so that a transfer can be cut in the middle"
