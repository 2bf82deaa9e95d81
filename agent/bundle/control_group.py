"""What the control groups of this process allow it: processor time and memory.

Promises the smallest limit from this process's group up to the root that it can see, for both versions of
control groups, as containers and services set them (`docker run --cpus`, `CPUQuota=`, `MemoryMax=`). What
cannot be read is no limit. Looks once; leaves to others what they do with it.

References: cgroups(7); Documentation/admin-guide/cgroup-v2.rst; Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_V2: Final = "cgroup2"
_V1: Final = "cgroup"


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The limits that apply to this process; None for no limit.

    `processors` is processor time for each second, in seconds: 1.5 for one and a half processors.
    """

    processors: float | None = None
    memory_bytes: int | None = None

    @classmethod
    def detect(cls, root: str | os.PathLike[str] = "/") -> ControlGroup:
        """Read the limits; `root` has the folders proc and sys, and is `/` for this machine."""
        top = Path(root)
        quotas = (
            _quota(folder / "cpu.max")
            if version == _V2
            else _ratio(_number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us"))
            for version, folder in _folders(top, "cpu")
        )
        memory = (
            _number(folder / ("memory.max" if version == _V2 else "memory.limit_in_bytes"))
            for version, folder in _folders(top, "memory")
        )
        return cls(
            min((quota for quota in quotas if quota is not None), default=None),
            min((limit for limit in memory if limit is not None and limit > 0), default=None),
        )


def _folders(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """Yield the type of the file system and the folder of each group that may limit a resource."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[_V2] = path
        elif controller in controllers.split(","):
            paths[_V1] = path
    for line in _lines(root / "proc/self/mountinfo"):
        # ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS [FIELDS] - TYPE SOURCE SUPEROPTIONS
        mount, _, system = (part.split() for part in line.partition(" - "))
        if len(mount) < 5 or not system or system[0] not in paths:
            continue
        version = system[0]
        if version != _V2 and controller not in system[-1].split(","):
            continue
        # In a container, the mount may show only a part of the tree, at whose top this process is.
        path, shown = paths[version], mount[3].rstrip("/")
        below = path.removeprefix(shown) if path == shown or path.startswith(f"{shown}/") else ""
        top = root / mount[4].lstrip("/")
        group = top / below.strip("/")
        while True:
            yield version, group
            if group == top or ".." in below:
                break
            group = group.parent


def _quota(path: Path) -> float | None:
    """Read `cpu.max`: a quota or `max`, and a period, both in microseconds."""
    quota, period, *_ = [*next(iter(_lines(path)), "").split(), "", ""]
    return _ratio(*(int(word) if word.isdecimal() else None for word in (quota, period)))


def _ratio(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period and quota > 0 else None


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
