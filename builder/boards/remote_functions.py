"""Functions that run on a board: report its state, and run, profile or compare whole bundles.

An RPC server started with `edgebundle rpc-server` offers them by name over TVM's RPC, with JSON in and out.
The process that measures on this machine calls them too. They need tvm-ffi and numpy, but no compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

COMMAND_TIMEOUT_S: Final = 2.0  # vcgencmd asks the firmware, which answers within milliseconds or not at all
PREFIX: Final = "edgebundle."


@dataclass(frozen=True, slots=True)
class BoardState:
    """The state of a board at one moment.

    `frequencies_khz`: frequency of each CPU; empty if unknown.
    `throttled`: whether heat or low voltage slows it down; None if unknown.
    `temperature_c`, `load`: temperature of the hottest thermal zone, and load average of the last minute;
        None if unknown.
    """

    frequencies_khz: tuple[int, ...] = ()
    throttled: bool | None = None
    temperature_c: float | None = None
    load: float | None = None

    @classmethod
    def from_json(cls, text: str) -> BoardState:
        """Read the result of `state_json`; if it is malformed, everything is unknown."""
        try:
            raw = json.loads(text)
            return cls(
                tuple(int(f) for f in raw["frequencies_khz"]),
                None if raw["throttled"] is None else bool(raw["throttled"]),
                None if raw["temperature_c"] is None else float(raw["temperature_c"]),
                None if raw["load"] is None else float(raw["load"]),
            )
        except (ValueError, TypeError, KeyError):
            return cls()


def state(root: str = "/") -> BoardState:
    """Read the state of this machine.

    Sources: `cpufreq` and `thermal` in sysfs; the Raspberry Pi's `get_throttled` from sysfs or `vcgencmd`,
    whose bits 0 to 3 describe the present (Raspberry Pi documentation, vcgencmd).
    """
    system = Path(root)
    frequencies = [
        number
        for path in sorted(system.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq"))
        if (number := _number(path)) is not None
    ]
    zones = [
        number
        for path in system.glob("sys/class/thermal/thermal_zone*/temp")
        if (number := _number(path)) is not None
    ]
    try:
        load: float | None = os.getloadavg()[0]
    except OSError:
        load = None
    return BoardState(tuple(frequencies), _throttled(system), max(zones) / 1000 if zones else None, load)


def _number(path: Path, base: int = 10) -> int | None:
    try:
        return int(path.read_text().strip(), base)
    except (OSError, ValueError):
        return None


def _throttled(system: Path) -> bool | None:
    devices = system / "sys/devices/platform/soc"
    for path in (*devices.glob("*/get_throttled"), *devices.glob("*/*/get_throttled")):
        bits = _number(path, 16)
        if bits is not None:
            return bool(bits & 0xF)
    program = system / "usr/bin/vcgencmd"
    if not program.exists():
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program
            [str(program), "get_throttled"],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=True,
        )
        return bool(int(done.stdout.strip().removeprefix("throttled="), 16) & 0xF)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def state_json() -> str:
    """Return `state` as JSON."""
    return json.dumps(asdict(state()))


def run_json(request: str) -> str:
    """Run a bundle with the options of `builder.run`.

    The request holds `bundle`, `inputs` (an .npz file, a picture or null) and `outputs` as paths, and
    `options`. Outputs are written to `outputs` as .npz, answers under `answer/NAME`. The reply holds `times`
    in seconds, or null.
    """
    from agent.array_file import write_arrays
    from builder.running.local_run import run

    asked = json.loads(request)
    result = run(asked["bundle"], asked["inputs"], **asked["options"])
    arrays: dict[str, Any] = dict(result.outputs)
    for name, value in (result.answers or {}).items():
        arrays[f"answer/{name}"] = np.array(list(value), dtype=bytes) if isinstance(value, tuple) else value
    write_arrays(Path(asked["outputs"]), arrays)
    return json.dumps({"times": None if result.times is None else list(result.times.results)})


def profile_json(request: str) -> str:
    """Profile the bundle at the path `bundle` with `inputs` and `options`; the reply is the report's JSON."""
    from builder.running.local_run import profile

    asked = json.loads(request)
    return profile(asked["bundle"], asked["inputs"], **asked["options"]).json()


def compare_json(request: str, clock: Callable[[], float] = time.perf_counter) -> str:
    """Time two bundles alternately; the reply holds `pairs` of seconds per inference.

    The order changes from pair to pair, so that neither bundle always gets the caches that the other left.
    """
    from builder.bundles.package import Package
    from builder.running import local_run

    asked = json.loads(request)
    modules = []
    for path in asked["bundles"]:
        package = Package.load(path)
        module = local_run.prepared(package, asked["threads"])
        module.run()
        modules.append(module)
    pairs = []
    for index in range(int(asked["pairs"])):
        seconds = [0.0, 0.0]
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            module = modules[which]
            module.run()  # to refill the caches
            start = clock()
            for _ in range(int(asked["number"])):
                module.run()
            seconds[which] = (clock() - start) / int(asked["number"])
        pairs.append(seconds)
        if asked["cooldown_ms"]:
            time.sleep(asked["cooldown_ms"] / 1e3)
    return json.dumps({"pairs": pairs})


FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "board": state_json,
    "run": run_json,
    "profile": profile_json,
    "compare": compare_json,
}


def register() -> None:
    """Register the functions with TVM's RPC, for this process and those that it forks."""
    import tvm_ffi

    for name, function in FUNCTIONS.items():
        tvm_ffi.register_global_func(f"{PREFIX}{name}", function, override=True)
