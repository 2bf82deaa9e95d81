"""Requests to the dashboard without a browser: of strangers, of other sites, with nonsense in them."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse
from tornado.websocket import websocket_connect

from builder.errors import FleetError
from builder.fleet.bundle_file import BundleFile
from dashboard import actions, handlers, server
from dashboard.server import Dashboard
from edgebundle.broker import Broker
from tests.conftest import BrokerProcess
from tests.edgebundle.rig import JPEG, TOP, Responder
from tests.patience import PATIENCE_S, least_s_async, until

PAGE = Path(server.__file__).with_name("page")


@asynccontextmanager
async def serving(broker: BrokerProcess) -> AsyncIterator[Dashboard]:
    # Without authentication the broker takes any credentials.
    url = broker.url.replace("mqtt://", "mqtt://operator:hunter2@")
    dashboard = Dashboard(Broker(url), port=0)
    await dashboard.start()
    try:
        yield dashboard
    finally:
        await dashboard.close()


async def ask(
    dashboard: Dashboard,
    path: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    **changes: str | None,
) -> HTTPResponse:
    """Send what the page would send, with changed headers; None leaves one out."""
    own = f"127.0.0.1:{dashboard.port}"
    headers = {"Host": own, "Origin": f"http://{own}", "X-Edgebundle-Token": dashboard.guard.token}
    for name, value in changes.items():
        headers.pop(name.replace("_", "-"), None)
        if value is not None:
            headers[name.replace("_", "-")] = value
    request = HTTPRequest(f"http://{own}{path}", method=method, headers=headers, body=body)
    return await AsyncHTTPClient().fetch(request, raise_error=False)


ACTIONS = [
    ("GET", "/api/session", None),
    ("POST", "/api/ask?agent=a&model=m", b"x"),
    ("POST", "/api/bundles?name=x", b"x"),
    ("DELETE", "/api/bundles/0123456789abcdef", None),
    ("POST", "/api/deploy", b'{"bundle": "x", "agent": "a"}'),
    ("POST", "/api/roll-back", b'{"agent": "a", "model": "m"}'),
]


async def test_wrong_host_origin_or_token_is_refused_everywhere(mosquitto: BrokerProcess) -> None:
    async with serving(mosquitto) as dashboard:
        own = f"127.0.0.1:{dashboard.port}"
        for method, path, body in ACTIONS:
            for changes in (
                {"Host": "evil.example"},
                {"Host": f"127.0.0.1.evil.example:{dashboard.port}"},
                {"Origin": "http://evil.example"},
                {"Origin": "null"},
                {"X-Edgebundle-Token": "x" * 32},
                {"X-Edgebundle-Token": None},
            ):
                changed = {name.replace("-", "_"): value for name, value in changes.items()}
                answer = await ask(dashboard, path, method=method, body=body, **changed)
                assert answer.code == 403, (method, path, changes)
            if method != "GET":
                assert (await ask(dashboard, path, method=method, body=body, Origin=None)).code == 403
            passed = await ask(dashboard, path, method=method, body=body)
            assert passed.code in (200, 204, 422, 502), (method, path, passed.body)
        for host in ("evil.example", "localhost.evil.example"):
            assert (await ask(dashboard, "/", Host=host)).code == 403

        async def connect(token: str, **headers: str) -> Any:
            every = {"Origin": f"http://{own}", **headers}
            request = HTTPRequest(f"ws://{own}/live", headers=every)
            return await websocket_connect(request, subprotocols=["edgebundle", token])

        for token, headers in (
            ("x" * 32, {}),
            (dashboard.guard.token, {"Origin": "http://evil.example"}),
            (dashboard.guard.token, {"Host": "evil.example"}),
        ):
            with pytest.raises(HTTPClientError, match="403"):
                await connect(token, **headers)
        live = await connect(dashboard.guard.token)
        first = json.loads(await live.read_message())
        assert first["fleet"]["whole"] is True
        assert first["broker"]["up"] is True
        # Nonsense ends the connection, and only this one.
        await live.write_message('{"visible": [[[]]], "agent": 3}')
        assert await asyncio.wait_for(live.read_message(), PATIENCE_S) is None


@pytest.mark.parametrize(("path", "code"), [("ask?agent=a&model=m", 403), ("bundles", 403), ("deploy", 400)])
async def test_a_large_body_of_a_stranger_is_not_awaited(
    mosquitto: BrokerProcess, path: str, code: int
) -> None:
    async with serving(mosquitto) as dashboard:
        own = f"127.0.0.1:{dashboard.port}"
        reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
        head = f"POST /api/{path} HTTP/1.1\r\nHost: {own}\r\nOrigin: http://evil.example\r\n"
        writer.write(f"{head}Content-Length: 60000000\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.readline(), PATIENCE_S)
        assert answer.startswith(f"HTTP/1.1 {code}".encode())
        writer.close()


async def test_files_have_their_headers_and_no_secret_is_sent(mosquitto: BrokerProcess) -> None:
    async with serving(mosquitto) as dashboard:
        page = await ask(dashboard, "/", X_Edgebundle_Token=None, Origin=None)
        assert page.code == 200
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        for name, kind in (
            ("dashboard.js", "text/javascript"),
            ("colours.css", "text/css"),
            ("icon.svg", "image/svg"),
        ):
            answer = await ask(dashboard, f"/{name}", X_Edgebundle_Token=None)
            assert answer.headers["Content-Type"].startswith(kind)
            assert dashboard.guard.token.encode() not in answer.body
        assert b"<script>" not in page.body
        assert b"onclick" not in page.body
        assert dashboard.guard.token.encode() not in page.body
        state = json.dumps(dashboard._link.state())
        assert "hunter2" not in state
        assert "operator" not in state
        for path in (
            "/../guard.py",
            "/%2e%2e/server.py",
            "/page/index.html",
            "/server.py",
            "/__init__.py",
            "/nothing",
        ):
            assert (await ask(dashboard, path)).code == 404, path
        assert (await ask(dashboard, "/api/ask", method="GET")).code == 405


async def test_mistakes_are_told_in_one_line(mosquitto: BrokerProcess) -> None:
    async with serving(mosquitto) as dashboard:
        for path, body, words in (
            ("/api/ask?agent=a/b&model=m", b"\xff\xd8\xff", "expected the names of an agent and a model"),
            ("/api/ask?agent=nobody&model=m", b"\xff\xd8\xff", "no agent called nobody"),
            ("/api/ask?agent=a&model=m", b"GIF89a", "expected a JPEG or PNG image"),
            ("/api/deploy", b'{"bundle": "0123", "agent": "a"}', "the uploaded bundle is gone"),
            ("/api/deploy", b"[[[[", "expected a JSON object with bundle and agent"),
            ("/api/deploy", b'{"bundle": 1, "agent": "a"}', "expected a JSON object with bundle and agent"),
            ("/api/bundles?name=%3Cb%3E", b"x" * 5000, "<b>: "),
        ):
            answer = await ask(dashboard, path, method="POST", body=body)
            error = json.loads(answer.body)["error"]
            assert 400 <= answer.code < 500, (path, answer.body)
            assert words in error
            assert "\n" not in error
        assert list(dashboard.actions._folder.iterdir()) == [], "what could not be read is deleted"
        for _ in range(actions.MAX_UPLOADS):
            dashboard.actions.new_file()
        assert (await ask(dashboard, "/api/bundles", method="POST", body=b"x")).code == 429


async def test_an_upload_that_nobody_confirms_is_deleted_after_an_hour(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(mosquitto) as dashboard:
        path = dashboard.actions.new_file()
        upload = actions.Upload(path.stem, "a.bundle", path, cast(BundleFile, None))
        dashboard.actions._uploads[upload.id] = upload
        await asyncio.sleep(2 * server.TICK_S)
        assert path.exists()
        monkeypatch.setattr(actions, "_UPLOAD_LIFE_S", 0.1)
        await until(lambda: not path.exists())


async def test_address_in_use_and_no_broker_are_told(mosquitto: BrokerProcess) -> None:
    async with serving(mosquitto) as dashboard:
        second = Dashboard(Broker(mosquitto.url), port=dashboard.port)
        with pytest.raises(FleetError, match="cannot listen on 127") as caught:
            await second.start()
        assert "--listen" in (caught.value.hint or "")


async def test_a_slow_client_is_not_awaited_for_ever(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_BODY_LIMIT_S", 0.3)
    monkeypatch.setattr(server, "_IDLE_LIMIT_S", 0.6)
    monkeypatch.setattr(handlers, "UPLOAD_LIMIT_S", 1.2)
    async with serving(mosquitto) as dashboard:
        own = f"127.0.0.1:{dashboard.port}"
        head = f"Host: {own}\r\nOrigin: http://{own}\r\nX-Edgebundle-Token: {dashboard.guard.token}\r\n"
        ask = f"POST /api/ask?agent=a&model=m HTTP/1.1\r\n{head}Content-Length: 9\r\n\r\nx"
        for sent, shortest_s in (("GET / HT", 0.5), (f"POST /api/deploy HTTP/1.1\r\n{head}"
            "Content-Length: 9\r\n\r\nx", 0.2), (ask, 0.9)):  # fmt: skip
            began_s = asyncio.get_running_loop().time()
            reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
            writer.write(sent.encode())
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            assert asyncio.get_running_loop().time() - began_s > shortest_s
            writer.close()


async def test_an_answer_is_never_taken_for_a_page(mosquitto: BrokerProcess) -> None:
    """Whatever numbers and names a device sends."""
    hostile = ("indices;FP32;2", "scores;FP32;2", "<script>;FP32;1")
    payload = struct.pack("<5f", math.nan, math.inf, math.nan, -math.inf, 1.0)
    async with (
        serving(mosquitto) as dashboard,
        Responder(mosquitto, lambda _count, _message: (hostile, payload)),
    ):
        answer = await ask(dashboard, "/api/ask?agent=kitchen&model=digits", method="POST", body=JPEG)
        assert (answer.code, answer.headers["Content-Type"]) == (200, "application/json")
        read = json.loads(answer.body)
        assert (read["labels"], read["tensors"][0]["values"]) == ([], [None, None])
        session = await ask(dashboard, "/api/session")
        assert session.headers["Content-Type"] == "application/json"


@pytest.mark.slow
async def test_fleet_and_an_answer_over_either_broker(broker: BrokerProcess) -> None:
    """Also over MQTT 3.1.1, whose requests have no properties."""
    dashboard = Dashboard(Broker(broker.url), port=0)
    await dashboard.start()
    try:
        async with Responder(broker, lambda _count, _message: (200, TOP)):
            await until(
                lambda: (device := dashboard.fleet.get("kitchen")) is not None and "digits" in device.models
            )
            answer = await ask(dashboard, "/api/ask?agent=kitchen&model=digits", method="POST", body=JPEG)
            assert json.loads(answer.body)["labels"][0]["label"] == "seven"
            dashboard.fleet.settle()
            [row] = dashboard.fleet.rows_since(0)[0]
            assert json.loads(row)["state"] == "online"
    finally:
        await dashboard.close()


async def slow_reader(dashboard: Dashboard) -> socket.socket:
    """Ask for far more than fits into the buffers on the way, and take nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", dashboard.port))
    asking = f"GET /agent_panel.js HTTP/1.1\r\nHost: 127.0.0.1:{dashboard.port}\r\n\r\n"
    await loop.sock_sendall(client, asking.encode() * 600)
    return client


async def test_a_client_that_does_not_take_its_answer_is_cut_and_a_page_is_not(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "REQUEST_LIMIT_S", 0.5)
    monkeypatch.setattr(server, "_IDLE_LIMIT_S", 10 * PATIENCE_S)
    async with serving(mosquitto) as dashboard:
        own = f"127.0.0.1:{dashboard.port}"
        request = HTTPRequest(f"ws://{own}/live", headers={"Origin": f"http://{own}"})
        live = await websocket_connect(request, subprotocols=["edgebundle", dashboard.guard.token])
        client = await slow_reader(dashboard)
        assert dashboard._server is not None
        # Without the page, whose connection is no longer the web server's.
        open_now = cast(Any, dashboard._server)._connections
        await until(lambda: len(open_now) == 1)
        await until(lambda: not open_now)
        client.close()
        for _ in range(3):  # the page is told something every few seconds
            assert await asyncio.wait_for(live.read_message(), PATIENCE_S) is not None
        assert (await ask(dashboard, "/")).code == 200


@pytest.mark.parametrize("frozen", [False, True], ids=["broker", "frozen-broker"])
async def test_close_takes_at_most_a_second_whatever_clients_do(
    mosquitto: BrokerProcess, frozen: bool
) -> None:
    async def close() -> float:
        dashboard = Dashboard(Broker(mosquitto.url), port=0)
        await dashboard.start()
        own = f"127.0.0.1:{dashboard.port}"
        head = f"Host: {own}\r\nOrigin: http://{own}\r\nX-Edgebundle-Token: {dashboard.guard.token}\r\n"
        client = await slow_reader(dashboard)
        writers = []
        for sent in (
            "",
            "GET / HT",
            f"POST /api/deploy HTTP/1.1\r\n{head}Content-Length: 9\r\n\r\nx",
            f"POST /api/ask?agent=a&model=m HTTP/1.1\r\n{head}Content-Length: 1\r\n\r\nx",
        ):
            writer = (await asyncio.open_connection("127.0.0.1", dashboard.port))[1]
            writer.write(sent.encode())
            writers.append(writer)
        request = HTTPRequest(f"ws://{own}/live", headers={"Origin": f"http://{own}"})
        live = await websocket_connect(request, subprotocols=["edgebundle", dashboard.guard.token])
        assert await live.read_message()
        if frozen:
            mosquitto.pause()
        try:
            began_s = asyncio.get_running_loop().time()
            await dashboard.close()
            took_s = asyncio.get_running_loop().time() - began_s
        finally:
            mosquitto.resume()
        for writer in writers:
            writer.close()
        client.close()
        return took_s

    assert await least_s_async(close, 1.0) <= 1.0


async def raw(dashboard: Dashboard, *lines: str) -> int:
    """Send lines as they are, and return the status; 0 if the connection only ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port)
    writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode())
    answer = await asyncio.wait_for(reader.readline(), PATIENCE_S)
    writer.close()
    return int(answer.split()[1]) if answer else 0


async def test_requests_that_no_browser_sends_are_refused(mosquitto: BrokerProcess) -> None:
    async with serving(mosquitto) as dashboard:
        own = f"127.0.0.1:{dashboard.port}"
        host, origin = f"Host: {own}", f"Origin: http://{own}"
        token = f"X-Edgebundle-Token: {dashboard.guard.token}"
        for lines, allowed in (
            (["GET /api/session HTTP/1.1", token], {400, 403}),
            (["GET /api/session HTTP/1.1", "Host: 2130706433", token], {403}),
            (["GET /api/session HTTP/1.1", "Host: 0x7f.1", token], {403}),
            (["GET /api/session HTTP/1.1", host, "Host: evil.example", token], {400, 403}),
            (["GET /live HTTP/1.1", host, origin, "Upgrade: websocket", "Connection: Upgrade"], {400, 403}),
            *(
                ([f"GET {path} HTTP/1.1", host], {400, 404})
                for path in (
                    *("/..%2fguard.py", "/%2e%2e%2fguard.py", "//etc/passwd", "/..\\guard.py"),
                    *("/page/../../guard.py", "/dashboard.js%00", "/index.html/../../server.py"),
                )
            ),
            *(
                ([f"{method} /api/session HTTP/1.1", host, origin, token, "Content-Length: 0"], {400, 405})
                for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "CONNECT", "GETS")
            ),
        ):
            assert await raw(dashboard, *lines) in allowed, lines
        assert await raw(dashboard, "GET /api/session HTTP/1.1", host, token) == 200


async def test_three_hundred_idle_connections_keep_no_page_out(mosquitto: BrokerProcess) -> None:
    async with serving(mosquitto) as dashboard:
        idle = [(await asyncio.open_connection("127.0.0.1", dashboard.port))[1] for _ in range(300)]
        assert (await ask(dashboard, "/api/session")).code == 200
        for writer in idle:
            writer.close()


def test_scripts_of_the_page_make_no_markup_and_run_no_text() -> None:
    """Trusted Types would refuse it too, in the browsers that have them."""
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(|new Function"
    scripts = sorted(PAGE.glob("*.js"))
    assert len(scripts) > 3
    for script in scripts:
        assert not re.findall(sinks, script.read_text("utf-8")), script.name
