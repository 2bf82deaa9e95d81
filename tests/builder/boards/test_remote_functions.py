from __future__ import annotations

from pathlib import Path

import pytest

from builder.boards.remote_functions import BoardState, state


def put(root: Path, path: Path | str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_frequencies_and_temperature_come_from_sysfs(tmp_path: Path) -> None:
    for cpu, khz in enumerate((1500000, 600000)):
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", f"{khz}\n")
    put(tmp_path, "sys/class/thermal/thermal_zone0/temp", "48300\n")
    put(tmp_path, "sys/class/thermal/thermal_zone1/temp", "51200\n")
    found = state(str(tmp_path))
    assert found.frequencies_khz == (1500000, 600000)
    assert found.temperature_c == 51.2
    assert found.throttled is None


@pytest.mark.parametrize(
    ("bits", "throttled"), [("0", False), ("50000", False), ("50005", True), ("4", True)]
)
def test_present_throttling_is_distinguished_from_past(
    tmp_path: Path, bits: str, throttled: bool | None
) -> None:
    put(tmp_path, "sys/devices/platform/soc/soc:firmware/get_throttled", bits + "\n")
    assert state(str(tmp_path)).throttled is throttled


@pytest.mark.parametrize(
    ("answer", "throttled"), [("throttled=0x0", False), ("throttled=0x4", True), ("what?", None)]
)
def test_vcgencmd_is_used_where_sysfs_has_no_answer(
    tmp_path: Path, answer: str, throttled: bool | None
) -> None:
    put(tmp_path, "usr/bin/vcgencmd", f'#!/bin/sh\n[ "$1" = get_throttled ] && echo "{answer}"\n')
    (tmp_path / "usr/bin/vcgencmd").chmod(0o755)
    assert state(str(tmp_path)).throttled is throttled


def test_a_machine_without_sensors_has_an_unknown_state(tmp_path: Path) -> None:
    found = state(str(tmp_path))
    assert (found.frequencies_khz, found.throttled, found.temperature_c) == ((), None, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"frequencies_khz": 3}', '{"frequencies_khz": ["x"]}'])
def test_malformed_states_count_as_unknown(text: str) -> None:
    assert BoardState.from_json(text) == BoardState()
