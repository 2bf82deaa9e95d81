"""Limits of control groups: both versions, nested, in containers; what cannot be read is no limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.bundle.control_group import ControlGroup
from agent.bundle.machine import Machine
from agent.bundle.processors import Processors

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU = "33 32 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "35 32 0:31 / /sys/fs/cgroup/memory rw shared:12 - cgroup cgroup rw,memory"


def limits(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> ControlGroup:
    made = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    made.update({f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    for name, text in made.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ControlGroup.detect(root)


def test_version_2_takes_the_smallest_limit_up_to_the_root(tmp_path: Path) -> None:
    files = {
        "a.slice/cpu.max": "150000 100000\n",
        "a.slice/memory.max": "max\n",
        "a.slice/b.service/cpu.max": "max 100000\n",
        "a.slice/b.service/memory.max": "1048576\n",
        "other/cpu.max": "1000 100000\n",
    }
    found = limits(tmp_path, "0::/a.slice/b.service\n", V2 + "\n", files)
    assert found == ControlGroup(processors=1.5, memory_bytes=1 << 20)


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "200000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/job/memory.limit_in_bytes": "4096\n",
    }
    groups = "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n"
    assert limits(tmp_path, groups, f"{V1_CPU}\n{V1_MEMORY}\n", files) == ControlGroup(0.25, 4096)


@pytest.mark.parametrize(
    ("groups", "mount"),
    [
        # Its own name space of groups; and without one, the host's paths over a mount that shows a part.
        ("0::/\n", V2),
        ("0::/docker/abc\n", V2.replace(" / /sys", " /docker/abc /sys")),
        ("0::/../other\n", V2.replace(" / /sys", " /docker/abc /sys")),
    ],
)
def test_a_containers_limits_are_at_the_top_of_what_it_sees(tmp_path: Path, groups: str, mount: str) -> None:
    assert limits(tmp_path, groups, mount, {"cpu.max": "200000 100000"}).processors == 2.0


@pytest.mark.parametrize("text", ["", "max", "max 100000", "0 100000", "5 0", "x y", "-1 100000", "\xff"])
def test_what_is_no_quota_is_no_limit(tmp_path: Path, text: str) -> None:
    assert limits(tmp_path, "0::/\n", V2, {"cpu.max": text}) == ControlGroup()


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert ControlGroup.detect(tmp_path) == ControlGroup()


def test_a_machine_has_the_memory_and_threads_that_its_groups_allow(tmp_path: Path) -> None:
    limits(tmp_path, "0::/\n", V2, {"cpu.max": "50000 100000", "memory.max": "1000000"})
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\n")
    machine = Machine.detect(tmp_path)
    assert (machine.memory_bytes, machine.memory_limit_bytes, machine.threads) == (2048000, 1000000, 1)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000")
    machine = Machine.detect(tmp_path)
    assert (machine.memory_bytes, machine.memory_limit_bytes) == (2048000, None)
    assert machine.threads == Processors.detect().threads
