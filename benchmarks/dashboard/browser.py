"""A headless Chromium, driven over its DevTools protocol.

Promises: each browser has a profile of its own, which is deleted; errors of a page's scripts and refusals of
its Content-Security-Policy are kept, so a test can ask for them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tornado.websocket import WebSocketClientConnection, websocket_connect

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_START_LIMIT_S: Final = 30.0
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--remote-debugging-port=0",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
# Keys by their names: code of the key, Windows virtual key code, text.
_KEYS: Final = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    " ": (32, " "),
    "PageUp": (33, ""),
    "PageDown": (34, ""),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowUp": (38, ""),
    "ArrowDown": (40, ""),
}


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page.

    Parameters
    ----------
    program
        Path of the browser.

    Attributes
    ----------
    complaints
        Errors of the page's scripts, and what its policies refused.
    """

    def __init__(self, program: str) -> None:
        self.complaints: list[str] = []
        self._program = program
        self._folder = tempfile.TemporaryDirectory(prefix="edgebundle-browser-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: WebSocketClientConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Browser:
        profile = Path(self._folder.name)
        self._process = subprocess.Popen(
            [self._program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = await self._port(profile / "DevToolsActivePort")
        url = await asyncio.to_thread(_page_url, port)
        self._connection = await websocket_connect(url, max_message_size=64 << 20)
        self._reading = asyncio.get_running_loop().create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, 10)
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    @property
    def process(self) -> int:
        """The identifier of the browser's main process."""
        assert self._process is not None
        return self._process.pid

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        """Call a method of the protocol, and return its result."""
        assert self._connection is not None
        self._number += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = future
        message = {"id": self._number, "method": method, "params": parameters}
        await self._connection.write_message(json.dumps(message))
        answer = await asyncio.wait_for(future, 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Go to an address, and wait until the page is loaded."""
        await self.call("Page.navigate", url="about:blank")
        await self.until("location.href === 'about:blank'")
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:  # noqa: ANN401 - whatever the script returns
        """Return the value of an expression in the page; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    async def until(self, condition: str, limit_s: float = 20.0) -> Any:  # noqa: ANN401 - the value
        """Wait until an expression in the page is true, and return its value."""
        try:
            async with asyncio.timeout(limit_s):
                # An element comes back as an empty object.
                while (value := await self.run(condition)) in (None, False, 0, ""):
                    await asyncio.sleep(0.03)
        except TimeoutError:
            shown = await self.run("document.body.innerText")
            raise AssertionError(f"not within {limit_s:g} s: {condition}\npage:\n{shown}") from None
        return value

    def event(self, method: str) -> asyncio.Future[dict[str, Any]]:
        """Return a future for the next event of a kind."""
        return self._events.setdefault(method, asyncio.get_running_loop().create_future())

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other: `Enter`, `ArrowDown` ..., or characters."""
        for key in keys:
            code, text = _KEYS.get(key, (ord(key[0].upper()), key))
            common = {"key": key, "windowsVirtualKeyCode": code}
            kind = "keyDown" if text else "rawKeyDown"
            await self.call("Input.dispatchKeyEvent", type=kind, text=text, **common)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Give the page a window of this size, in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    async def scheme(self, name: str) -> None:
        """Choose `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self) -> bytes:
        """Return a picture of the page as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    async def _port(self, file: Path) -> int:
        async with asyncio.timeout(_START_LIMIT_S):
            while True:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    return int(file.read_text().splitlines()[0])
                await asyncio.sleep(0.05)

    async def _read(self) -> None:
        assert self._connection is not None
        while (text := await self._connection.read_message()) is not None:
            message = json.loads(text)
            if "id" in message:
                future = self._waiting.pop(message["id"], None)
                if future is not None and not future.done():
                    future.set_result(message)
                continue
            waiting = self._events.pop(message["method"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message["params"])
            if message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"])[:600])
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self.complaints.append(entry["text"])


def _page_url(port: int) -> str:
    import urllib.request

    end: Exception | None = None
    for _attempt in range(50):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                pages = [each for each in json.load(answer) if each["type"] == "page"]
            url: str = pages[0]["webSocketDebuggerUrl"]
        except (OSError, IndexError, ValueError) as error:
            end = error
            import time

            time.sleep(0.1)
        else:
            return url
    raise RuntimeError("the browser has no page") from end
