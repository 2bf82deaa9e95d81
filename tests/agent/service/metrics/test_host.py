"""Temperatures, clocks and throttling, read from files as Linux writes them on boards."""

from __future__ import annotations

from pathlib import Path

from agent.service.metrics.host import Host

SINCE_BOOT_CAPPED_NOW_UNDER_VOLTAGE = "20001\n"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_raspberry_pi_that_is_slowed_down_says_why(tmp_path: Path) -> None:
    firmware = "sys/devices/platform/soc/soc:firmware/get_throttled"
    write(tmp_path, firmware, SINCE_BOOT_CAPPED_NOW_UNDER_VOLTAGE)
    gauges = Host(lambda: (1, 2), tmp_path).gauges()
    now = {labels[0][1]: value for (name, labels), value in gauges.items() if name == "edge_throttled"}
    ever = {
        labels[0][1]: value for (name, labels), value in gauges.items() if name == "edge_throttled_since_boot"
    }
    assert now == {
        "under_voltage": 1,
        "frequency_capped": 0,
        "throttled": 0,
        "soft_temperature_limit": 0,
    }
    assert ever == {**now, "under_voltage": 0, "frequency_capped": 1}


def test_temperatures_clocks_and_coolers_are_read(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/thermal/thermal_zone0/type", "cpu-thermal\n")
    write(tmp_path, "sys/class/thermal/thermal_zone0/temp", "48312\n")
    write(tmp_path, "sys/class/thermal/cooling_device0/type", "pwm-fan\n")
    write(tmp_path, "sys/class/thermal/cooling_device0/cur_state", "2\n")
    write(tmp_path, "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq", "1500000\n")
    write(tmp_path, "proc/stat", "cpu  100 0 200 700 0 0 0 0 0 0\ncpu0 1 2 3\n")
    gauges = Host(lambda: (1, 2), tmp_path).gauges()
    assert gauges["edge_temperature_celsius", (("zone", "cpu-thermal"),)] == 48.312
    assert gauges["edge_cooling_state", (("cooler", "pwm-fan-0"),)] == 2
    assert gauges["edge_cpu_frequency_hertz", (("core", "1"),)] == 1.5e9
    assert gauges["edge_cpu_seconds_total", (("mode", "idle"),)] == 7


def test_missing_sensors_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/platform/soc/soc:firmware/get_throttled", "nonsense")
    names = {name for name, _ in Host(lambda: (1, 2), tmp_path).gauges()}
    assert names == {"edge_agent_uptime_seconds", "edge_state_free_bytes", "edge_state_size_bytes"}
