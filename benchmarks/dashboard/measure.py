"""How the page feels under a fleet: its first paint, its heartbeat, its memory."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.dashboard.browser import Browser
from dashboard.server import Dashboard
from edgebundle.broker import Broker

# The page's heartbeat; one is dropped if the next is due before it comes.
BEAT_MS: Final = 250
MOST_PAINT_S: Final = 1.0
MOST_BYTES: Final = 300_000_000
_START_LIMIT_S: Final = 180.0
# Runs before the page's own scripts, and keeps what it saw in `beats`.
_PROBE: Final = f"""
window.beats = {{ timer: [], frames: 0, long: 0, rows: null }};
let last = performance.now();
setInterval(() => {{ const now = performance.now(); beats.timer.push(now - last); last = now; }}, {BEAT_MS});
const onFrame = () => {{
  beats.frames += 1;
  if (beats.rows === null && document.querySelector(".row:not([hidden])")) {{
    requestAnimationFrame(() => {{ beats.rows ??= performance.now(); }});
  }}
  requestAnimationFrame(onFrame);
}};
requestAnimationFrame(onFrame);
const count = (list) => {{ beats.long += list.getEntries().length; }};
new PerformanceObserver(count).observe({{ type: "longtask" }});
"""
_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured.

    Attributes
    ----------
    agents, seconds
        The fleet, and how long it was watched.
    paint_s, rows_s
        From the request for the page to its first paint, and to the first painted agents.
    dropped
        Heartbeats that came after the next was due.
    longest_s
        The longest pause between two heartbeats, which are 0.25 s apart.
    long_tasks
        Tasks of the page that took over 50 ms.
    frames
        Painted frames.
    updates
        Metrics that the server had read, each second, on average.
    memory_bytes
        Of the page's process at the end; shared memory counts in parts (PSS).
    browser_bytes, empty_bytes
        Of all processes of the browser at the end, and before it opened the page.
    heap_bytes
        Of the page's scripts.
    server_bytes, server_cpu
        Memory of the dashboard's process (PSS), and its share of one core.
    """

    agents: int
    seconds: float
    paint_s: float
    rows_s: float
    dropped: int
    longest_s: float
    long_tasks: int
    frames: int
    updates: float
    memory_bytes: int
    browser_bytes: int
    empty_bytes: int
    heap_bytes: int
    server_bytes: int
    server_cpu: float

    def passed(self) -> bool:
        """Return whether it meets the limits."""
        return self.rows_s <= MOST_PAINT_S and self.dropped == 0 and self.memory_bytes <= MOST_BYTES


@contextlib.asynccontextmanager
async def fleet_of(url: str, count: int) -> AsyncIterator[None]:
    """Run a simulated fleet in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.dashboard.fleet", url, str(count), stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_LIMIT_S)
        if line != b"ready\n":
            raise RuntimeError("the simulated fleet ended")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def measure(
    url: str, program: str, *, agents: int, seconds: float, pictures: Path | None = None
) -> Result:
    """Watch a simulated fleet at a broker with a browser.

    Parameters
    ----------
    url, program
        The broker, and the path of the browser.
    agents, seconds
        How many agents, and how long.
    pictures
        Where to write pictures of the page, or None.
    """
    async with fleet_of(url, agents):
        dashboard = Dashboard(Broker(url), port=0)
        await dashboard.start()
        try:
            end_s = time.monotonic() + _START_LIMIT_S
            while len(dashboard.fleet) < agents and time.monotonic() < end_s:
                await asyncio.sleep(0.1)
            async with Browser(program) as page:
                return await _watch(dashboard, page, agents, seconds, pictures)
        finally:
            await dashboard.close()


async def _watch(
    dashboard: Dashboard, page: Browser, agents: int, seconds: float, pictures: Path | None
) -> Result:
    await page.size(1280, 860)
    empty_bytes = sum(map(_memory, _family(page.process)))
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=_PROBE)
    await page.open(dashboard.url)
    paint = await page.until(_PAINT)
    rows = await page.until("beats.rows")
    await page.until(f"document.getElementById('counts').textContent.includes('of {agents} online')")
    # What a user does meanwhile: open an agent, scroll, look at another.
    await page.press("ArrowDown", "ArrowDown", "Enter")
    await page.until("document.querySelectorAll('.chart .bar').length > 0")
    await page.run("beats.timer.length = 0; beats.frames = 0; beats.long = 0;")
    cpu_s, reads, begun_s = time.process_time(), dashboard.fleet.samples_read, time.monotonic()
    while time.monotonic() - begun_s < seconds:
        await page.run("document.getElementById('list').scrollBy(0, 900)")
        await asyncio.sleep(1)
    watched_s = time.monotonic() - begun_s
    beats = await page.run("({ ...beats })")
    if pictures is not None:
        await _pictures(page, pictures)
    heap = await page.call("Runtime.getHeapUsage")
    return Result(
        agents=agents,
        seconds=watched_s,
        paint_s=paint / 1000,
        rows_s=rows / 1000,
        dropped=sum(1 for gap in beats["timer"] if gap > 2 * BEAT_MS),
        longest_s=max(beats["timer"]) / 1000,
        long_tasks=beats["long"],
        frames=beats["frames"],
        updates=(dashboard.fleet.samples_read - reads) / watched_s,
        # A headless Chromium has further renderers, which are smaller.
        memory_bytes=max(map(_memory, filter(_is_renderer, _family(page.process)))),
        browser_bytes=sum(map(_memory, _family(page.process))),
        empty_bytes=empty_bytes,
        heap_bytes=int(heap["usedSize"]),
        server_bytes=_memory("self"),
        server_cpu=(time.process_time() - cpu_s) / watched_s,
    )


async def _pictures(page: Browser, folder: Path) -> None:
    await page.run("document.getElementById('list').scrollTo(0, 0)")
    for scheme, name in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
        await page.scheme(scheme)
        await asyncio.sleep(1)
        (folder / name).write_bytes(await page.picture())
    await page.size(390, 780, is_phone=True)
    await asyncio.sleep(1)
    (folder / "dashboard-phone.png").write_bytes(await page.picture())


def _family(process: int) -> list[str]:
    """Return a process and all that it started."""
    parents: dict[str, str] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            parents[status.parent.name] = status.read_text().rpartition(")")[2].split()[1]
    found = [str(process)]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _is_renderer(process: str) -> bool:
    try:
        return b"--type=renderer" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _memory(process: str) -> int:
    """Return a process's proportional set size in bytes; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
