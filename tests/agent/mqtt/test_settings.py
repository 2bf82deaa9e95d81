"""URLs of brokers, and files with secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.mqtt.settings import BrokerSettings, BrokerUrl, parse_broker_url, read_secret


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mqtt://broker", BrokerUrl("broker", 1883, False, None)),
        ("mqtts://broker", BrokerUrl("broker", 8883, True, None)),
        ("mqtts://me@broker:1/", BrokerUrl("broker", 1, True, "me")),
        ("mqtt://me%40home@broker", BrokerUrl("broker", 1883, False, "me@home")),
        ("mqtt://100%2525@broker", BrokerUrl("broker", 1883, False, "100%25")),
        ("mqtt://[::1]:1883", BrokerUrl("::1", 1883, False, None)),
    ],
)
def test_url_is_parsed(url: str, expected: BrokerUrl) -> None:
    assert parse_broker_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "broker",
        "http://broker",
        "mqtt://",
        "mqtt://b/path",
        "mqtt://b?x",
        "mqtt://b:port",
        "mqtt://u:p@b",
        "mqtt://b:0",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="broker"):
        parse_broker_url(url)


def test_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_broker_url("mqtt://user:hunter2@broker")
    assert "hunter2" not in str(caught.value)


def test_url_of_settings_is_parsed_again() -> None:
    settings = BrokerSettings("::1", 1884)
    assert parse_broker_url(settings.url) == BrokerUrl("::1", 1884, False, None)


def test_secret_is_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hunter2\r\nsecond line\n")
    assert read_secret(path) == "hunter2"


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 5000])
def test_file_without_a_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="secret"):
        read_secret(path)


def test_missing_secret_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "none")
