"""Downloads from a real TLS server on loopback, with a certificate authority of the test."""

from __future__ import annotations

import asyncio
import datetime
import http.server
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent.deploy.fetch import https
from agent.deploy.fetch.allow_list import AllowList, HttpsSettings, parse_url
from agent.deploy.fetch.blocks import BLOCK_BYTES
from agent.deploy.fetch.https import HttpsSource
from agent.deploy.store.part import Part
from agent.errors import ConfigError, EndlessDataError, NoSpaceError, SourceError
from tests.agent.deploy.rig import Agent, make_bundle
from tests.patience import PATIENCE_S, until

FILE = bytes(range(256)) * 4000  # 1 MB


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def make_certificate(folder: Path, *, host: str = "127.0.0.1", days: int = 1) -> tuple[Path, Path]:
    """Make a certificate authority and a server certificate; return the paths of both files."""
    now = datetime.datetime.now(datetime.UTC)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    start, end = now - datetime.timedelta(days=10), now + datetime.timedelta(days=days)

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name("throwaway authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
        )

    root = (
        builder("throwaway authority", authority)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority, hashes.SHA256())
    )
    leaf = (
        builder("server", server)
        .not_valid_after(end)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False
        )
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(root.public_bytes(pem))
    (folder / "server.pem").write_bytes(
        leaf.public_bytes(pem)
        + server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "ca.pem", folder / "server.pem"


class Server:
    """An https server that serves one file, and can be made to misbehave."""

    def __init__(self, folder: Path, **certificate: object) -> None:
        self.file = FILE
        self.etag = '"v1"'
        self.ranges = True
        self.cut_after: list[int] = []
        self.misbehave: Callable[[http.server.BaseHTTPRequestHandler], bool] = lambda _handler: False
        self.requests: list[dict[str, str]] = []
        self.sent = 0
        self.ca, chain = make_certificate(folder, **certificate)  # type: ignore[arg-type]
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.requests.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
                self.close_connection = True
                if not server.misbehave(self):
                    server.serve(self)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        self._httpd.socket = context.wrap_socket(self._httpd.socket, server_side=True)
        self._httpd.handle_error = lambda *_arguments: None  # type: ignore[method-assign]
        self.url = f"https://127.0.0.1:{self._httpd.server_port}/bundles/"
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        if wanted and self.ranges and handler.headers.get("If-Range", self.etag) == self.etag:
            start = int(wanted[1])
        if start:
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(self.file) - 1}/{len(self.file)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(self.file) - start))
        handler.send_header("ETag", self.etag)
        handler.end_headers()
        end = start + self.cut_after.pop(0) if self.cut_after else len(self.file)
        body = self.file[start:end]
        self.sent += len(body)
        handler.wfile.write(body)

    def close(self) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "tls"
    folder.mkdir()
    running = Server(folder)
    yield running
    running.close()


def settings(server: Server, **changes: object) -> HttpsSettings:
    given: dict[str, object] = {
        "allow": (server.url,),
        "ca_file": server.ca,
        "timeout_s": PATIENCE_S,
        "floor_window_s": PATIENCE_S,
        "floor_bytes_per_s": 1000,
        "attempts": 2,
        "pause_s": 0.01,
    }
    return HttpsSettings(**(given | changes))  # type: ignore[arg-type]


async def fetch(server: Server, path: Path, *, size: int = len(FILE), **changes: object) -> bytes:
    source = HttpsSource(settings(server, **changes))
    with Part(path, size) as part:
        await source.download(server.url + "a.bundle", part, lambda _written: None)
    return path.read_bytes()


async def test_file_arrives_complete(server: Server, tmp_path: Path) -> None:
    assert await fetch(server, tmp_path / "part") == FILE
    assert server.requests[0]["accept-encoding"] == "identity"
    assert "range" not in server.requests[0]


async def test_interrupted_transfer_resumes(server: Server, tmp_path: Path) -> None:
    server.cut_after = [300_000, 300_000, 10]
    assert await fetch(server, tmp_path / "part") == FILE
    assert [request.get("range") for request in server.requests] == [
        None, "bytes=300000-", "bytes=600000-", "bytes=600010-",
    ]  # fmt: skip
    assert server.requests[1]["if-range"] == '"v1"'
    assert server.sent == len(FILE)


async def test_another_version_of_the_file_starts_over(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "part"
    server.cut_after = [300_000, 0]
    with pytest.raises(SourceError):
        await fetch(server, path)
    server.file, server.etag = FILE[::-1], '"v2"'
    assert await fetch(server, path) == FILE[::-1]


async def test_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cut_after = [300_000]
    assert await fetch(server, tmp_path / "part") == FILE


async def test_a_weak_tag_is_not_relied_on(server: Server, tmp_path: Path) -> None:
    server.etag = 'W/"v1"'
    server.cut_after = [300_000]
    assert await fetch(server, tmp_path / "part") == FILE
    assert "if-range" not in server.requests[1]


async def test_more_bytes_than_announced_are_endless_data_and_not_read(
    server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "part"
    with pytest.raises(EndlessDataError, match="expected 1000 bytes, got 1024000"):
        await fetch(server, path, size=1000)
    assert path.read_bytes() == b""


async def test_an_endless_chunked_body_is_cut_at_the_announced_size(server: Server, tmp_path: Path) -> None:
    def endless(handler: http.server.BaseHTTPRequestHandler) -> bool:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"1000\r\n" + bytes(4096) + b"\r\n")
        except OSError:
            return True

    server.misbehave = endless
    path = tmp_path / "part"
    with pytest.raises(EndlessDataError, match="expected 100000 bytes, got more"):
        await fetch(server, path, size=100_000)
    assert path.stat().st_size <= 100_000


async def test_a_short_file_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="expected 1024001 bytes, got 1024000"):
        await fetch(server, tmp_path / "part", size=len(FILE) + 1)


async def test_a_redirect_is_not_followed(server: Server, tmp_path: Path) -> None:
    def redirect(handler: http.server.BaseHTTPRequestHandler) -> bool:
        handler.send_response(302)
        handler.send_header("Location", server.url + "b.bundle")
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    server.misbehave = redirect
    with pytest.raises(SourceError, match="expected status 200 or 206, got 302"):
        await fetch(server, tmp_path / "part")
    assert len(server.requests) == 1


async def test_transient_failure_is_retried_and_a_permanent_one_is_not(
    server: Server, tmp_path: Path
) -> None:
    answers = [503, 503]

    def fail(handler: http.server.BaseHTTPRequestHandler) -> bool:
        if answers:
            handler.send_error(answers.pop(0))
            return True
        return False

    server.misbehave = fail
    assert await fetch(server, tmp_path / "part", attempts=3) == FILE
    answers.append(404)
    with pytest.raises(SourceError, match="got 404"):
        await fetch(server, tmp_path / "other")
    assert len(server.requests) == 4


@pytest.mark.parametrize("where", ["body", "headers"])
async def test_server_that_is_too_slow_is_abandoned(server: Server, tmp_path: Path, where: str) -> None:
    stop = threading.Event()

    def trickle(handler: http.server.BaseHTTPRequestHandler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1024000\r\n")
        if where == "body":
            handler.wfile.write(b"\r\n")
        try:
            while not stop.is_set():
                time.sleep(0.02)
                handler.wfile.write(b"X")
        except OSError:
            pass
        return True

    server.misbehave = trickle
    with pytest.raises(SourceError, match="too slow: expected at least 1000 bytes/s"):
        # It is never silent for so long that this would end it.
        fetching = fetch(server, tmp_path / "part", timeout_s=10 * PATIENCE_S, floor_window_s=0.5)
        await asyncio.wait_for(fetching, PATIENCE_S)
    stop.set()


async def test_a_cancelled_download_ends_at_once_and_keeps_what_it_has(
    server: Server, tmp_path: Path
) -> None:
    stop = threading.Event()

    def stall(handler: http.server.BaseHTTPRequestHandler) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1024000\r\n\r\n" + FILE[:5000])
        stop.wait()
        return True

    server.misbehave = stall
    path = tmp_path / "part"
    longer_s = 10 * PATIENCE_S
    task = asyncio.create_task(fetch(server, path, timeout_s=longer_s, floor_window_s=longer_s))
    await until(lambda: path.exists() and path.stat().st_size == 5000)
    task.cancel()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(asyncio.CancelledError):
            await task
    stop.set()
    assert path.read_bytes() == FILE[:5000]


async def test_a_download_that_ends_while_it_connects_does_not_begin_the_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = socket.socketpair()
    url = "https://127.0.0.1/bundles/a.bundle"
    with near, far, Part(tmp_path / "part", 10) as part:
        far.settimeout(PATIENCE_S)
        # Without the check, the server has so many seconds for each byte of its handshake.
        settings = HttpsSettings(allow=("https://127.0.0.1/bundles/",), timeout_s=PATIENCE_S)
        context = ssl.create_default_context()
        transfer = https._Transfer(url, parse_url(url), part, context, settings)

        def connected(*_arguments: object) -> socket.socket:
            transfer.cut()
            near.settimeout(PATIENCE_S)
            return near

        monkeypatch.setattr(socket, "create_connection", connected)
        with pytest.raises(https._TransientError, match="no longer wanted"):
            transfer.run()
        assert far.recv(1) == b""


async def test_a_server_of_an_unknown_authority_is_refused(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ca, _ = make_certificate(other)
    with pytest.raises(SourceError, match=r"127\.0\.0\.1"):
        await fetch(server, tmp_path / "part", ca_file=ca)
    assert server.requests == []


@pytest.mark.parametrize("certificate", [{"host": "127.0.0.2"}, {"days": -1}], ids=["wrong host", "expired"])
async def test_invalid_certificate_is_refused(tmp_path: Path, certificate: dict[str, object]) -> None:
    server = Server(tmp_path, **certificate)
    try:
        with pytest.raises(SourceError):
            await fetch(server, tmp_path / "part")
        assert server.requests == []
    finally:
        server.close()


async def test_unreachable_server_is_an_error_after_some_attempts(server: Server, tmp_path: Path) -> None:
    source = HttpsSource(settings(server, allow=("https://127.0.0.1:1/",)))
    with (
        Part(tmp_path / "part", 100) as part,
        pytest.raises(SourceError, match=r"127\.0\.0\.1: .*refused"),
    ):
        await source.download("https://127.0.0.1:1/a", part, lambda _written: None)


async def test_full_disk_is_reported_as_such(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: Part, _data: bytes) -> None:
        raise NoSpaceError("writing part at 0: No space left on device")

    monkeypatch.setattr(Part, "append", full)
    with pytest.raises(NoSpaceError):
        await fetch(server, tmp_path / "part")


@pytest.mark.parametrize(
    "url",
    [
        "https://files.example/bundles/a.bundle",
        "https://FILES.example:443/bundles/deep/a.bundle?token=1",
        "https://other.example:8443/a",
    ],
)
def test_a_url_below_an_allowed_prefix_is_accepted(url: str) -> None:
    AllowList(["https://files.example/bundles", "https://other.example:8443/"]).check(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://files.example/bundles/a",
        "file:///bundles/a",
        "https://files.example/bundlesX/a",
        "https://files.example/",
        "https://files.example:8443/bundles/a",
        "https://files.example.evil.example/bundles/a",
        "https://evil.example/bundles/a",
        "https://files.example@evil.example/bundles/a",
        "https://user:pw@files.example/bundles/a",
        "https://files.example/bundles/../secret",
        "https://files.example/bundles/./a",
        "https://files.example/bundles/%2e%2e/secret",
        "https://files.example/bundles/..%2fsecret",
        "https://files.example/bundles/%5c..%5csecret",
        "https://files.example/bundles//a",
        "https://files.example//bundles/a",
        "https://files.example/bundles\\..\\a",
        "https://files.example/bundles/a#b",
        "https://files.example/bundles/a\r\nHost: evil.example",
        "https://files.example/bundles/ä",
        "https://files.example:99999/bundles/a",
        "https:///bundles/a",
        "https:files.example/bundles/a",
        "//files.example/bundles/a",
        "mqtts://files.example/bundles/a",
        "https://files.example/bundles/" + "a" * 3000,
        "",
    ],
)
def test_a_url_that_is_not_allowed_or_ambiguous_is_refused(url: str) -> None:
    with pytest.raises(SourceError):
        AllowList(["https://files.example/bundles"]).check(url)


@pytest.mark.parametrize("prefix", ["http://files.example/", "files.example", "https://files.example/a?b=c"])
def test_allowed_source_that_is_not_a_prefix_is_a_configuration_error(prefix: str) -> None:
    with pytest.raises(ConfigError):
        AllowList([prefix])


async def test_a_bundle_is_deployed_from_https_through_cuts(server: Server, tmp_path: Path) -> None:
    bundle = make_bundle(params=b"p" * 900_000)
    server.file = bundle.raw
    server.cut_after = [200_000, 200_000]
    agent = await Agent(tmp_path / "state", https=settings(server)).start()
    agent.desire({"digits": bundle.entry("job-1", sources=[server.url + "digits.bundle"])})
    assert (await agent.finished("job-1"))["status"] == "SUCCEEDED"
    assert agent.models.serving == {"digits": "1.0.0"}
    assert server.sent == len(bundle.raw)
    await agent.stop()


async def test_a_transfer_begun_over_mqtt_is_finished_over_https(server: Server, tmp_path: Path) -> None:
    bundle = make_bundle(params=b"p" * 900_000)
    server.file = bundle.raw
    agent = Agent(tmp_path / "state", https=settings(server), silence_limit_s=0.3)
    agent.control.offers[bundle.hex] = bundle.raw[: 2 * BLOCK_BYTES]
    await agent.start()
    agent.desire({"digits": bundle.entry("job-1", sources=["mqtt", server.url + "digits.bundle"])})
    assert (await agent.finished("job-1"))["status"] == "SUCCEEDED"
    assert server.requests[0]["range"] == f"bytes={2 * BLOCK_BYTES}-"
    await agent.stop()


async def test_a_mirror_with_another_file_does_not_stop_the_next_source(
    server: Server, tmp_path: Path
) -> None:
    bundle = make_bundle(params=b"p" * 900_000)
    server.file = bytes(len(bundle.raw))
    agent = await Agent(tmp_path / "state", https=settings(server)).start()
    agent.offer(bundle)
    agent.desire({"digits": bundle.entry("job-1", sources=[server.url + "digits.bundle", "mqtt"])})
    assert (await agent.finished("job-1"))["status"] == "SUCCEEDED"
    await agent.stop()
