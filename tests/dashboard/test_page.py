"""The dashboard in a real Chromium, with a real broker: what a user does, and what a stranger tries."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from agent.mqtt.message import Message
from agent.runtime.wav import read_recording
from agent.wire import topics
from agent.wire.job import JobState, Result, Status
from benchmarks.dashboard.browser import Browser
from dashboard.server import Dashboard
from edgebundle.broker import Broker
from tests.conftest import BrokerProcess
from tests.dashboard.conftest import Site
from tests.edgebundle.rig import Reply, Responder
from tests.patience import PATIENCE_S
from tests.streaming_models import wav

pytestmark = pytest.mark.slow

SEVEN = Path(__file__).parents[2] / "examples" / "digits" / "seven.png"
# With it, the pictures of the documentation are written: EDGEBUNDLE_PICTURES=docs/pictures.
PICTURES = os.environ.get("EDGEBUNDLE_PICTURES")
DROP = """(() => {{
  const bytes = Uint8Array.from(atob("{data}"), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "{name}", {{ type: "{kind}" }}));
  document.querySelector("{place}").dispatchEvent(
    new DragEvent("drop", {{ dataTransfer: transfer, bubbles: true, cancelable: true }}));
}})()"""
CLICK = "[...document.querySelectorAll('button')].find((b) => b.textContent === '{text}').click()"
WIDTH = "Math.max(...[document.documentElement, document.getElementById('panel')].map((e) => e.scrollWidth))"
PANEL = "document.getElementById('panel').innerText"
FOCUS = "document.activeElement.innerText || document.activeElement.id"
# A picture of 40 x 30 white pixels, as a browser makes it.
WHITE = """(async () => {
  const canvas = new OffscreenCanvas(40, 30);
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, 40, 30);
  const bytes = new Uint8Array(await (await canvas.convertToBlob({ type: "image/png" })).arrayBuffer());
  return btoa(String.fromCharCode(...bytes));
})()"""
PIXEL = (
    "[...document.querySelector('.result canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data].join()"
)
CONTRAST = Path(__file__).with_name("contrast.js").read_text()


@contextlib.asynccontextmanager
async def opened(broker: BrokerProcess, chromium: str) -> AsyncIterator[tuple[Dashboard, Browser]]:
    """A dashboard and its page; its scripts had no errors, and broke none of its policies."""
    # The user of the sample access list; other brokers ask for none.
    dashboard = Dashboard(Broker(f"mqtt://dashboard@{broker.host}:{broker.port}"), port=0)
    await dashboard.start()
    try:
        async with Browser(chromium) as page:
            await page.size(1280, 860)
            await page.open(dashboard.url)
            yield dashboard, page
            assert page.complaints == []
    finally:
        await dashboard.close()


async def drop(page: Browser, place: str, name: str, kind: str, content: bytes) -> None:
    data = base64.b64encode(content).decode()
    await page.run(DROP.format(data=data, name=name, kind=kind, place=place))


async def tab_to(page: Browser, text: str) -> None:
    """Press Tab until the element with this text has the focus; its outline must be visible."""
    for _ in range(25):
        await page.press("Tab")
        if text in str(await page.run(FOCUS)):
            assert await page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            return
    raise AssertionError(f"Tab does not reach {text}")


async def test_picture_deployment_and_roll_back(site: Site, chromium: str) -> None:
    """What a user does on the first day, with the keyboard: a real agent and model, an access list."""
    async with opened(site.broker, chromium) as (dashboard, page):
        # The token has left the address.
        await page.until("location.hash === ''")
        assert dashboard.guard.token not in await page.run(
            "document.documentElement.outerHTML + location.href"
        )
        await page.until("document.querySelector('.row .name')?.textContent === 'kitchen'")
        await page.press("ArrowDown", "Enter")
        await page.until(f"{PANEL}.includes('No models yet')")

        # A bundle is dropped; the question is answered with the keyboard.
        first = site.bundle("1.0.0").read_bytes()
        await drop(page, "#panel", "digits.bundle", "", first)
        await page.until(
            "document.getElementById('question')?.textContent === 'Deploy digits 1.0.0 to kitchen?'"
        )
        assert await page.run(FOCUS) == "Cancel"
        await page.press("Tab", "Enter")
        await page.until(
            "document.querySelector('.action.ok')?.innerText.includes('is in service on kitchen')", 40
        )
        await page.until(f"{PANEL}.includes('running for') && {PANEL}.includes('in service since')")
        await page.until(f"{PANEL}.includes('takes pictures; answers with')")
        assert await page.run("document.querySelector('.row .dot').className") == "dot online"

        # Another version, through the button, as a keyboard user does.
        file = str(site.bundle("2.0.0"))
        await page.call("Page.setInterceptFileChooserDialog", enabled=True)
        await tab_to(page, "Deploy a bundle")
        opening = page.event("Page.fileChooserOpened")
        await page.press("Enter")
        chooser = await asyncio.wait_for(opening, PATIENCE_S)
        await page.call("DOM.setFileInputFiles", files=[file], backendNodeId=chooser["backendNodeId"])
        await page.until("document.getElementById('dialog').innerText.includes('It replaces digits 1.0.0')")
        await page.press("Tab", "Enter")
        await page.until("document.querySelector('.models')?.innerText.includes('digits 2.0.0')", 40)

        # A picture; the answer and where its time went.
        await drop(page, "[data-drop=picture]", "seven.png", "image/png", SEVEN.read_bytes())
        await page.until("document.querySelector('table.found td')?.textContent === 'seven'")
        assert "compute" in await page.run(PANEL)
        await page.until("document.querySelectorAll('.charts .bar').length > 0")
        tops = "['[data-drop=picture]', '.charts'].map((e) => document.querySelector(e).offsetTop)"
        trial, charts = await page.run(tops)
        assert trial < charts
        if PICTURES:  # of the documentation
            await page.run("document.querySelectorAll('.action button').forEach((button) => button.click())")
            await page.run("document.querySelector('.charts').scrollIntoView()")
            (Path(PICTURES) / "dashboard-answer.png").write_bytes(await page.picture())

        # The camera (a fake one of Chromium): frames are answered until it is stopped.
        await page.run(CLICK.format(text="Use the camera"))
        await page.until(f"{PANEL}.includes('frames a second')")
        await page.run(CLICK.format(text="Stop the camera"))

        # Roll back, and what a refusal looks like.
        await tab_to(page, "Roll back")
        await page.press("Enter")
        await page.until("document.getElementById('dialog').open")
        await page.press("Tab", "Enter")
        await page.until("document.querySelector('.models')?.innerText.includes('digits 1.0.0')", 40)
        await drop(page, "#panel", "old.bundle", "", site.bundle("0.9.0", counter=4).read_bytes())
        await page.until("document.getElementById('dialog').open")
        await page.press("Tab", "Enter")
        await page.until("document.querySelector('.action.failed')?.innerText.includes('ERR_ROLLBACK')")
        await page.until("document.querySelector('td .hint')?.textContent.includes('the counter rises')")
        await page.until("document.querySelector('.row .dot').className === 'dot troubled'")

        # A file that cannot be deployed is told at once, before anything is asked.
        unsigned = site.bundle("3.0.0", is_signed=False).read_bytes()
        for content, words in ((b"x" * 100, "whole and unchanged"), (unsigned, "expected a signed bundle")):
            await drop(page, "#panel", "bad.bundle", "", content)
            await page.until(f"document.getElementById('dialog').innerText.includes('{words}')")
            await page.press("Escape")
        await page.press("Escape")
        await page.until("document.getElementById('panel').innerText.includes('Choose an agent')")
        await page.until("document.querySelector('.versions tbody').innerText === 'digits 1.0.0\\t1\\t1'")


def boxes(_count: int, _message: Message) -> Reply:
    tensors = ("boxes;FP32;1,4", "scores;FP32;1", "classes;INT64;1", "labels;BYTES;1")
    return tensors, struct.pack("<5fq", 10, 12, 30, 26, 0.75, 0) + b"\x03\0\0\0cat"


def heard(_count: int, _message: Message) -> Reply:
    tensors = ("segments;FP64;1,2", "labels;BYTES;1", "classes;INT64;1", "scores;FP32;1")
    return tensors, struct.pack("<2d", 0.25, 0.5) + b"\3\0\0\0yes" + struct.pack("<qf", 1, 0.75)


async def test_a_recording_on_a_model_that_takes_sound(mosquitto: BrokerProcess, chromium: str) -> None:
    """One at the model's rate is sent as it is; another one is brought to that rate, and to one channel."""
    rng = np.random.default_rng(0)
    rate = 8000
    state = {"name": "ear", "version": "1", "ready": True, "audio_input": "x", "audio_rate": rate}
    asked: list[bytes] = []

    def reply(count: int, message: Message) -> Reply:
        assert message.properties.content_type == "audio/wav"
        asked.append(bytes(message.payload))
        return heard(count, message)

    async with (
        opened(mosquitto, chromium) as (_, page),
        Responder(mosquitto, reply, device="porch", state=state),
    ):
        await page.until("document.querySelector('.row .name')?.textContent === 'porch'")
        await page.press("Enter")
        await page.until(f"{PANEL}.includes('Choose a recording')")
        own = wav(rng.uniform(-0.5, 0.5, rate), rate)
        await drop(page, "[data-drop=picture]", "a.wav", "audio/wav", own)
        await page.until("document.querySelector('table.found')?.innerText.includes('yes 0.25 to 0.50 s')")
        assert asked == [own]
        for x, is_marked in ((30, False), (270, True), (600, False)):
            assert (await page.run(PIXEL.format(x=x, y=2)) != "0,0,0,0") == is_marked
        fast = rng.uniform(-0.5, 0.5, (2 * rate, 2)).astype(np.float32)
        await page.run("document.querySelector('table.found').remove()")
        await drop(page, "[data-drop=picture]", "b.wav", "audio/wav", wav(fast, 2 * rate))
        await page.until("document.querySelector('table.found')")
        sound = read_recording(asked[1], "audio/wav", "")
        assert sound.rate == rate
        assert sum(block.size for block in sound.blocks()) == rate
        await drop(page, "[data-drop=picture]", "c.wav", "audio/wav", b"RIFF")
        await page.until(f"{PANEL}.includes('this browser cannot play')")


# A member of every object of JavaScript, and the name of an agent.
ODD = "constructor"
EVIL = "<img src=x onerror=\"document.title='evil'\">"


async def test_hostile_texts_a_phone_the_dark_and_a_broker_that_restarts(
    mosquitto: BrokerProcess, chromium: str, tmp_path: Path
) -> None:
    state = {"name": "eyes", "version": EVIL, "ready": True, "image_input": "x", "message": EVIL}
    state["inputs"] = [{"name": EVIL, "datatype": "FP32", "shape": [1, 3, 30, 40]}]
    async with opened(mosquitto, chromium) as (dashboard, page):
        await page.until("document.getElementById('empty').innerText.includes('edge-agent enroll')")
        async with Responder(mosquitto, boxes, device=ODD, state=state) as agent:
            job = JobState(
                id="j", model="eyes", digest="", status=Status.REJECTED, result=Result.REJECTED,
                code="ERR_INCOMPATIBLE", message=EVIL,
            )  # fmt: skip
            info = {"hardware": {"board": EVIL * 20, "arch": EVIL}}
            for topic, document in (
                (topics.Job(ODD, "j"), job.to_bytes()),
                (topics.Info(ODD), json.dumps(info).encode()),
            ):
                agent.connection.publish(topics.format_topic(topic), document, retain=True)
            await page.until("document.querySelector('.row .name')?.textContent === 'constructor'")
            await page.press("Enter")
            await page.until(f"{PANEL}.includes('ERR_INCOMPATIBLE') && {PANEL}.includes('eyes')")
            # Texts of devices are texts.
            assert await page.run("document.querySelectorAll('img').length") == 0
            assert EVIL in await page.run(PANEL)
            assert "evil" not in await page.run("document.title")

            # A box is drawn where it is, in the picture's own pixels.
            await drop(
                page, "[data-drop=picture]", "white.png", "image/png", base64.b64decode(await page.run(WHITE))
            )
            await page.until("document.querySelector('table.found')?.innerText.includes('cat')")
            assert await page.run(PIXEL.format(x=20, y=26)) != "255,255,255,255", "the lower edge"
            assert await page.run(PIXEL.format(x=20, y=20)) == "255,255,255,255", "within the box"
            assert await page.run(PIXEL.format(x=36, y=26)) == "255,255,255,255", "beside it"

            for scheme in ("light", "dark"):
                await page.scheme(scheme)
                assert await page.run(CONTRAST) == ""
            for width in (320, 390):
                await page.size(width, 740, is_phone=True)
                for name in ("panel", "fleet"):
                    await page.until(f"document.getElementById('{name}').checkVisibility()")
                    assert await page.run(WIDTH) <= width
                    if name == "panel":
                        await page.run("document.querySelector('.back').click()")
                await page.run("document.querySelector('.row').click()")
            await page.size(1280, 860)

            # The broker goes away and comes back, and so does everything else, without a click.
            await asyncio.to_thread(mosquitto.stop)
            await page.until(
                "document.getElementById('notice').innerText.includes('The broker has been unreachable')"
            )
            await asyncio.to_thread(mosquitto.start)
            await page.until("document.getElementById('notice').hidden", 40)

        # An agent that leaves for good.
        async with Responder(mosquitto, boxes, device=ODD, state=state) as agent:
            agent.connection.publish(topics.format_topic(topics.State(ODD)), b"", retain=True)
            await page.until(f"{PANEL}.includes('no longer knows')")
            await page.until("document.querySelectorAll('.row:not([hidden])').length === 0")

        # The server ends and another starts at the same port: the old address says so.
        await dashboard.close()
        await page.until("document.getElementById('notice').innerText.includes('does not answer')")
        second = Dashboard(Broker(mosquitto.url), port=dashboard.port)
        await second.start()
        try:
            await page.until("document.getElementById('notice').innerText.includes('no longer valid')", 15)
            await page.open(second.url)
            await page.until(
                "document.getElementById('notice').hidden && document.getElementById('broker').textContent"
            )
        finally:
            await second.close()
