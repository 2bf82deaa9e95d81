"""What runs is compared with what should run, for ever, and a failure is never the end."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.deploy import deployment, desired_state, jobs, plan, reconcile, trial_watch
from agent.deploy.circumstances import Circumstances
from agent.deploy.fetch import block_source
from agent.deploy.plan import MAX_ATTEMPTS
from agent.deploy.reconcile import FIRST_PAUSE_S, LONGEST_PAUSE_S, Attempts, Problem, wishes
from agent.deploy.store.active import ActiveModel
from agent.deploy.store.store import SPACE_MARGIN_BYTES, Store
from agent.deploy.trial import MAX_STARTS, STEADY_S, Score, Tally, Times
from agent.disk_thread import in_disk_thread
from agent.errors import StoreError
from agent.wire import topics
from agent.wire.desired import FREE_VERSIONS, MAX_VERSION, Desired
from agent.wire.reported import Origin
from tests.agent.deploy.rig import DEVICE, MACHINE, Agent, Bundle, make_bundle
from tests.bundles import KEYRING
from tests.patience import until
from tests.virtual_time import in_virtual_time

OLD = make_bundle(version="1.0.0", counter=1, params=b"old")
NEW = make_bundle(version="2.0.0", counter=2, params=b"new")
STRANGERS_KEY = ec.generate_private_key(ec.SECP256R1())
FORGED = make_bundle(version="2.0.0", counter=2, key=STRANGERS_KEY)
STRANGER = make_bundle("faces", key=STRANGERS_KEY)


@pytest.fixture
def agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """An agent that looks every few milliseconds, and whose pauses are as short."""
    monkeypatch.setattr(block_source, "POLL_S", 0.01)
    monkeypatch.setattr(deployment, "INBOX_INTERVAL_S", 0.005)
    monkeypatch.setattr(trial_watch, "INTERVAL_S", 0.005)
    monkeypatch.setattr(plan, "KEYS_INTERVAL_S", 0.01)
    monkeypatch.setattr(reconcile, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(reconcile, "LONGEST_PAUSE_S", 0.05)
    return agent


def reported(agent: Agent, name: str = "digits") -> dict[str, Any]:
    model: dict[str, Any] = agent.control.reported()["models"].get(name, {})
    return model


async def upgraded(agent: Agent, new: Bundle = NEW) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.models.scores["digits"] = Score(clients={"a": Tally(100)})
    assert (await agent.deploy(new, "job-2"))["status"] == "SUCCEEDED"


# -- the rules ---------------------------------------------------------------------------------------------


def test_pauses_double_up_to_ten_minutes_and_begin_again_after_a_change() -> None:
    attempts = Attempts(chance=lambda: 0.0)
    assert attempts.due("a", 100.0)
    pauses = [attempts.failed("a", 100.0) for _ in range(9)]
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert not attempts.due("a", 699.9)
    assert attempts.due("a", 700.0)
    attempts.hurry(200.0)
    assert not attempts.due("a", 204.9)
    assert attempts.due("a", 205.0)
    assert attempts.failed("a", 205.0) == 5
    attempts.forget("a")
    assert attempts.due("a", 205.0)
    assert Attempts(chance=lambda: 1.0).failed("a", 0.0) == pytest.approx(4.0)
    assert (FIRST_PAUSE_S, LONGEST_PAUSE_S) == (5.0, 600.0)


def test_a_hurry_never_delays_an_attempt() -> None:
    attempts = Attempts(chance=lambda: 0.0)
    attempts.failed("a", 100.0)
    attempts.hurry(104.0)
    assert attempts.due("a", 105.0)


def test_problems_are_forgotten_with_the_attempts() -> None:
    attempts = Attempts()
    attempts.explain("a", Problem("no space", None))
    assert attempts.problems["a"].message == "no space"
    attempts.forget("a")
    assert not attempts.problems


def test_what_a_person_installed_is_its_own_wish_until_a_document_names_it() -> None:
    def active(name: str, origin: Origin) -> ActiveModel:
        return ActiveModel(name, OLD.digest, "1.0.0", origin, f"job-{name}", None)

    records = {"mine": active("mine", Origin.LOCAL), "theirs": active("theirs", Origin.DESIRED)}
    assert wishes(None, records).keys() == {"mine", "theirs"}
    empty = Desired(1, ())
    assert wishes(empty, records).keys() == {"mine"}
    assert wishes(empty, {}, [wishes(None, records)["mine"]]).keys() == {"mine"}


# -- transient failures ------------------------------------------------------------------------------------


async def test_bytes_that_are_offered_after_a_time_out_are_taken_up(agent: Agent) -> None:
    agent.silence_limit_s = 0.05
    await agent.start()
    agent.desire({"digits": NEW.entry("job-1")})
    state = await agent.finished("job-1")
    assert state["status"] == "TIMED_OUT"
    assert "; next attempt in " in state["message"]
    assert reported(agent)["state"] == "failed"
    assert reported(agent)["next_try"] is not None
    agent.offer(NEW)
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.settle()
    assert agent.control.job("job-1")["status"] == "SUCCEEDED"
    assert (reported(agent)["state"], reported(agent)["message"]) == ("active", None)
    await agent.stop()


async def test_same_document_again_is_an_attempt_at_once_after_a_restart(agent: Agent) -> None:
    agent.silence_limit_s = 0.05
    await agent.start()
    agent.desire({"digits": NEW.entry("job-1")}, version=7)
    assert (await agent.finished("job-1"))["status"] == "TIMED_OUT"
    await agent.stop()
    agent.offer(NEW)
    await agent.start()
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.stop()


async def test_one_flipped_bit_in_a_block_costs_a_transfer_and_not_the_deployment(agent: Agent) -> None:
    await agent.start()
    damaged = bytearray(NEW.raw)
    damaged[1000] ^= 1
    agent.control.offers[NEW.hex] = bytes(damaged)
    agent.control.on_want = lambda count: agent.offer(NEW) if count == 2 else None
    agent.desire({"digits": NEW.entry("job-1")})
    state = await agent.finished("job-1")
    assert (state["status"], agent.models.serving) == ("SUCCEEDED", {"digits": "2.0.0"})
    await agent.stop()


async def test_wrong_bytes_are_asked_for_again_until_they_are_right(agent: Agent) -> None:
    await agent.start()
    damaged = bytearray(NEW.raw)
    damaged[1000] ^= 1
    agent.control.offers[NEW.hex] = bytes(damaged)
    agent.desire({"digits": NEW.entry("job-1")})
    state = await agent.finished("job-1")
    assert (state["status"], state["code"]) == ("FAILED", "ERR_MIX_AND_MATCH")
    agent.offer(NEW)
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.stop()


async def test_full_disk_is_tried_again_when_there_is_space(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    monkeypatch.setattr(Store, "free_bytes", lambda _self: SPACE_MARGIN_BYTES)
    assert (await agent.deploy(NEW, "job-2"))["code"] == "ERR_NO_SPACE"
    assert reported(agent)["state"] == "degraded"
    assert agent.deployment.reported.states() == {"digits": "degraded"}
    assert "free bytes" in reported(agent)["message"]
    monkeypatch.setattr(Store, "free_bytes", lambda _self: 10**12)
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.stop()


async def test_document_that_does_not_fit_on_the_disk_is_taken_later(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.start()
    save = agent.deployment._desired._file.save
    monkeypatch.setattr(agent.deployment._desired._file, "save", agent.full_disk)
    agent.offer(NEW)
    agent.desire({"digits": NEW.entry("job-1")})
    await until(lambda: agent.control.reported()["error"])
    assert agent.control.reported()["error"]["code"] == "ERR_NO_SPACE"
    monkeypatch.setattr(agent.deployment._desired._file, "save", save)
    assert (await agent.finished("job-1"))["status"] == "SUCCEEDED"
    assert agent.control.reported()["error"] is None
    await agent.stop()


async def test_worker_that_does_not_start_is_tried_again_without_another_transfer(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.models.broken = {NEW.version}
    assert (await agent.deploy(NEW, "job-2"))["code"] == "ERR_SELF_TEST"
    sent = agent.control.sent_bytes
    agent.models.broken = set()
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    assert agent.control.sent_bytes == sent
    await agent.stop()


async def test_lost_journal_does_not_stop_the_attempts(agent: Agent) -> None:
    agent.silence_limit_s = 0.05
    await agent.start()
    agent.desire({"digits": NEW.entry("job-1")})
    assert (await agent.finished("job-1"))["status"] == "TIMED_OUT"
    await agent.stop()
    (agent.root / "jobs.json").unlink()
    agent.offer(NEW)
    await agent.start()
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.stop()


# -- refusals ----------------------------------------------------------------------------------------------


async def test_refused_bundle_is_tried_again_when_the_trusted_keys_change(agent: Agent) -> None:
    agent.keyring = Keyring.of([])
    await agent.start()
    state = await agent.deploy(NEW, "job-1")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_ARBITRARY_SOFTWARE")
    assert state["message"].endswith(
        "; not tried again before the document, the trusted keys or the agent change"
    )
    sent = agent.control.sent_bytes
    await agent.stop()
    await agent.start()
    agent.desire({"digits": NEW.entry("job-1")}, version=agent.version)
    await agent.settle()
    assert agent.control.sent_bytes == sent, "nothing has changed"
    agent.keyring = KEYRING
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.stop()


@pytest.mark.parametrize("restarts", [False, True])
async def test_refused_bundle_that_no_one_sends_again_keeps_its_reason(agent: Agent, restarts: bool) -> None:
    """The command that sent it has ended long before the keys change."""
    agent.silence_limit_s = 0.05
    agent.keyring = Keyring.of([])
    await agent.start()
    assert (await agent.deploy(NEW, "job-1"))["status"] == "REJECTED"
    agent.control.offers.clear()
    if restarts:
        await agent.stop()
        await agent.start()
    agent.keyring = KEYRING
    ended = topics.format_topic(topics.Job(DEVICE, "job-1"))
    await until(lambda: sum(topic == ended and b"TIMED_OUT" in raw for topic, raw in agent.control.log) > 1)
    await until(lambda: "again" in reported(agent)["message"])
    message = reported(agent)["message"]
    assert "not trusted" in message
    assert message.count("no one has sent the bundle again: deploy it again") == 1
    assert "no block" not in message
    agent.offer(NEW)
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await until(lambda: reported(agent)["message"] is None)
    await agent.stop()


async def test_refused_bundle_is_tried_again_by_another_version_of_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.keyring = Keyring.of([])
    await agent.start()
    assert (await agent.deploy(NEW, "job-1"))["status"] == "REJECTED"
    sent = agent.control.sent_bytes
    await agent.stop()
    monkeypatch.setattr("agent.__version__", "99.0")
    await agent.start()
    await until(lambda: agent.control.sent_bytes > sent)
    await agent.stop()


async def refused_twice(agent: Agent) -> None:
    """Refuse a version of digits, whose predecessor serves, and faces, which never served."""
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.offer(FORGED, STRANGER)
    agent.desire({"digits": FORGED.entry("job-2"), "faces": STRANGER.entry("job-3")})
    for job in ("job-2", "job-3"):
        assert (await agent.finished(job))["code"] == "ERR_ARBITRARY_SOFTWARE"
    await agent.settle()


def refusals(agent: Agent) -> dict[str, tuple[str, bool]]:
    """Return the state of each refused model, and whether its reason is told."""
    models = {name: reported(agent, name) for name in ("digits", "faces")}
    assert models["faces"]["digest"] == STRANGER.digest
    assert agent.deployment.reported.states().items() >= {"digits": "degraded", "faces": "failed"}.items()
    return {name: (model["state"], "not trusted" in model["message"]) for name, model in models.items()}


REFUSED = {"digits": ("degraded", True), "faces": ("failed", True)}


async def test_refused_models_are_reported_whatever_else_is_deployed(agent: Agent) -> None:
    await refused_twice(agent)
    assert refusals(agent) == REFUSED
    others: dict[str, Any] = {"digits": FORGED.entry("job-2"), "faces": STRANGER.entry("job-3")}
    sent = agent.control.sent_bytes
    for job, bundle in (("job-4", make_bundle("pets")), ("job-5", make_bundle("cars", key=STRANGERS_KEY))):
        agent.offer(bundle)
        sent += len(bundle.raw)
        others |= {bundle.name: bundle.entry(job)}
        agent.desire(others)
        await agent.finished(job)
        await agent.settle()
        assert refusals(agent) == REFUSED
    assert agent.control.sent_bytes == sent, "what was refused is not fetched again"
    assert (reported(agent, "pets")["state"], reported(agent, "cars")["state"]) == ("active", "failed")
    await agent.stop()


async def test_refused_models_are_reported_after_a_restart_and_not_fetched_again(agent: Agent) -> None:
    await refused_twice(agent)
    sent, before = agent.control.sent_bytes, agent.control.reported()
    for _ in range(2):
        await agent.stop()
        await agent.start()
        await until(lambda: agent.models.serving == {"digits": "1.0.0"})
        await agent.settle()
        assert agent.control.reported() == before
        agent.desire(
            {"digits": FORGED.entry("job-2"), "faces": STRANGER.entry("job-3")}, version=agent.version
        )
        await agent.settle()
        assert refusals(agent) == REFUSED
    assert agent.control.sent_bytes == sent
    await agent.stop()


async def test_refusal_is_told_after_more_jobs_than_are_remembered(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "KEEP_JOBS", 4)
    await refused_twice(agent)
    sent = agent.control.sent_bytes
    wanted = {"digits": FORGED.entry("job-2"), "faces": STRANGER.entry("job-3")}
    pets = [make_bundle("pets", version=f"{each}.0.0") for each in range(1, 8)]
    for each, bundle in enumerate(pets):
        agent.offer(bundle)
        agent.desire(wanted | {"pets": bundle.entry(f"job-pets-{each}")})
        await agent.finished(f"job-pets-{each}")
        await agent.settle()
    await agent.stop()
    await agent.start()
    await agent.settle()
    assert refusals(agent) == REFUSED
    assert agent.control.sent_bytes == sent + sum(len(bundle.raw) for bundle in pets)
    await agent.stop()


async def test_failure_is_told_while_another_model_is_deployed(agent: Agent) -> None:
    agent.silence_limit_s = 0.05
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.desire({"digits": NEW.entry("job-2")})
    await agent.finished("job-2")
    pets = make_bundle("pets")
    agent.offer(pets)
    agent.desire({"digits": NEW.entry("job-2"), "pets": pets.entry("job-3")})
    await agent.finished("job-3")
    assert reported(agent)["state"] == "degraded"
    assert reported(agent)["message"].startswith("no block arrived")
    await agent.stop()


async def test_a_foreign_source_is_refused_again_when_the_keys_have_been_read(agent: Agent) -> None:
    await agent.start()
    foreign = {"sources": ["https://evil.example/digits.bundle"]}
    agent.desire({"digits": OLD.entry("job-1", **foreign)})
    await agent.finished("job-1")
    await until(lambda: len(agent.statuses("job-1")) > 1)
    await agent.settle()
    assert {status for status, _ in agent.statuses("job-1")} == {"REJECTED"}
    assert agent.control.job("job-1")["code"] == "ERR_SOURCE"
    await agent.stop()


async def test_refused_model_that_is_no_longer_wished_is_not_reported(agent: Agent) -> None:
    await refused_twice(agent)
    agent.desire({"digits": OLD.entry("job-4")})
    await agent.finished("job-4")
    await agent.settle()
    assert (reported(agent)["state"], reported(agent)["message"]) == ("active", None)
    assert reported(agent, "faces") == {}
    await agent.stop()


def test_same_circumstances_have_the_same_name_in_each_process() -> None:
    code = (
        "from dataclasses import replace\n"
        "from agent.deploy.circumstances import Circumstances\n"
        "from tests.agent.deploy.rig import MACHINE\n"
        "from tests.bundles import KEYRING\n"
        "features = frozenset('abcdefghijkl')\n"
        "machine = replace(MACHINE, features=features, compatible=features)\n"
        "circumstances = Circumstances(lambda: KEYRING, machine, features)\n"
        "circumstances.read_keys()\n"
        "print(circumstances.name())"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(names) == 1


def test_what_decides_about_a_refusal_changes_its_circumstances() -> None:
    def name(machine: Machine = MACHINE, keyring: Keyring = KEYRING, allow: tuple[str, ...] = ()) -> str:
        circumstances = Circumstances(lambda: keyring, machine, allow)
        circumstances.read_keys()
        return circumstances.name()

    names = {
        name(),
        name(replace(MACHINE, features=frozenset())),
        name(replace(MACHINE, memory_limit_bytes=1 << 30)),
        name(replace(MACHINE, memory_bytes=1 << 30)),
        name(keyring=Keyring.of([])),
        name(allow=("https://files.example/",)),
    }
    assert len(names) == 6
    first, second = (replace(MACHINE, memory_bytes=size) for size in (4_047_000_000, 4_046_960_000))
    assert name(first) == name(second), "a kernel reports a few pages less now and then"


# -- starts ------------------------------------------------------------------------------------------------


async def test_bundle_that_cannot_start_at_two_boots_is_kept_and_serves_in_the_end(agent: Agent) -> None:
    await upgraded(agent)
    await agent.stop()
    agent.models.broken = {NEW.version}
    await agent.start()
    await until(lambda: agent.control.reported()["models"]["digits"]["next_try"])
    assert agent.models.serving == {"digits": "1.0.0"}
    assert reported(agent)["state"] == "degraded"
    assert agent.store.has(NEW.digest)
    await agent.stop()
    await agent.start()
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    assert agent.store.active()["digits"].digest == NEW.digest
    agent.models.broken = set()
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.settle()
    assert reported(agent)["state"] == "active"
    await agent.stop()


async def test_bundle_that_a_person_installed_is_repaired_too(agent: Agent) -> None:
    await agent.start()
    (agent.store.inbox / f"{NEW.hex}.bundle").write_bytes(NEW.raw)
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    await agent.settle()
    await agent.stop()
    agent.models.broken = {NEW.version}
    await agent.start()
    assert agent.models.serving == {}
    agent.models.broken = set()
    await until(lambda: agent.models.serving == {"digits": "2.0.0"})
    assert agent.store.active()["digits"].origin is Origin.LOCAL
    await agent.stop()


def lose_record(agent: Agent) -> None:
    for name in ("active.json", "active.json.mirror"):
        (agent.root / name).write_bytes(b"damaged")


async def test_lost_record_is_made_again_from_the_document_and_the_bundles_on_disk(agent: Agent) -> None:
    await agent.start()
    faces, mine = make_bundle(name="faces"), make_bundle(name="mine")
    agent.offer(NEW, faces)
    agent.desire({"digits": NEW.entry("job-1"), "faces": faces.entry("job-2")})
    await agent.settle()
    (agent.store.inbox / f"{mine.hex}.bundle").write_bytes(mine.raw)
    await until(lambda: "mine" in agent.models.serving)
    await agent.settle()
    await agent.stop()
    lose_record(agent)
    agent.control.offers.clear()
    sent = agent.control.sent_bytes
    await agent.start()
    every = {"digits": "2.0.0", "faces": "1.0.0", "mine": "1.0.0"}
    await until(lambda: agent.models.serving == every)
    await agent.settle()
    assert agent.control.sent_bytes == sent
    assert {name: model.origin for name, model in agent.store.active().items()} == {
        "digits": Origin.DESIRED,
        "faces": Origin.DESIRED,
        "mine": Origin.LOCAL,
    }
    await agent.stop()


# -- versions ----------------------------------------------------------------------------------------------


async def test_documents_that_never_end_are_taken_slowly_and_the_latest_is_in_force(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes to an SD card, also for models that cannot be fetched."""
    monkeypatch.setattr(desired_state, "_MOST_AT_ONCE", 3)
    await agent.start()
    bundle = make_bundle()
    for number in range(1, 6):
        agent.desire({bundle.name: bundle.entry(f"job-{number}")})
    await agent.settle()
    report = agent.control.reported()
    assert (report["version"], report["error"]["code"], report["error"]["version"]) == (3, "ERR_STORE", 5)
    assert "expected at most 3 new documents, and one in 120 s" in report["error"]["message"]
    monkeypatch.setattr(desired_state, "_EVERY_S", 0.001)
    agent.deployment.disk_changed()
    await until(lambda: agent.control.reported()["version"] == 5)
    assert agent.control.reported()["error"] is None
    await agent.stop()


@pytest.mark.parametrize("version", [MAX_VERSION, MAX_VERSION - 1, FREE_VERSIONS + 1])
async def test_version_that_jumps_is_refused_and_locks_nobody_out(agent: Agent, version: int) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.desire({}, version=version)
    await agent.settle()
    error = agent.control.reported()["error"]
    assert (error["code"], error["version"]) == ("ERR_CONFLICT", version)
    assert error["message"] == f"expected a desired version of at most {FREE_VERSIONS}, got {version}"
    assert agent.models.serving == {"digits": "1.0.0"}
    agent.version = 1
    assert (await agent.deploy(NEW, "job-2"))["status"] == "SUCCEEDED"
    await agent.stop()


@pytest.mark.parametrize("version", [1_800_000_000, 1_800_000_000_000])
async def test_version_may_be_the_time(agent: Agent, version: int) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.version = version
    assert (await agent.deploy(NEW, "job-2"))["status"] == "SUCCEEDED"
    await agent.stop()


# -- stopping ----------------------------------------------------------------------------------------------


async def test_empty_document_stops_models_and_leaves_their_bundles_on_disk(agent: Agent) -> None:
    await upgraded(agent)
    agent.desire({})
    await agent.settle()
    assert (agent.models.serving, agent.control.reported()["models"]) == ({}, {})
    await agent.stop()
    await agent.start()
    assert agent.store.has(NEW.digest)
    agent.control.offers.clear()
    sent = agent.control.sent_bytes
    agent.desire({"digits": NEW.entry("job-3")})
    assert (await agent.finished("job-3"))["status"] == "SUCCEEDED"
    assert agent.control.sent_bytes == sent
    await agent.stop()


async def test_stopped_bundles_make_way_for_others_when_space_is_short(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.desire({})
    await agent.settle()
    needed = SPACE_MARGIN_BYTES + 10**6
    monkeypatch.setattr(
        Store, "free_bytes", lambda self: SPACE_MARGIN_BYTES if self.has(OLD.digest) else needed
    )
    faces = make_bundle(name="faces")
    assert (await agent.deploy(faces, "job-2"))["status"] == "SUCCEEDED"
    assert not agent.store.has(OLD.digest)
    await agent.stop()


# -- trial and rollback ------------------------------------------------------------------------------------


async def test_version_that_fails_on_trial_is_rolled_back_and_not_tried_again(agent: Agent) -> None:
    await upgraded(agent)
    agent.models.fail("digits")
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await until(lambda: reported(agent)["state"] == "rolled_back")
    state = agent.control.job("job-2")
    assert (state["status"], state["result"]) == ("FAILED", "FAILED_ROLLBACK_COMPLETE")
    assert state["message"] == "rolled back: 3 workers died within 60 s"
    model = reported(agent)
    assert (model["state"], model["digest"], model["rolled_back"], model["message"]) == (
        "rolled_back",
        OLD.digest,
        NEW.digest,
        "3 workers died within 60 s",
    )
    history = list(agent.models.history)
    agent.desire({"digits": NEW.entry("job-2")})
    faces = make_bundle(name="faces")
    agent.offer(faces)
    agent.desire({"digits": NEW.entry("job-2"), "faces": faces.entry("job-f")})
    await agent.finished("job-f")
    await agent.settle()
    assert agent.models.history == [*history, "+faces 1.0.0"], "the same job is not tried again"
    await agent.stop()
    await agent.start()
    assert agent.models.serving == {"digits": "1.0.0", "faces": "1.0.0"}, "although its counter is lower"
    assert reported(agent)["state"] == "rolled_back"
    await agent.stop()


async def test_rolled_back_version_that_is_deployed_again_is_judged_only_by_crashes(agent: Agent) -> None:
    await upgraded(agent)
    agent.models.scores["digits"] = Score(clients={"a": Tally(100, 90)})
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await agent.settle()
    assert (await agent.deploy(NEW, "job-3"))["status"] == "SUCCEEDED"
    agent.models.scores["digits"] = Score(clients={"a": Tally(100, 90)})
    history = len(agent.models.history)
    trial = agent.store.active()["digits"].trial
    assert trial is not None
    assert trial.baseline is None
    agent.models.fail("digits")
    await until(lambda: len(agent.models.history) > history)
    assert agent.models.history[-1] == "+digits 1.0.0", "one rollback, after the crash"
    await agent.stop()


async def test_predecessor_that_is_deployed_after_a_rollback_is_what_should_run(agent: Agent) -> None:
    await upgraded(agent)
    agent.models.fail("digits")
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await agent.settle()
    state = await agent.deploy(OLD, "job-3")
    assert (state["status"], state["message"]) == ("SUCCEEDED", "already installed")
    await agent.settle()
    assert (reported(agent)["state"], reported(agent)["rolled_back"]) == ("active", None)
    await agent.stop()


async def test_slower_version_is_compared_with_its_predecessor(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.models.scores["digits"] = Score({"a": Tally(1000)}, {"/1/a": Times(1000, 0.01)})
    await agent.deploy(NEW, "job-2")
    agent.models.scores["digits"] = Score({"a": Tally(100)}, {"/1/a": Times(100, 0.1)})
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await until(lambda: reported(agent)["state"] == "rolled_back")
    assert "100 ms, 10 ms with the version before" in reported(agent)["message"]
    await agent.stop()


async def test_restart_before_a_deployment_does_not_make_its_trial_blind(agent: Agent) -> None:
    """The steady client has a record; a monitor that asked once or twice does not, and cannot outvote it."""
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.models.scores["digits"] = Score({"steady": Tally(1000)})
    agent.deployment.record_use(["digits"], agent.deployment.records())
    await agent.stop()
    agent.models.scores.clear()
    await agent.start()
    await agent.deploy(NEW, "job-2")
    agent.models.scores["digits"] = Score({"steady": Tally(200, 200), "monitor": Tally(3)})
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await agent.settle()
    trial = make_bundle(version="3.0.0", counter=3, params=b"newer")
    await agent.deploy(trial, "job-3")
    known = agent.store.active()["digits"].trial
    assert known is not None
    assert known.baseline is not None
    assert known.baseline.clients == {"steady": Tally(1000)}, "it came back, and with it what it did before"
    await agent.stop()


async def test_failing_version_without_a_predecessor_stays(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    assert agent.store.active()["digits"].trial is None
    agent.models.fail("digits", "out of memory")
    agent.deployment.on_model_changed("digits")
    model = reported(agent)
    assert (model["state"], model["message"]) == ("failed", "out of memory")
    assert model["next_try"] == "2033-05-18T03:33:20.000+00:00"
    await agent.stop()


async def test_version_that_ends_the_agent_again_and_again_is_rolled_back_at_a_start(agent: Agent) -> None:
    await upgraded(agent)
    await agent.stop()
    for start in range(1, 5):
        assert agent.models.serving == {"digits": "2.0.0"}
        await agent.start()
        trial = agent.store.active()["digits"].trial
        if start < 4:
            assert trial is not None
            assert trial.starts == start
        await agent.cut_power()
    assert agent.models.serving == {"digits": "1.0.0"}
    assert "ended 4 times" in reported(agent)["message"]


async def test_clean_stops_do_not_count_against_a_version_on_trial(agent: Agent) -> None:
    await upgraded(agent)
    for _ in range(6):
        await agent.stop()
        await agent.start()
    assert agent.models.serving == {"digits": "2.0.0"}
    await agent.stop()


@in_virtual_time
async def test_ends_of_an_agent_that_ran_for_a_minute_do_not_count_against_a_version_on_trial(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its watchdog ends it again and again, for a reason that is not the version."""
    monkeypatch.setattr(deployment, "INBOX_INTERVAL_S", STEADY_S)
    monkeypatch.setattr(trial_watch, "INTERVAL_S", 1.0)
    await upgraded(agent)
    for _ in range(2 * MAX_STARTS):
        await asyncio.sleep(STEADY_S + 2.0)
        await agent.cut_power()
        await agent.start()
    assert agent.models.serving == {"digits": "2.0.0"}
    await agent.stop()


@pytest.mark.parametrize(
    ("step", "cleanly", "result"),
    [
        ("downloading", False, "SUCCEEDED"),
        ("testing", True, "SUCCEEDED"),
        ("testing", False, "FAILED"),
    ],
)
@in_virtual_time
async def test_ends_that_are_no_fault_of_a_bundle_do_not_end_its_installation(
    agent: Agent, step: str, cleanly: bool, result: str
) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    if step == "testing":
        agent.offer(NEW)
    agent.models.hanging = {"2.0.0"}
    agent.desire({"digits": NEW.entry("job-2")})
    for start in range(MAX_ATTEMPTS + 1):
        await agent.reached("job-2", step)
        await (agent.stop() if cleanly else agent.cut_power())
        agent.control.log.clear()
        if start == MAX_ATTEMPTS:
            agent.models.hanging.clear()
            agent.offer(NEW)
        await agent.start()
    assert (await agent.finished("job-2"))["status"] == result
    await agent.stop()


async def test_trial_ends_and_the_next_failure_is_not_rolled_back(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upgraded(agent)
    monkeypatch.setattr("agent.deploy.trial.TRIAL_S", 0.01)
    agent.models.scores["digits"] = Score(clients={"a": Tally(1000)})
    await until(lambda: agent.store.active()["digits"].trial is None)
    agent.models.fail("digits")
    agent.deployment.on_model_changed("digits")
    assert reported(agent)["state"] == "failed"
    assert agent.models.serving == {"digits": "2.0.0"}
    await agent.stop()


async def test_predecessor_that_cannot_run_is_tried_again(agent: Agent) -> None:
    await upgraded(agent)
    agent.models.broken = {OLD.version}
    agent.models.fail("digits")
    await until(lambda: "rollback" in str(agent.deployment._attempts._tries))
    assert agent.models.serving == {"digits": "2.0.0"}
    agent.models.broken = set()
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await agent.stop()


async def test_rolled_back_predecessor_that_does_not_start_is_tried_again(agent: Agent) -> None:
    await upgraded(agent)
    agent.models.fail("digits")
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await until(lambda: reported(agent)["state"] == "rolled_back")
    await agent.stop()
    agent.models.broken = {OLD.version}
    await agent.start()
    assert agent.models.serving == {"digits": "2.0.0"}, "it serves better than nothing"
    assert reported(agent)["state"] == "degraded"
    agent.models.broken = set()
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await agent.settle()
    assert reported(agent)["state"] == "rolled_back"
    assert agent.store.active()["digits"].rolled_back is not None
    await agent.stop()


async def test_predecessor_that_is_damaged_is_tried_after_growing_pauses(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upgraded(agent)
    agent.models.fail("digits")
    await until(lambda: reported(agent)["state"] == "rolled_back")
    await agent.stop()
    agent.store.bundle_path(OLD.digest).write_bytes(b"damaged")
    tries: list[str] = []
    count_failure = Attempts.failed

    def failed(attempts: Attempts, name: str, now_s: float) -> float:
        tries.append(name)
        return count_failure(attempts, name, now_s)

    monkeypatch.setattr(Attempts, "failed", failed)
    monkeypatch.setattr(reconcile, "FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(reconcile, "LONGEST_PAUSE_S", 60.0)
    await agent.start()
    assert agent.models.serving == {"digits": "2.0.0"}
    await until(lambda: tries)
    await agent.settle()
    assert not agent.deployment._attempts.due("digits", asyncio.get_running_loop().time())
    assert (reported(agent)["state"], reported(agent)["digest"]) == ("degraded", NEW.digest)
    await agent.stop()


async def test_version_that_ended_the_agent_does_not_serve_in_place_of_its_predecessor(agent: Agent) -> None:
    await upgraded(agent)
    for _ in range(MAX_STARTS):
        await agent.cut_power()
        await agent.start()
    assert reported(agent)["state"] == "rolled_back"
    await agent.stop()
    agent.models.broken = {OLD.version}
    await agent.start()
    assert agent.models.serving == {}
    await agent.stop()


async def test_disk_that_fails_to_show_a_bundle_does_not_end_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_bundle("other")
    await agent.start()
    agent.offer(OLD, other)
    agent.desire({"digits": OLD.entry("job-1"), "other": other.entry("job-o")})
    await agent.settle()
    await agent.stop()
    status, bad = os.stat, {agent.store.bundle_path(OLD.digest)}

    def failing(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if path in bad:
            raise OSError(errno.EIO, "Input/output error")
        return status(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", failing)
    await agent.start()
    assert agent.models.serving == {"other": "1.0.0"}
    await until(lambda: reported(agent).get("next_try"))
    bad.clear()
    await until(lambda: agent.models.serving == {"digits": "1.0.0", "other": "1.0.0"})
    await agent.stop()


async def test_agent_that_can_start_no_thread_serves_what_it_has(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upgraded(agent)
    monkeypatch.setattr(trial_watch, "STEADY_S", 0.0)
    refused: list[Any] = []
    on_disk = in_disk_thread

    async def no_thread(function: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(function, "__name__", "") == "record" and not refused:
            refused.append(function)
            raise StoreError("no thread can be started")
        return await on_disk(function, *arguments, **options)

    monkeypatch.setattr(trial_watch, "in_disk_thread", no_thread)
    await agent.cut_power()
    await agent.start()
    await until(lambda: refused)
    assert agent.models.serving == {"digits": "2.0.0"}
    await agent.stop()


async def test_rollback_on_a_full_disk_happens_and_is_recorded_later(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upgraded(agent)
    save = agent.store._active_file.save
    monkeypatch.setattr(agent.store._active_file, "save", agent.full_disk)
    agent.models.fail("digits")
    await until(lambda: agent.store.pending)
    assert agent.models.serving == {"digits": "1.0.0"}
    monkeypatch.setattr(agent.store._active_file, "save", save)
    await until(lambda: agent.store.active()["digits"].digest == OLD.digest and not agent.store.pending)
    assert Store(agent.root).active()["digits"].digest == OLD.digest
    await agent.stop()


# -- deploying again ---------------------------------------------------------------------------------------


async def test_same_bundle_deployed_again_really_starts_a_failed_model(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(OLD, "job-1")
    agent.models.fail("digits")
    state = await agent.deploy(OLD, "job-2")
    assert (state["status"], state["message"]) == ("SUCCEEDED", None)
    assert agent.models.history == ["+digits 1.0.0", "+digits 1.0.0"]
    assert reported(agent)["state"] == "active"
    await agent.stop()


async def test_failed_version_is_not_what_its_successor_returns_to(agent: Agent) -> None:
    await upgraded(agent)
    agent.store.record(replace(agent.store.active()["digits"], trial=None))
    agent.models.fail("digits")
    third = make_bundle(version="3.0.0", counter=3, params=b"third")
    await agent.deploy(third, "job-3")
    assert agent.store.active()["digits"].previous == OLD.digest
    await agent.stop()


def test_state_of_an_agent_before_trials_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    entry = {"digest": OLD.digest, "version": "1.0.0", "origin": "local", "job": "j", "previous": None}
    store._active_file.save({"digits": entry})
    assert Store(tmp_path).active()["digits"] == ActiveModel(
        "digits", OLD.digest, "1.0.0", Origin.LOCAL, "j", None
    )
