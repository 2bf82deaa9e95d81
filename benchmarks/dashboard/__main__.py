"""`python -m benchmarks.dashboard`: the dashboard's page under a thousand agents.

Starts a mosquitto, a simulated fleet that publishes everybody's metrics each second, the dashboard and a
headless Chromium. Ends with status 1 if the agents were not painted within a second, a heartbeat of the page
was dropped, or the page's process took more than 300 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.dashboard.browser import find_browser
from benchmarks.dashboard.measure import BEAT_MS, MOST_BYTES, MOST_PAINT_S, Result, measure
from tests.nightly.herd.restart import processor

EXAMPLE: Final = """example:
  python -m benchmarks.dashboard --agents 3000 --seconds 20
"""
_PORT: Final = 18_830


def main() -> int:
    """Measure once; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboard",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--agents", type=int, default=1000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="(default: %(default)g)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write pictures of the page there")
    options = parser.parse_args()
    browser, broker = find_browser(), shutil.which("mosquitto") or "/usr/sbin/mosquitto"
    if browser is None or not Path(broker).exists():
        print("needs chromium and mosquitto", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="edgebundle-dashboard-") as folder:
        config = Path(folder) / "mosquitto.conf"
        config.write_text(f"listener {_PORT} 127.0.0.1\nallow_anonymous true\nlog_dest none\n")
        process = subprocess.Popen([broker, "-c", str(config)])
        try:
            time.sleep(0.5)
            result = asyncio.run(
                measure(
                    f"mqtt://127.0.0.1:{_PORT}",
                    browser,
                    agents=options.agents,
                    seconds=options.seconds,
                    pictures=options.pictures,
                )
            )
        finally:
            process.terminate()
            process.wait()
    show(result)
    return 0 if result.passed() else 1


def show(result: Result) -> None:
    """Print what was measured."""
    print(
        f"{result.agents} agents, each with metrics once a second, for {result.seconds:.0f} s; {processor()}"
    )
    print(
        f"first paint after {result.paint_s:.2f} s, agents after {result.rows_s:.2f} s "
        f"(at most {MOST_PAINT_S:g} s)"
    )
    print(
        f"{result.dropped} heartbeats of {BEAT_MS} ms dropped (at most 0), longest pause "
        f"{result.longest_s:.2f} s, {result.long_tasks} tasks over 50 ms, "
        f"{result.frames / result.seconds:.0f} frames a second"
    )
    print(
        f"Chromium: {result.memory_bytes / 1e6:.0f} MB for the page's process (at most "
        f"{MOST_BYTES / 1e6:.0f}), {result.heap_bytes / 1e6:.1f} MB of them for its scripts; "
        f"all processes {result.browser_bytes / 1e6:.0f} MB, {result.empty_bytes / 1e6:.0f} without the page"
    )
    print(
        f"dashboard: {result.updates:.0f} documents read a second, {result.server_cpu:.2f} of a core, "
        f"{result.server_bytes / 1e6:.0f} MB"
    )
    print("passed" if result.passed() else "FAILED")


if __name__ == "__main__":
    sys.exit(main())
