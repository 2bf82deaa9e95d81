"""Certificates: both sides are checked, errors say what to do, and renewed certificates are used."""

from __future__ import annotations

import contextlib
import errno
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization

from agent.errors import ConfigError
from agent.mqtt import tls
from agent.mqtt.settings import BrokerSettings, TlsSettings
from agent.mqtt.tls import CertificateFiles, tls_context
from builder.fleet.client import Client as FleetClient
from edgebundle import AsyncClient, Broker, BrokerError, Request
from tests.agent.service.authority import HOUR, Authority, TlsFront
from tests.agent.service.conftest import Client, StartService, status_of
from tests.conftest import BrokerProcess, debian_mosquitto
from tests.patience import PATIENCE_S, until

FILES_OF_A_PAIR = (("certificate", "pem"), ("key", "key"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return folder


def keys_of(folder: Path, port: int, host: str = "127.0.0.1", **others: str) -> dict[str, object]:
    return {
        "broker_url": f"mqtts://{host}:{port}",
        "broker_ca": str(folder / "ca.pem"),
        "broker_certificate": str(folder / "client.pem"),
        "broker_key": str(folder / "client.key"),
        # With "auto", a slow answer on a busy machine could look like a broker without MQTT 5.
        "broker_protocol": "5",
        **others,
    }


async def test_renewed_certificates_of_both_sides_are_used_at_the_next_connection(
    mosquitto: BrokerProcess, start_service: StartService, folder: Path
) -> None:
    old = Authority(folder)
    old.issue("server")
    first = old.issue("client")
    front = TlsFront(mosquitto.port, folder / "server", folder / "ca.pem")
    await front.start()
    async with start_service(0, **keys_of(folder, front.port)) as rig:
        assert set(front.serials) == {first}
        await front.stop()
        front.serials.clear()
        new = Authority(folder)
        new.issue("server")
        second = new.issue("client")
        front.use(folder / "server", folder / "ca.pem")
        await front.start()
        await until(lambda: rig.service.online and len(front.serials) >= 2)
        assert set(front.serials) == {second}
    await front.stop()


@pytest.mark.parametrize("signalled", [True, False], ids=["by_a_signal", "by_looking"])
async def test_renewed_certificate_is_used_without_a_restart(
    mosquitto: BrokerProcess,
    start_service: StartService,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    signalled: bool,
) -> None:
    if not signalled:
        monkeypatch.setattr("agent.service.service._FILES_INTERVAL_S", 0.05)
    authority = Authority(folder)
    authority.issue("server")
    first = authority.issue("client")
    front = TlsFront(mosquitto.port, folder / "server", folder / "ca.pem")
    await front.start()
    async with start_service(0, **keys_of(folder, front.port)) as rig:
        second = authority.issue("client")
        if signalled:
            assert set(front.serials) == {first}
            front.serials.clear()
            rig.service.reload()
        await until(lambda: front.serials.count(second) >= 2 and rig.service.online)
        assert set(front.serials) <= ({second} if signalled else {first, second})
        samples = rig.service.samples()
        assert samples['edge_mqtt_reconnects_total{connection="control"}'] >= 1
    await front.stop()


async def test_mismatched_certificates_are_reported_and_leave_the_connection_alone(
    mosquitto: BrokerProcess, start_service: StartService, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(folder)
    authority.issue("server")
    authority.issue("client")
    authority.issue("other")
    front = TlsFront(mosquitto.port, folder / "server", folder / "ca.pem")
    await front.start()
    async with start_service(0, **keys_of(folder, front.port)) as rig:
        (folder / "other.pem").replace(folder / "client.pem")
        client = Client(BrokerSettings("127.0.0.1", mosquitto.port), "client", rig.device)
        await client.start()
        before = len(front.serials)
        rig.service.reload()
        # This request would be answered over another connection.
        assert status_of(await client.ask(b"anyone?")) == 404
        assert len(front.serials) == before
        await client.connection.close()
    assert "does not belong to the certificate in" in caplog.text
    assert "copy both files of one pair" in caplog.text
    await front.stop()


def expired_broker(folder: Path) -> None:
    Authority(folder).issue("server", since=-2 * HOUR, until=-HOUR)


def broker_of_tomorrow(folder: Path) -> None:
    Authority(folder).issue("server", since=HOUR, until=2 * HOUR)


def broker_of_another_name(folder: Path) -> None:
    Authority(folder).issue("server", "broker.example")


def broker_of_another_authority(folder: Path) -> None:
    Authority(folder).issue("server")
    (folder / "other").mkdir()
    Authority(folder / "other", "other").path.replace(folder / "ca.pem")


@pytest.mark.parametrize(
    ("prepare", "said", "advised"),
    [
        (expired_broker, "certificate has expired", "renew it at the broker"),
        (broker_of_tomorrow, "not valid yet", "set the clock"),
        (broker_of_another_name, "is not for 127.0.0.1", "give the broker a certificate for 127.0.0.1"),
        (broker_of_another_authority, "was not issued by", "give the authority that issued it"),
    ],
)
async def test_broker_with_a_wrong_certificate_is_not_used_and_the_reason_is_logged(
    mosquitto: BrokerProcess,
    start_service: StartService,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    prepare: Callable[[Path], None],
    said: str,
    advised: str,
) -> None:
    prepare(folder)
    Authority(folder, "clients").issue("client")
    front = TlsFront(mosquitto.port, folder / "server", folder / "clients.pem")
    await front.start()
    async with start_service(0, wait=False, **keys_of(folder, front.port)) as rig:
        await until(lambda: "kitchen-control: no connection" in caplog.text)
        assert not rig.service.online
    [line] = [text for text in caplog.messages if text.startswith("kitchen-control: no connection")]
    assert said in line
    assert advised in line
    assert "Traceback" not in caplog.text
    assert front.serials == []
    await front.stop()


@pytest.mark.parametrize("kind", ["unknown", "expired", "none"])
async def test_broker_that_refuses_our_certificate_is_named_with_what_to_check(
    start_service: StartService,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    authority = Authority(folder)
    authority.issue("server")
    Authority(folder, "clients")
    if kind == "expired":
        authority.issue("client", since=-2 * HOUR, until=-HOUR)
    elif kind == "unknown":
        (folder / "other").mkdir()
        other = Authority(folder / "other")
        other.issue("client")
        for suffix in ("pem", "key"):
            (folder / "other" / f"client.{suffix}").replace(folder / f"client.{suffix}")
    for path in folder.glob("server.*"):
        path.chmod(0o644)
    broker = BrokerProcess(
        "mosquitto",
        folder,
        extra=f"cafile {folder}/ca.pem\ncertfile {folder}/server.pem\nkeyfile {folder}/server.key\n"
        "require_certificate true\n",
    )
    broker.start()
    keys = keys_of(folder, broker.port)
    if kind == "none":
        keys = {name: keys[name] for name in ("broker_ca", "broker_url")}
    async with start_service(0, wait=False, **keys) as rig:
        await until(lambda: "kitchen-control: no connection" in caplog.text)
        assert not rig.service.online
    broker.stop()
    [line] = [text for text in caplog.messages if text.startswith("kitchen-control: no connection")]
    expected = "requires a client certificate" if kind == "none" else "refuses this device's certificate"
    assert expected in line


def settings_of(folder: Path) -> TlsSettings:
    return TlsSettings(folder / "ca.pem", folder / "client.pem", folder / "client.key")


def test_encrypted_key_is_refused_without_asking_for_its_password(folder: Path) -> None:
    Authority(folder).issue("client")
    path = folder / "client.key"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="expected an unencrypted key") as caught:
        tls_context(settings_of(folder))
    assert "openssl pkey" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["ca.pem", "client.pem", "client.key"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM"])
def test_file_that_cannot_be_used_is_named(folder: Path, name: str, content: bytes | None) -> None:
    Authority(folder).issue("client")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: ") as caught:
        tls_context(settings_of(folder))
    assert caught.value.hint


def test_key_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Authority(folder).issue("client")

    def denied(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Tests may run as root, who may read everything.
    monkeypatch.setattr("ssl.SSLContext.load_cert_chain", denied)
    monkeypatch.setattr("pathlib.Path.open", denied)
    with pytest.raises(ConfigError, match=r"client\.pem: Permission denied") as caught:
        tls_context(settings_of(folder))
    assert "chmod 0640" in str(caught.value.hint)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_key_that_everybody_can_read_causes_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    Authority(folder).issue("client")
    (folder / "client.key").chmod(mode)
    with caplog.at_level(logging.WARNING):
        CertificateFiles(settings_of(folder)).check()
    assert ("every user of this machine can read the key" in caplog.text) is warned


def test_expiry_of_certificates_is_read_again_when_they_change(folder: Path) -> None:
    authority = Authority(folder)
    authority.issue("client", until=2 * HOUR)
    files = CertificateFiles(settings_of(folder))
    assert not files.changed()
    soon_s = time.time() + 2 * HOUR.total_seconds()
    assert files.expiries()["certificate"] == pytest.approx(soon_s, abs=60)
    assert files.expiries()["ca"] == pytest.approx(time.time() + 24 * HOUR.total_seconds(), abs=60)
    authority.issue("client", until=5 * HOUR)
    assert files.expiries()["certificate"] == pytest.approx(soon_s, abs=60)
    assert files.changed()
    later_s = time.time() + 5 * HOUR.total_seconds()
    assert files.expiries()["certificate"] == pytest.approx(later_s, abs=60)
    (folder / "client.pem").write_bytes(b"nonsense")
    assert files.changed()
    assert files.expiries().keys() == {"ca"}


def test_expiry_is_read_with_an_old_library_too() -> None:
    of_debian_12 = SimpleNamespace(not_valid_after=datetime(2030, 1, 1))
    assert tls._end(of_debian_12) == 1893456000  # type: ignore[arg-type]


def test_change_of_a_file_is_seen_once(folder: Path) -> None:
    authority = Authority(folder)
    authority.issue("client")
    files = CertificateFiles(settings_of(folder))
    assert not files.changed()
    authority.issue("client")
    assert files.changed()
    assert not files.changed()
    (folder / "ca.pem").unlink()
    assert files.changed()


SAMPLES = Path(__file__).parents[3] / "docs" / "mosquitto"
BY_CERTIFICATE = "require_certificate true\nuse_identity_as_username true\n"


@contextlib.contextmanager
def sample_broker(
    folder: Path, suite: str, change: Callable[[str], str] = lambda text: text
) -> Iterator[BrokerProcess]:
    """Start the broker of docs/mosquitto, with only its paths and its port changed."""
    (folder / "edge.acl").write_text((SAMPLES / "edge.acl").read_text())
    for path in folder.iterdir():
        path.chmod(0o644)
    broker = BrokerProcess("mosquitto", folder, program=debian_mosquitto(suite))
    text = change((SAMPLES / "mosquitto.conf").read_text()).replace(
        "listener 8883", f"listener {broker.port}"
    )
    text = text.replace("/etc/mosquitto/certs", str(folder)).replace("/etc/mosquitto", str(folder))
    broker.configuration = text.replace("/var/lib/mosquitto/", f"{folder}/")
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
async def test_sample_configuration_serves_an_agent_over_mutual_tls_under_the_access_list(
    start_service: StartService, folder: Path, suite: str
) -> None:
    authority = Authority(folder)
    for name in ("server", "kitchen", "alice"):
        authority.issue(name)
    own = {f"broker_{key}": str(folder / f"kitchen.{end}") for key, end in FILES_OF_A_PAIR}
    with sample_broker(folder, suite) as broker:
        url = f"mqtts://127.0.0.1:{broker.port}"
        async with start_service(0, broker_url=url, broker_ca=str(authority.path), **own) as rig:
            await rig.service.models.activate(rig.signer.bundle())
            alice = Broker(url, authority.path, folder / "alice.pem", folder / "alice.key")
            request = Request("application/octet-stream", b"hello", ("x;FP32;1,4",))
            async with AsyncClient(alice) as client:
                target = client.model("kitchen", "echo")._target
                message, _ = await client.ask(target, request, end_s=time.monotonic() + PATIENCE_S)
                assert status_of(message) == 200
            ends = [name for name in rig.service.samples() if "certificate_expiry" in name]
            assert len(ends) == 2
            async with FleetClient(alice, lambda *_: None) as client:
                verdict = await client.publish("edge/v1/kitchen/desired", b"{}", retain=True)
                assert verdict.name == "Not authorized"


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
async def test_sample_configuration_serves_users_with_passwords(
    start_service: StartService, folder: Path, suite: str
) -> None:
    authority = Authority(folder)
    authority.issue("server")
    *loader, program = debian_mosquitto(suite)
    mosquitto_passwd = str(Path(program).parents[1] / "bin" / "mosquitto_passwd")
    passwords = folder / "passwords"
    passwords.touch()
    for user in ("kitchen", "alice"):
        command = [*loader, mosquitto_passwd, "-b", str(passwords), user, f"secret of {user}"]
        subprocess.run(command, check=True)
        (folder / f"{user}.password").write_text(f"secret of {user}\n")

    def with_passwords(text: str) -> str:
        return text.replace(BY_CERTIFICATE, "").replace("#password_file", "password_file")

    with sample_broker(folder, suite, with_passwords) as broker:
        url = f"mqtts://127.0.0.1:{broker.port}"
        own = {"broker_username": "kitchen", "broker_password_file": str(folder / "kitchen.password")}
        async with start_service(0, broker_url=url, broker_ca=str(authority.path), **own) as rig:
            await rig.service.models.activate(rig.signer.bundle())
            place = url.replace("//", "//alice@")
            alice = Broker(place, authority.path, password_file=folder / "alice.password")
            request = Request("application/octet-stream", b"hello", ("x;FP32;1,4",))
            async with AsyncClient(alice) as client:
                target = client.model("kitchen", "echo")._target
                message, _ = await client.ask(target, request, end_s=time.monotonic() + PATIENCE_S)
                assert status_of(message) == 200
            wrong = Broker(place, authority.path, password_file=folder / "kitchen.password")
            with pytest.raises(BrokerError, match="Not authorized"):
                await AsyncClient(wrong).connect()
