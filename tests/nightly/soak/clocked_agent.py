"""Starts an agent whose wall clock another process sets: `clocked_agent.py FILE ARGUMENTS`.

`FILE` holds a double: the seconds by which `time.time` differs from the machine's clock. Time stamps of
files stay those of the machine, as on a device whose clock is set while it runs.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path

OFFSET = struct.Struct("<d")


def main() -> int:
    """Set the clock, and run the agent."""
    with Path(sys.argv[1]).open("rb") as file:
        shared = mmap.mmap(file.fileno(), OFFSET.size, access=mmap.ACCESS_READ)
    machine_time = time.time

    def shifted_time() -> float:
        return machine_time() + float(OFFSET.unpack_from(shared)[0])

    time.time = shifted_time
    time.time_ns = lambda: int(shifted_time() * 1e9)
    # Imported now, so that a module that binds the function gets this one.
    from agent.cli import main as agent_main

    return agent_main(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
