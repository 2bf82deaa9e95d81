"""The checks of the machine: clock, heat, memory, disk, processor."""

from __future__ import annotations

import datetime
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent.deploy.store.store import SPACE_MARGIN_BYTES
from agent.provision.checks import machine
from agent.provision.finding import Level
from tests.agent.provision.checks.rig import HERE, one


@pytest.mark.parametrize(
    ("year", "synchronised", "level", "part"),
    [
        (1970, True, "fail", "before this agent was built"),
        (2031, False, "warn", "not known to be synchronised"),
        (2031, True, "ok", ""),
    ],
)
def test_wrong_clock_is_found(year: int, synchronised: bool, level: str, part: str) -> None:
    now_s = datetime.datetime(year, 6, 1, tzinfo=datetime.UTC).timestamp()
    found = one(machine.check_clock(now_s=now_s, synchronised=synchronised))
    assert (found.level.value, part in found.message) == (level, True)
    assert str(year) in found.message


def test_clock_of_this_machine_is_read_by_default() -> None:
    assert one(machine.check_clock()).message.count(f"{time.gmtime().tm_year}") == 1


@pytest.mark.parametrize(
    ("bits", "millidegrees", "level", "part"),
    [
        ("0", "48312", "ok", "48 °C"),
        ("50005", "62000", "warn", "voltage is too low, the processor is throttled"),
        ("50000", "62000", "warn", "since boot: the supply voltage is too low, the processor is throttled"),
        ("0", "84000", "warn", "84 °C"),
        (None, None, "ok", "no sensor"),
    ],
)
def test_heat_and_a_weak_power_supply_are_found(
    tmp_path: Path, bits: str | None, millidegrees: str | None, level: str, part: str
) -> None:
    if bits is not None and millidegrees is not None:
        zone, firmware = (
            tmp_path / "sys/class/thermal/thermal_zone0",
            tmp_path / "sys/devices/platform/soc/soc:firmware",
        )
        zone.mkdir(parents=True)
        firmware.mkdir(parents=True)
        (zone / "temp").write_text(millidegrees + "\n")
        (firmware / "get_throttled").write_text(bits + "\n")
    found = one(machine.check_heat(tmp_path))
    assert (found.level.value, part in found.message) == (level, True), found


def test_low_memory_and_a_kernel_without_memory_accounting_are_found(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 931000 kB\nMemAvailable: 40000 kB\n")
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io pids\n")
    low, uncounted = machine.check_memory(tmp_path)
    assert (low.level, low.message) == (Level.WARN, "39 MiB of 909 MiB are available")
    assert (uncounted.level, "cmdline.txt" in (uncounted.hint or "")) == (Level.WARN, True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 931000 kB\nMemAvailable: 400000 kB\n")
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    assert one(machine.check_memory(tmp_path)).level is Level.OK


@pytest.mark.parametrize(
    ("margins", "level"), [(0.5, Level.FAIL), (4, Level.WARN), (100, Level.OK)], ids=["full", "low", "free"]
)
def test_full_disk_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, margins: float, level: Level
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> tuple[int, int, int]:
        asked.append(path)
        return shutil._ntuple_diskusage(10**12, 0, int(margins * SPACE_MARGIN_BYTES))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert one(machine.check_disk(tmp_path / "not/yet/there")).level is level
    assert asked == [tmp_path]


def test_processor_without_the_vector_unit_that_kernels_need_is_found() -> None:
    assert one(machine.check_processor(HERE)).level is Level.OK
    assert one(machine.check_processor(replace(HERE, features=frozenset()))).level is Level.WARN


def test_sandbox_of_this_machine_is_complete() -> None:
    found = one(machine.check_sandbox(required=True))
    assert found.level is Level.OK, found
    assert found.message.startswith("workers get landlock ")
    assert found.message.endswith("seccomp, bounded threads")


@pytest.mark.parametrize(
    ("missing", "required", "level", "hint"),
    [
        ([], True, Level.OK, None),
        (
            ["landlock"],
            False,
            Level.WARN,
            "landlock: add lsm=landlock,lockdown,yama to the line in /boot/firmware/cmdline.txt",
        ),
        (["landlock"], True, Level.FAIL, "and reboot"),
        (["seccomp", "threads"], False, Level.WARN, "CONFIG_SECCOMP_FILTER; threads: use Linux 5.7"),
    ],
)
def test_parts_that_the_sandbox_lacks_come_with_what_to_do(
    tmp_path: Path, missing: list[str], required: bool, level: Level, hint: str | None
) -> None:
    (tmp_path / "sys/kernel/security").mkdir(parents=True)
    (tmp_path / "sys/kernel/security/lsm").write_text("capability,lockdown,yama")
    (tmp_path / "boot/firmware").mkdir(parents=True)
    (tmp_path / "boot/firmware/cmdline.txt").touch()
    found = machine.judge_sandbox("workers get something", missing, required=required, root=tmp_path)
    assert found.level is level
    assert found.hint is None if hint is None else hint in (found.hint or "")


def test_hint_about_landlock_suits_a_machine_that_is_not_a_raspberry_pi(tmp_path: Path) -> None:
    found = machine.judge_sandbox("none", ["landlock"], required=False, root=tmp_path)
    assert "add lsm=landlock,lockdown,yama,integrity,apparmor to the kernel's command line" in str(found)
