"""Deployments from the desired document to the result: which are installed, and which are refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent import clock
from agent.bundle.archive import pack
from agent.bundle.keyring import Keyring, key_id
from agent.deploy import deployment, inspection, reconcile, restoration
from agent.deploy.fetch.blocks import BLOCK_BYTES
from agent.deploy.store.last_use import LastUse
from agent.deploy.store.store import Store
from agent.errors import StoreError
from agent.wire import topics
from agent.wire.desired import Desired
from agent.wire.job import Status
from tests.agent.deploy.rig import DEVICE, Agent, Bundle, make_bundle
from tests.bundles import KEY
from tests.patience import PATIENCE_S, until

OTHER = ec.derive_private_key(0xABCDEF, ec.SECP256R1())
STEPS = ["downloading", "verifying", "installing", "testing", "activating", "committing", "cleanup"]


async def test_a_bundle_is_pulled_installed_and_reported(agent: Agent) -> None:
    bundle = make_bundle()
    await agent.start()
    state = await agent.deploy(bundle, "job-1")
    assert (state["status"], state["result"], state["code"]) == ("SUCCEEDED", "SUCCESSFUL", None)
    assert agent.models.serving == {"digits": "1.0.0"}
    seen = [step for _, step in agent.statuses("job-1") if step]
    assert list(dict.fromkeys(seen)) == STEPS
    assert agent.statuses("job-1")[0] == ("QUEUED", None)
    model = agent.control.reported()["models"]["digits"]
    assert (model["digest"], model["state"], model["security_counter"]) == (bundle.digest, "active", 1)
    assert agent.store.bundle_path(bundle.digest).read_bytes() == bundle.raw
    await agent.stop()


async def test_nothing_is_synced_to_disk_on_the_event_loop(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A card that collects its garbage holds up a sync for seconds; pings and answers must go on.
    synced: list[bool] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(threading.current_thread() is threading.main_thread())
        sync(descriptor)

    await agent.start()
    monkeypatch.setattr(os, "fsync", note)
    await agent.deploy(make_bundle(), "job-1")
    await agent.deploy(make_bundle(version="2.0.0", counter=2, params=b"wrong"), "job-2")
    await agent.deploy(make_bundle(version="3.0.0", counter=3), "job-3")
    agent.models.fail("digits")  # on trial, so its predecessor comes back
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    agent.desire({})
    await agent.settle()
    assert len(synced) > 20
    assert not any(synced)


async def test_a_job_fails_and_the_agent_goes_on_while_no_thread_can_be_started(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Models, or other programs of the user, have used them up.
    start, left = threading.Thread.start, True

    def count(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        start(thread)

    def use_up(name: str) -> None:
        nonlocal left
        left = left and name != "installer:verifying"

    monkeypatch.setattr(threading.Thread, "start", count)
    monkeypatch.setattr(deployment, "INBOX_INTERVAL_S", 0.01)
    monkeypatch.setattr(reconcile, "FIRST_PAUSE_S", 0.2)
    agent.checkpoint = use_up
    await agent.start()
    state = await agent.deploy(make_bundle(), "job-1")
    assert (state["status"], state["code"]) == ("FAILED", "ERR_STORE")
    agent.desire({"digits": make_bundle().entry("job-2")})
    await until(lambda: agent.control.reported()["error"] is not None)
    assert agent.control.reported()["error"]["code"] == "ERR_STORE"
    agent.store.checkpoint = lambda _name: None
    left = True
    assert (await agent.finished("job-2"))["status"] == "SUCCEEDED", "taken by itself"
    await agent.stop()


async def test_a_restarted_agent_runs_what_was_active_without_a_broker(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    await agent.stop()
    agent.control.retained.clear()
    await agent.start()
    assert agent.models.serving == {"digits": "1.0.0"}
    assert agent.control.job("job-1")["status"] == "SUCCEEDED", "published again: the broker forgot it"
    assert agent.control.reported()["version"] == 1
    await agent.stop()


async def test_a_new_version_keeps_the_one_before_it_and_no_more(agent: Agent) -> None:
    await agent.start()
    bundles = [make_bundle(version=f"1.{minor}.0", params=b"%d" % minor) for minor in range(3)]
    for index, bundle in enumerate(bundles):
        assert (await agent.deploy(bundle, f"job-{index}"))["status"] == "SUCCEEDED"
    stored = {path.stem for path in (agent.root / "store").iterdir()}
    assert stored == {bundles[1].hex, bundles[2].hex}
    assert agent.control.reported()["models"]["digits"]["previous"] == bundles[1].digest
    assert agent.models.history == ["+digits 1.0.0", "+digits 1.1.0", "+digits 1.2.0"]
    await agent.stop()


def unsigned_bundle() -> Bundle:
    members = dict.fromkeys(("mod.so", "mod.json", "mod.params", "manifest.json"), b"{}")
    return Bundle(pack(members), "digits", "2.0.0", 9)


def refused() -> dict[str, tuple[Bundle, dict[str, Any], str]]:
    good = make_bundle(version="2.0.0")
    stranger = ec.derive_private_key(0xBAD, ec.SECP256R1())
    unsigned = bytearray(good.raw)
    at = unsigned.index(b'"payload"') + 20
    unsigned[at] ^= 1
    return {
        "a stranger's key": (make_bundle(version="2.0.0", key=stranger), {}, "ERR_ARBITRARY_SOFTWARE"),
        "a broken signature": (Bundle(bytes(unsigned), "digits", "2.0.0", 1), {}, "ERR_ARBITRARY_SOFTWARE"),
        "no signature": (unsigned_bundle(), {}, "ERR_ARBITRARY_SOFTWARE"),
        "no bundle": (Bundle(b"hello" * 100, "digits", "2.0.0", 1), {}, "ERR_ARBITRARY_SOFTWARE"),
        "an older counter": (make_bundle(version="2.0.0", counter=4), {}, "ERR_ROLLBACK"),
        "a counter in milliseconds": (make_bundle(counter=1_796_000_000_000), {}, "ERR_COUNTER_AHEAD"),
        "another CPU": (make_bundle(counter=9, features=("avx512f",)), {}, "ERR_INCOMPATIBLE"),
        "another ABI": (make_bundle(counter=9, abi="tvm-ffi-0.2"), {}, "ERR_INCOMPATIBLE"),
        "a foreign URL": (good, {"sources": ["https://evil.example/digits.bundle"]}, "ERR_SOURCE"),
        "a file": (good, {"sources": ["file:///etc/shadow"]}, "ERR_SOURCE"),
        "plain http": (good, {"sources": ["http://allowed.example/a.bundle"]}, "ERR_SOURCE"),
        "one foreign URL of two": (good, {"sources": ["mqtt", "https://evil.example/a"]}, "ERR_SOURCE"),
    }


@pytest.mark.parametrize("what", refused())
async def test_what_may_not_run_is_rejected_and_nothing_changes(agent: Agent, what: str) -> None:
    bundle, changes, code = refused()[what]
    await agent.start()
    await agent.deploy(make_bundle(counter=5), "job-1")
    before = agent.disk()
    state = await agent.deploy(bundle, "job-2", **changes)
    assert (state["status"], state["result"], state["code"]) == ("REJECTED", "REJECTED", code)
    assert agent.disk() == before
    assert agent.models.history == ["+digits 1.0.0"]
    assert agent.control.reported()["models"]["digits"]["version"] == "1.0.0"
    await agent.stop()
    await agent.start()
    assert agent.models.serving == {"digits": "1.0.0"}
    assert agent.disk() == before
    await agent.stop()


async def test_another_models_bundle_is_refused_under_a_wrong_name(agent: Agent) -> None:
    await agent.start()
    bundle = make_bundle(name="faces")
    agent.offer(bundle)
    before = agent.disk()
    agent.desire({"digits": bundle.entry("job-1")})
    state = await agent.finished("job-1")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_MIX_AND_MATCH")
    assert agent.disk() == before
    assert agent.models.history == []
    await agent.stop()


async def test_a_validly_signed_bundle_of_another_digest_is_refused(agent: Agent) -> None:
    await agent.start()
    asked, other = make_bundle(params=b"asked for"), make_bundle(params=b"another")
    assert len(asked.raw) == len(other.raw)
    agent.control.offers[asked.hex] = other.raw
    agent.desire({"digits": asked.entry("job-1")})
    state = await agent.finished("job-1")
    assert (state["status"], state["code"]) == ("FAILED", "ERR_MIX_AND_MATCH"), "a source may have it later"
    assert agent.models.history == []
    await agent.stop()


async def test_a_signed_older_bundle_replayed_is_refused_even_after_its_successor_is_gone(
    agent: Agent,
) -> None:
    await agent.start()
    old, new = make_bundle(counter=1), make_bundle(version="2.0.0", counter=2)
    await agent.deploy(old, "job-1")
    await agent.deploy(new, "job-2")
    agent.desire({})
    await agent.settle()
    assert agent.models.serving == {}
    await agent.stop()
    for path in (agent.root / "store").iterdir():
        path.unlink()
    await agent.start()
    state = await agent.deploy(old, "job-3")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_ROLLBACK")
    assert agent.models.serving == {}
    await agent.stop()


async def test_counter_ahead_of_time_is_refused_and_the_next_build_runs(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "is_synchronised", lambda: True)
    now = int(clock.now_s())
    await agent.start()
    await agent.deploy(make_bundle(counter=now), "job-1")
    ahead = make_bundle(version="2.0.0", counter=now + 3 * 86_400)
    state = await agent.deploy(ahead, "job-2")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_COUNTER_AHEAD")
    assert agent.store.committed_counter("digits") == now
    honest = make_bundle(version="2.0.1", counter=now + 86_400)
    assert (await agent.deploy(honest, "job-3"))["status"] == "SUCCEEDED"
    # A person may want it all the same, and says so when it is built.
    meant = make_bundle(version="2.0.2", counter=ahead.counter, counter_ahead_of_time=True)
    assert (await agent.deploy(meant, "job-4"))["status"] == "SUCCEEDED"
    await agent.stop()
    monkeypatch.setattr(time, "time", lambda: 12.0)  # the clock goes back: what was installed stays
    await agent.start()
    assert agent.models.serving == {"digits": "2.0.2"}
    agent.desire({"digits": meant.entry("job-5")})
    assert (await agent.finished("job-5"))["status"] == "SUCCEEDED"
    await agent.stop()


async def test_device_without_a_clock_takes_honest_bundles_and_no_milliseconds(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "is_synchronised", lambda: False)
    monkeypatch.setattr(clock, "now_s", lambda: 12.0)
    await agent.start()
    honest = make_bundle(counter=1_900_000_000)  # years after the agent's build
    assert (await agent.deploy(honest, "job-1"))["status"] == "SUCCEEDED"
    state = await agent.deploy(make_bundle(version="2.0.0", counter=1_900_000_000_000), "job-2")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_COUNTER_AHEAD")
    await agent.stop()


async def test_counter_that_an_earlier_agent_has_committed_stays_in_service(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = make_bundle(counter=(1 << 63) - 1)
    with monkeypatch.context() as earlier:
        earlier.setattr(inspection, "highest_counter", lambda *_args, **_flags: (1 << 63) - 1)
        await agent.start()
        await agent.deploy(late, "job-1")
        await agent.stop()
    for copy in agent.root.glob("counters.json*"):
        copy.unlink()
    await agent.start()
    assert agent.models.serving == {"digits": "1.0.0"}
    agent.desire({})
    await agent.settle()
    assert (await agent.deploy(late, "job-2"))["status"] == "SUCCEEDED"
    await agent.stop()


async def test_failed_samples_leave_the_old_version_serving(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    before = agent.disk()
    state = await agent.deploy(make_bundle(version="2.0.0", counter=2, params=b"wrong"), "job-2")
    assert (state["status"], state["result"]) == ("FAILED", "FAILED_NO_STATE_CHANGE")
    assert state["code"] == "ERR_SELF_TEST"
    disk = agent.disk()
    assert len([disk.pop(name) for name in disk.keys() - before.keys()]) == 1, "kept for the next attempt"
    assert disk == before
    assert agent.models.serving == {"digits": "1.0.0"}
    assert agent.store.committed_counter("digits") == 1
    await agent.stop()


async def test_job_runs_once_and_its_end_is_published_again(agent: Agent) -> None:
    await agent.start()
    bundle = make_bundle()
    await agent.deploy(bundle, "job-1")
    for _ in range(5):
        agent.desire({"digits": bundle.entry("job-1")}, version=agent.version)
        agent.desire({"digits": bundle.entry("job-1")})
    agent.control.retained.clear()
    agent.desire({"digits": bundle.entry("job-1")}, version=agent.version)
    assert (await agent.finished("job-1"))["status"] == "SUCCEEDED"
    await agent.stop()
    await agent.start()
    agent.desire({"digits": bundle.entry("job-1")})
    await agent.settle()
    assert agent.models.history == ["+digits 1.0.0", "+digits 1.0.0"], "once by the job, once at the start"
    await agent.stop()


async def test_a_rejected_job_is_not_tried_again(agent: Agent) -> None:
    await agent.start()
    bundle = make_bundle(abi="tvm-ffi-9.9")
    await agent.deploy(bundle, "job-1")
    sent = agent.control.sent_bytes
    agent.desire({"digits": bundle.entry("job-1")})
    await agent.settle()
    assert agent.control.sent_bytes == sent
    await agent.stop()


async def test_the_same_bundle_under_a_new_job_is_already_installed(agent: Agent) -> None:
    await agent.start()
    bundle = make_bundle()
    await agent.deploy(bundle, "job-1")
    sent = agent.control.sent_bytes
    state = await agent.deploy(bundle, "job-2")
    assert (state["status"], state["message"]) == ("SUCCEEDED", "already installed")
    assert agent.control.sent_bytes == sent
    assert agent.control.reported()["models"]["digits"]["job"] == "job-2"
    await agent.stop()


async def test_an_identifier_used_for_two_deployments_is_refused(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    agent.desire({"digits": make_bundle(version="2.0.0").entry("job-1")})
    await agent.settle()
    assert agent.control.reported()["error"]["code"] == "ERR_SOURCE"
    assert agent.control.reported()["version"] == 1
    await agent.stop()


async def test_a_model_that_is_absent_is_taken_out_of_service(agent: Agent) -> None:
    await agent.start()
    digits, faces = make_bundle(), make_bundle(name="faces")
    agent.offer(digits, faces)
    agent.desire({"digits": digits.entry("job-1"), "faces": faces.entry("job-2")})
    await agent.finished("job-1")
    await agent.finished("job-2")
    assert agent.models.serving == {"digits": "1.0.0", "faces": "1.0.0"}
    agent.desire({"faces": faces.entry("job-2")})
    await agent.settle()
    assert agent.models.serving == {"faces": "1.0.0"}
    assert list(agent.control.reported()["models"]) == ["faces"]
    assert agent.store.committed_counter("digits") == 1, "the counter outlives the model"
    assert agent.store.has(digits.digest), "it stays until something else serves under this name"
    await agent.stop()


async def test_a_job_replaced_while_it_waits_is_superseded(agent: Agent) -> None:
    await agent.start()
    first, second, third = (make_bundle(version=f"{n}.0.0", params=b"%d" % n) for n in (1, 2, 3))
    agent.desire({"digits": first.entry("job-1")})  # there is no offer: it keeps downloading
    await agent.reached("job-1", "downloading")
    faces = make_bundle(name="faces")
    agent.offer(third, faces)
    agent.desire({"digits": second.entry("job-2"), "faces": faces.entry("job-f")})
    agent.desire({"digits": third.entry("job-3"), "faces": faces.entry("job-f")})
    assert (await agent.finished("job-3"))["status"] == "SUCCEEDED"
    # Only now: it could be in service before the next document is stored. It must not begin any more.
    agent.offer(second)
    assert (await agent.finished("job-f"))["status"] == "SUCCEEDED"
    assert (await agent.finished("job-1"))["status"] == "SUPERSEDED"
    assert (await agent.finished("job-2"))["status"] == "SUPERSEDED"
    assert agent.models.history == ["+faces 1.0.0", "+digits 3.0.0"]
    await agent.stop()


async def test_model_removed_while_it_downloads_is_canceled(agent: Agent) -> None:
    await agent.start()
    bundle = make_bundle()
    agent.desire({"digits": bundle.entry("job-1")})
    await agent.reached("job-1", "downloading")
    agent.desire({})
    state = await agent.finished("job-1")
    assert (state["status"], state["result"]) == ("CANCELED", "FAILED_NO_STATE_CHANGE")
    await agent.stop()


async def test_agent_that_stops_while_it_cancels_a_download_stops(agent: Agent) -> None:
    await agent.start()
    bundle = make_bundle()
    agent.desire({"digits": bundle.entry("job-1")})
    await agent.reached("job-1", "downloading")
    assert agent.deployment._installer.abandon(Status.CANCELED)
    stopping = asyncio.ensure_future(agent.stop())  # in the same turn: the job sees both at once
    stopped, _ = await asyncio.wait({stopping}, timeout=PATIENCE_S)
    assert stopped, "the job took the end of the agent for that of its download"
    await agent.start()
    agent.desire({})
    assert (await agent.finished("job-1"))["status"] == "CANCELED"
    await agent.stop()


async def test_bundle_without_an_offer_times_out(agent: Agent) -> None:
    agent.silence_limit_s = 0.2
    await agent.start()
    agent.desire({"digits": make_bundle().entry("job-1")})
    state = await agent.finished("job-1")
    assert (state["status"], state["result"]) == ("TIMED_OUT", "FAILED_NO_STATE_CHANGE")
    await agent.stop()


async def test_an_older_desired_document_changes_nothing(agent: Agent) -> None:
    await agent.start()
    old, new = make_bundle(), make_bundle(version="2.0.0", counter=1, params=b"2")
    agent.offer(old, new)
    agent.desire({"digits": new.entry("job-2")}, version=7)
    await agent.finished("job-2")
    agent.desire({"digits": old.entry("job-1")}, version=6)
    agent.desire({}, version=7)
    await agent.settle()
    assert agent.models.serving == {"digits": "2.0.0"}
    assert agent.control.reported()["version"] == 7
    await agent.stop()


async def test_document_with_another_base_is_a_conflict(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    known = Desired.from_bytes(
        json.dumps({"version": 1, "models": {"digits": make_bundle().entry("job-1")}}).encode()
    )
    faces = make_bundle(name="faces")
    agent.offer(faces)

    async def write(version: int, base: str | None) -> None:
        document: dict[str, Any] = {"version": version, "models": {"faces": faces.entry("job-2")}}
        payload = json.dumps(document | ({} if base is None else {"base": base})).encode()
        taken = agent.deployment.on_message(topics.Desired(DEVICE), payload)
        assert taken is not None
        await taken

    await write(2, f"sha256:{'0' * 64}")
    assert agent.control.reported()["error"] == {
        "code": "ERR_CONFLICT",
        "message": "expected desired version 2 to be based on 1, got another base",
        "version": 2,
    }
    await write(1, None)
    assert agent.control.reported()["error"]["code"] == "ERR_CONFLICT"
    assert agent.models.serving == {"digits": "1.0.0"}
    await write(2, known.digest)
    assert (await agent.finished("job-2"))["status"] == "SUCCEEDED"
    assert agent.control.reported()["error"] is None
    await agent.stop()


@pytest.mark.parametrize("payload", [b"{", b"\xff", b"[]", b'{"version":9,"models":{"X":{}}}', b"[" * 4000])
async def test_a_desired_document_that_cannot_be_read_changes_nothing(agent: Agent, payload: bytes) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    before = agent.disk()
    agent.deployment.on_message(topics.Desired(DEVICE), payload)
    await agent.settle()
    assert agent.control.reported()["error"]["code"] == "ERR_ARBITRARY_SOFTWARE"
    assert agent.control.reported()["version"] == 1
    assert agent.disk() == before
    assert agent.models.serving == {"digits": "1.0.0"}
    await agent.stop()


async def test_a_cleared_desired_document_stops_nothing(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    agent.deployment.on_message(topics.Desired(DEVICE), b"")
    await agent.settle()
    assert agent.models.serving == {"digits": "1.0.0"}
    await agent.stop()


async def test_damaged_active_bundle_is_replaced_by_its_predecessor_and_fetched_again(
    agent: Agent,
) -> None:
    await agent.start()
    old, new = make_bundle(), make_bundle(version="1.1.0", params=b"new")
    await agent.deploy(old, "job-1")
    await agent.deploy(new, "job-2")
    await agent.stop()
    path = agent.store.bundle_path(new.digest)
    damaged = bytearray(path.read_bytes())
    damaged[-600] ^= 1
    path.write_bytes(damaged)
    await agent.start()
    assert agent.models.history[-1] == "+digits 1.0.0"
    await agent.settle()
    assert agent.models.serving == {"digits": "1.1.0"}
    assert hashlib.sha256(path.read_bytes()).hexdigest() == new.hex
    await agent.stop()


@pytest.mark.parametrize("on_trial", [True, False])
async def test_damaged_bundle_is_replaced_by_one_below_the_committed_counter_only_on_trial(
    agent: Agent, on_trial: bool
) -> None:
    await agent.start()
    await agent.deploy(make_bundle(counter=1), "job-1")
    new = make_bundle(version="2.0.0", counter=2)
    await agent.deploy(new, "job-2")
    if not on_trial:
        agent.store.record(replace(agent.store.active()["digits"], trial=None))
    await agent.stop()
    agent.control.offers.clear()
    agent.store.bundle_path(new.digest).write_bytes(b"damaged")
    await agent.start()
    assert agent.models.serving == ({"digits": "1.0.0"} if on_trial else {})
    assert agent.store.committed_counter("digits") == 2
    state = agent.control.reported()["models"]["digits"]["state"]
    assert state == ("degraded" if on_trial else "failed")
    await agent.stop()


async def test_bundle_of_a_revoked_key_does_not_run_at_the_next_start(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    await agent.stop()
    agent.keyring = Keyring.of([KEY.public_key()], revoked=[key_id(KEY.public_key())])
    await agent.start()
    assert agent.models.serving == {}
    await agent.stop()


REVOKING = Keyring.of([KEY.public_key(), OTHER.public_key()], revoked=[key_id(KEY.public_key())])


async def test_revoked_bundle_stops_at_once_and_only_the_models_of_that_key(agent: Agent) -> None:
    agent.keyring = Keyring.of([KEY.public_key(), OTHER.public_key()])
    await agent.start()
    digits, faces = make_bundle(), make_bundle(name="faces", key=OTHER)
    agent.offer(digits, faces)
    agent.desire({"digits": digits.entry("job-1"), "faces": faces.entry("job-2")})
    await agent.finished("job-2")
    await agent.settle()
    trusted, agent.keyring = agent.keyring, REVOKING
    agent.models.revoke("digits")
    agent.deployment.on_keys_read()
    await until(lambda: agent.models.serving == {"faces": "1.0.0"})
    await until(lambda: "which is revoked" in agent.models.given_up["digits"])
    await until(lambda: agent.control.reported()["models"]["digits"]["state"] == "failed")
    assert agent.deployment.reported.stopped_by_revocation() == {"digits"}
    # The same bundle again is refused, and one that another key has signed serves.
    state = await agent.deploy(digits, "job-3")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_KEY_REVOKED")
    agent.keyring = trusted
    assert (await agent.deploy(digits, "job-4"))["status"] == "SUCCEEDED"
    agent.keyring = REVOKING
    agent.models.revoke("digits")
    agent.deployment.on_keys_read()
    await until(lambda: "digits" not in agent.models.serving)
    signed_again = make_bundle(version="1.0.1", key=OTHER)
    assert (await agent.deploy(signed_again, "job-5"))["status"] == "SUCCEEDED"
    assert agent.models.serving["digits"] == "1.0.1"
    assert agent.deployment.reported.stopped_by_revocation() == set()
    await agent.stop()


async def test_bundle_whose_key_was_revoked_a_moment_ago_is_not_installed_again(agent: Agent) -> None:
    await agent.start()
    await agent.deploy(make_bundle(), "job-1")
    agent.keyring = REVOKING
    agent.models.revoke("digits")
    state = await agent.deploy(make_bundle(), "job-2")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_KEY_REVOKED")
    await agent.stop()


async def test_predecessor_of_another_key_serves_in_place_of_a_revoked_bundle_on_trial(agent: Agent) -> None:
    agent.keyring = Keyring.of([KEY.public_key(), OTHER.public_key()])
    await agent.start()
    await agent.deploy(make_bundle(key=OTHER), "job-1")
    await agent.deploy(make_bundle(version="2.0.0", counter=2), "job-2")
    assert agent.store.active()["digits"].trial is not None
    agent.keyring = REVOKING
    agent.models.revoke("digits")
    agent.deployment.on_keys_read()
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await until(lambda: agent.control.reported()["models"]["digits"]["state"] == "degraded")
    assert agent.models.history[-2:] == ["-digits", "+digits 1.0.0"], "it stops before anything is read"
    await agent.stop()
    await agent.start()
    assert agent.models.serving == {"digits": "1.0.0"}, "a restart comes to the same result"
    await agent.stop()


async def test_revoked_bundle_serves_until_it_is_replaced_if_it_should(agent: Agent) -> None:
    agent.keyring = Keyring.of([KEY.public_key(), OTHER.public_key()])
    agent.serves_revoked = True
    await agent.start()
    old, new = make_bundle(), make_bundle(version="2.0.0", counter=2, key=OTHER)
    await agent.deploy(old, "job-1")
    agent.keyring = REVOKING
    agent.models.revoke("digits")
    agent.deployment.on_keys_read()
    await agent.stop()
    await agent.start()
    assert agent.models.serving == {"digits": "1.0.0"}
    assert (await agent.deploy(old, "job-2"))["status"] == "SUCCEEDED", "it is in service already"
    state = await agent.deploy(make_bundle(version="1.0.1", counter=2), "job-3")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_KEY_REVOKED")
    assert (await agent.deploy(new, "job-4"))["status"] == "SUCCEEDED"
    state = await agent.deploy(old, "job-5")
    assert (state["status"], state["code"]) == ("REJECTED", "ERR_KEY_REVOKED")
    assert agent.models.serving == {"digits": "2.0.0"}
    await agent.stop()


async def test_two_agents_cannot_share_a_state_directory(agent: Agent, tmp_path: Path) -> None:
    await agent.start()
    with pytest.raises(StoreError, match="in use by another agent"):
        Store(agent.root).lock()
    await agent.stop()
    other = Store(agent.root)
    other.lock()
    other.unlock()


async def test_transfer_resumes_where_the_last_agent_was_stopped(agent: Agent) -> None:
    bundle = make_bundle(params=b"x" * 3_000_000)
    await agent.start()
    half = len(bundle.raw) // 2 // BLOCK_BYTES * BLOCK_BYTES
    agent.control.offers[bundle.hex] = bundle.raw[:half]
    agent.desire({"digits": bundle.entry("job-1")})
    async with asyncio.timeout(PATIENCE_S):
        while not agent.store.part_path(bundle.digest).exists() or (
            agent.store.part_path(bundle.digest).stat().st_size < half
        ):
            await asyncio.sleep(0.01)
    await agent.stop()
    sent = agent.control.sent_bytes
    agent.offer(bundle)
    await agent.start()
    assert (await agent.finished("job-1"))["status"] == "SUCCEEDED"
    assert agent.control.sent_bytes - sent == len(bundle.raw) - half
    await agent.stop()


async def test_damaged_beginning_is_discarded_once(agent: Agent) -> None:
    bundle = make_bundle(params=b"x" * 600_000)
    await agent.start()
    agent.store.part_path(bundle.digest).write_bytes(bytes(300_000))
    assert (await agent.deploy(bundle, "job-1"))["status"] == "SUCCEEDED"
    assert agent.control.sent_bytes == 2 * len(bundle.raw) - 300_000
    await agent.stop()


@pytest.mark.slow
async def test_old_jobs_are_removed_from_the_journal_and_the_broker(agent: Agent) -> None:
    await agent.start()
    bundle = make_bundle()
    for index in range(70):
        await agent.deploy(bundle, f"job-{index}")
    topic = topics.format_topic(topics.Job(DEVICE, "job-0"))
    assert topic not in agent.control.retained
    assert json.loads((agent.root / "jobs.json").read_text())["body"][0]["request"]["job"] == "job-6"
    await agent.stop()


@pytest.mark.parametrize("turns", range(5))
async def test_stop_is_not_lost_when_work_arrives_at_the_same_time(agent: Agent, turns: int) -> None:
    await agent.start()
    await agent.settle()
    agent.desire({"digits": make_bundle(abi="tvm-ffi-9.9").entry("job-1")})
    for _ in range(turns):  # of the event loop, between the work and the stop
        await asyncio.sleep(0)
    stopping = asyncio.create_task(agent.stop())
    done, _ = await asyncio.wait({stopping}, timeout=PATIENCE_S)
    assert done


async def test_model_that_hangs_while_it_is_loaded_does_not_hold_up_the_others(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = [make_bundle(name) for name in ("a", "b", "c")]
    await agent.start()
    agent.offer(*bundles)
    agent.desire({bundle.name: bundle.entry(f"job-{bundle.name}") for bundle in bundles})
    await agent.settle()
    LastUse(agent.root).record(["b"])
    await agent.stop()
    agent.models.hanging = {"b"}
    agent.models.expected.clear()
    agent.models.history.clear()
    monkeypatch.setattr(restoration, "PATIENCE_S", 0.3)
    await agent.start(wait=False)
    assert agent.models.expected == {"a", "b", "c"}
    assert agent.models.serving == {}, "connected before anything is loaded"
    await agent.settle()
    assert agent.models.history == ["+a 1.0.0", "+c 1.0.0"]
    newer = make_bundle("a", "2.0.0")
    agent.offer(newer)
    agent.desire(
        {bundle.name: bundle.entry(f"job-{bundle.name}") for bundle in bundles} | {"a": newer.entry("job-2")}
    )
    assert (await agent.finished("job-2"))["status"] == "SUCCEEDED"
    await agent.stop()


async def test_models_are_loaded_in_the_order_of_their_last_use(agent: Agent) -> None:
    bundles = [make_bundle(name) for name in ("a", "b", "c")]
    await agent.start()
    agent.offer(*bundles)
    agent.desire({bundle.name: bundle.entry(f"job-{bundle.name}") for bundle in bundles})
    await agent.settle()
    LastUse(agent.root).record(["c", "a"])
    await agent.stop()
    agent.models.history.clear()
    await agent.start()
    assert agent.models.history == ["+c 1.0.0", "+a 1.0.0", "+b 1.0.0"]
    await agent.stop()
