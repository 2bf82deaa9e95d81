"""`edge-agent install FILE`: with a running agent, without one, and refused bundles."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.machine import Machine
from agent.deploy import local
from agent.errors import CounterAheadError, EdgeError, IncompatibleError, RollbackError, SignatureError
from tests.agent.deploy.rig import MACHINE, Agent, Bundle, make_bundle
from tests.bundles import public_pem
from tests.patience import until


@dataclass(frozen=True)
class Settings:
    state_dir: Path
    trust_dir: Path
    compatible: tuple[str, ...] = ()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    trust = tmp_path / "trust"
    trust.mkdir()
    (trust / "signing.pub").write_bytes(public_pem())
    monkeypatch.setattr(Machine, "detect", classmethod(lambda _cls, **_options: MACHINE))
    return Settings(tmp_path / "state", trust)


def write(tmp_path: Path, bundle: Bundle) -> Path:
    path = tmp_path / f"{bundle.hex[:8]}.bundle"
    path.write_bytes(bundle.raw)
    return path


@pytest.mark.slow
async def test_running_agent_installs_the_bundle(
    agent: Agent, config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make_bundle()
    await agent.start()
    assert await asyncio.to_thread(local.install, config, write(tmp_path, bundle)) == 0
    assert "digits 1.0.0 is in service" in capsys.readouterr().out
    assert agent.models.serving == {"digits": "1.0.0"}
    assert list((agent.root / "inbox").iterdir()) == []
    model = agent.control.reported()["models"]["digits"]
    assert (model["origin"], model["digest"]) == ("local", bundle.digest)
    assert await asyncio.to_thread(local.install, config, write(tmp_path, bundle)) == 0, "already installed"
    await agent.stop()


@pytest.mark.parametrize("linked", ["folder", "file"])
async def test_link_in_place_of_the_inbox_is_not_followed(
    linked: str, agent: Agent, config: Settings, tmp_path: Path
) -> None:
    bundle = make_bundle()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / "passwd"
    target.write_text("root")
    await agent.start()
    await agent.stop()
    inbox = agent.root / "inbox"
    if linked == "folder":
        inbox.rmdir()
        inbox.symlink_to(elsewhere)
        with pytest.raises(EdgeError, match=r"into the inbox: Not a directory"):
            local.install(config, write(tmp_path, bundle))
        assert list(elsewhere.iterdir()) == [target]
    else:
        (inbox / f"{bundle.hex}.bundle").symlink_to(target)
        assert local.install(config, write(tmp_path, bundle)) == 0
        assert (inbox / f"{bundle.hex}.bundle").read_bytes() == bundle.raw
        assert not (inbox / f"{bundle.hex}.bundle").is_symlink()
    assert target.read_text() == "root"


async def test_without_an_agent_the_bundle_waits_for_one(
    agent: Agent, config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local.install(config, write(tmp_path, make_bundle())) == 0
    assert "the agent installs it when it starts" in capsys.readouterr().out
    await agent.start()
    await until(lambda: agent.models.serving == {"digits": "1.0.0"})
    await agent.stop()


async def test_desired_document_without_a_local_model_leaves_it_in_service(
    agent: Agent, config: Settings, tmp_path: Path
) -> None:
    await agent.start()
    await asyncio.to_thread(local.install, config, write(tmp_path, make_bundle()))
    faces = make_bundle(name="faces")
    assert (await agent.deploy(faces, "job-1"))["status"] == "SUCCEEDED"
    assert set(agent.models.serving) == {"digits", "faces"}
    newer = make_bundle(version="2.0.0", counter=2)
    assert (await agent.deploy(newer, "job-2"))["status"] == "SUCCEEDED"
    agent.desire({})
    await agent.settle()
    assert agent.models.serving == {}
    await agent.stop()


async def test_bundle_that_may_not_run_is_reported_at_once_and_changes_nothing(
    agent: Agent, config: Settings, tmp_path: Path
) -> None:
    await agent.start()
    await agent.deploy(make_bundle(counter=5), "job-1")
    before = agent.disk()
    stranger = ec.derive_private_key(0xBAD, ec.SECP256R1())
    for bundle, error in (
        (make_bundle(key=stranger), SignatureError),
        (make_bundle(counter=4), RollbackError),
        (make_bundle(counter=1_796_000_000_000), CounterAheadError),
        (make_bundle(counter=9, abi="tvm-ffi-9.9"), IncompatibleError),
    ):
        with pytest.raises(error):
            await asyncio.to_thread(local.install, config, write(tmp_path, bundle))
    with pytest.raises(EdgeError):
        local.install(config, tmp_path / "nothing.bundle")
    assert agent.disk() == before
    await agent.stop()


async def test_a_bundle_that_fails_its_samples_is_reported_and_not_left_behind(
    agent: Agent, config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await agent.start()
    bad = write(tmp_path, make_bundle(params=b"wrong"))
    assert await asyncio.to_thread(local.install, config, bad) == 4
    assert "ERR_SELF_TEST" in capsys.readouterr().out
    assert list((agent.root / "inbox").iterdir()) == []
    assert list((agent.root / "store").iterdir()) == []
    await agent.stop()


async def test_dropped_bundle_is_verified_before_its_name_is_trusted(agent: Agent) -> None:
    await agent.start()
    stranger = make_bundle(key=ec.derive_private_key(0xBAD, ec.SECP256R1()))
    good = make_bundle(name="faces")
    inbox = agent.root / "inbox"
    (inbox / f"{stranger.hex}.bundle").write_bytes(stranger.raw)
    (inbox / f"{'0' * 64}.bundle").write_bytes(good.raw)
    (inbox / f"{'1' * 64}.bundle").symlink_to("/etc/hostname")
    (inbox / "notes.txt").write_text("not a bundle")
    await until(lambda: not list(inbox.glob("*.bundle")))
    await agent.settle()
    assert agent.models.serving == {}
    codes = {path.name[0]: path.read_text() for path in inbox.glob("*.result")}
    assert "ERR_ARBITRARY_SOFTWARE" in codes[stranger.hex[0]]
    assert "ERR_MIX_AND_MATCH" in codes["0"]
    assert "ERR_ARBITRARY_SOFTWARE" in codes["1"]
    assert (inbox / "notes.txt").exists()
    await agent.stop()
