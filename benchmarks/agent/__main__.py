"""The agent's latency, throughput and behaviour under overload: `python -m benchmarks.agent`.

It runs against a real mosquitto on the loopback interface, configured as on Debian. The agent, the echo
that it is compared with, and the bare executor each run in a separate process. Models are generated
with seeded weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.agent import latency, models, overload, picture, swaps, throughput
from benchmarks.agent.figures import Figure, show
from benchmarks.agent.stage import Stage, StageError

EXAMPLE: Final = """example:
  python -m benchmarks.agent --quick
  python -m benchmarks.agent latency throughput --picture build/latency.png
"""
# The models that each part needs.
NEEDS: Final = {
    "idle": set[str](),
    "latency": {"nothing", "picture"},
    "throughput": {"three", "thirty"},
    "overload": {"ten", "nothing"},
    "swaps": {"nothing"},
}
CONFIG: Final = "[worker]\nthreads = 1\n"


@dataclass(frozen=True, slots=True)
class Size:
    """The size of each part's measurements.

    Attributes
    ----------
    requests, large
        Small requests, and requests of 600 KB.
    seconds, rounds
        Throughput: the length of a measurement, and how often it is repeated.
    overload_s
        Seconds of overload.
    swaps
        Deployments in a row.
    """

    requests: int = 5000
    large: int = 500
    seconds: float = 3.0
    rounds: int = 4
    overload_s: float = 60.0
    swaps: int = 200


QUICK: Final = Size(requests=500, large=50, seconds=1.0, rounds=2, overload_s=8.0, swaps=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures; return 0 if every one is within its limits."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent",
        description="Measure the agent as a service, compared with a bare responder, with a real broker.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(NEEDS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="measure less: a first look in about a minute")
    parser.add_argument("--overload-s", type=float, metavar="S", help="seconds of overload (default: 60)")
    parser.add_argument("--swaps", type=int, metavar="N", help="number of swaps (default: 200)")
    parser.add_argument("--output", type=Path, default=Path("build/bench-agent.json"), metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a picture of the latencies (PNG)")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in NEEDS]
    if unknown:
        parser.error(f"expected some of {', '.join(NEEDS)}, got {unknown[0]!r}")
    size = QUICK if options.quick else Size()
    changed = {"overload_s": options.overload_s, "swaps": options.swaps}
    size = Size(**{**asdict(size), **{name: value for name, value in changed.items() if value is not None}})
    parts = [part for part in NEEDS if not options.parts or part in options.parts]
    try:
        figures, series = measure(parts, size)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    show(figures)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document(figures, size), indent=1) + "\n")
    print(f"written: {options.output}")
    if options.picture is not None and series:
        picture.draw(series, options.picture, "Round trips over mosquitto, QoS 1, one at a time")
        print(f"written: {options.picture}")
    return 0 if all(figure.good is not False for figure in figures) else 1


def measure(parts: Sequence[str], size: Size) -> tuple[list[Figure], dict[str, list[float]]]:
    """Measure some parts; return their figures, and series of latencies in seconds by label."""
    from rich.console import Console

    console = Console(stderr=True)
    figures: list[Figure] = []
    series: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-agent-") as name, console.status("") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not console.is_terminal and not text.endswith("left") and " of " not in text:
                console.print(text)

        folder = Path(name)
        if "idle" in parts:
            progress("starting an agent without a model")
            figures += _idle()
        wanted = set[str]().union(*(NEEDS[part] for part in parts))
        if not wanted:
            return figures, series
        bundles = models.make(folder, wanted, progress)
        for part in parts:
            if not NEEDS[part]:
                continue
            progress(f"{part}: starting broker and agent")
            with Stage(folder / part, folder / "trust", CONFIG) as stage:
                for model in sorted(NEEDS[part] | ({"thirty-b"} if "thirty" in NEEDS[part] else set())):
                    stage.install(bundles.path(model))
                if part == "latency":
                    stage.start_echo()
                    result = asyncio.run(latency.measure(stage, bundles, size.requests, size.large, progress))
                    figures += result.figures
                    series = result.series
                elif part == "throughput":
                    figures += asyncio.run(
                        throughput.measure(stage, bundles, size.seconds, size.rounds, progress)
                    )
                elif part == "overload":
                    figures += asyncio.run(overload.measure(stage, size.overload_s, progress))
                else:
                    figures += asyncio.run(swaps.measure(stage, bundles, size.swaps, progress))
    return figures, series


def document(figures: Sequence[Figure], size: Size) -> dict[str, object]:
    """Return the document that is written as JSON."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": _cpu(), "cores": len(models.cores()), "kernel": platform.release()},
        "load1": os.getloadavg()[0],
        "size": asdict(size),
        "figures": [{**asdict(figure), "good": figure.good} for figure in figures],
    }


def _idle() -> list[Figure]:
    from benchmarks.footprint import measure as footprint

    found = footprint()
    return [
        Figure("idle", "agent without a model, RSS", found.idle_bytes / 2**20, "MiB", most=36.0),
        Figure("idle", "ready after", found.ready_s, "s", most=1.5),
    ]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
