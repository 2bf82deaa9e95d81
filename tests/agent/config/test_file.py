"""The configuration: read strictly, all mistakes reported at once, every key explained."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agent.config.file import load_config, parse_config
from agent.config.keys import KEYS, sample_config
from agent.config.settings import ListenAddress
from agent.errors import ConfigError
from agent.mqtt.settings import TlsSettings

LEAST = {"broker": {"url": "mqtt://broker"}, "trust": {"dir": "trust"}}


def test_least_configuration_has_defaults(tmp_path: Path) -> None:
    config = parse_config({"device": "kitchen", **LEAST}, {}, {}, folder=tmp_path)
    assert config.device == "kitchen"
    assert config.state_dir == Path("/var/lib/edge-agent")
    assert config.trust_dir == tmp_path / "trust"
    assert (config.broker.host, config.broker.port, config.broker.tls) == ("broker", 1883, None)
    assert config.broker.protocol == "auto"
    assert config.queue.requests == 64
    assert config.groups == ()


def test_all_mistakes_are_reported_at_once_with_what_was_expected_and_found(tmp_path: Path) -> None:
    document = {
        "device": "a/b",
        "colour": 1,
        "queue_requests": 5,
        "broker": {"url": "http://x", "keepalive_s": "thirty", "prot": "5"},
        "inference": {"queue_requests": 0, "crash_window_s": True},
        "metrics": 5,
        "groups": ["replies"],
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(document, {}, {}, folder=tmp_path)
    message = str(caught.value)
    for expected in (
        "device: expected 1 to 64 letters",
        "got 'a/b'",
        "colour: no such key",
        "queue_requests: no such key; did you mean inference.queue_requests?",
        "broker.url: broker: expected a URL with mqtt:// or mqtts://, got 'http://x'",
        "broker.keepalive_s: expected a whole number from 5 to 3600, got 'thirty'",
        "broker.prot: no such key",
        "inference.queue_requests: expected a whole number from 1 to 100000, got 0",
        "inference.crash_window_s: expected a number from 0.1 to 86400, got True",
        "metrics: expected a section [metrics], got 5",
        "groups: expected a list",
        "trust.dir: expected a path, got nothing",
    ):
        assert expected in message, message
    assert caught.value.exit_code == 78
    assert caught.value.hint


def test_paths_start_at_the_file_and_those_of_the_command_line_at_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    config = parse_config(LEAST, {"state_dir": "state", "device": "k"}, {}, folder=tmp_path)
    assert config.trust_dir == tmp_path / "trust"
    assert config.state_dir == here / "state"


def test_systemds_folders_and_credentials_are_found(tmp_path: Path) -> None:
    document = {
        "device": "k",
        "broker": {
            "url": "mqtts://me@broker",
            "password_file": "$CREDENTIALS_DIRECTORY/mqtt",
            "ca": "/etc/ca.pem",
        },
        "trust": {"dir": "/etc/trust"},
    }
    environment = {"STATE_DIRECTORY": "/var/lib/x", "CREDENTIALS_DIRECTORY": "/run/credentials/x"}
    config = parse_config(document, {}, environment, folder=tmp_path)
    assert config.state_dir == Path("/var/lib/x")
    assert config.broker.password_file == Path("/run/credentials/x/mqtt")
    assert config.broker.username == "me"
    assert config.broker.tls == TlsSettings(Path("/etc/ca.pem"))
    with pytest.raises(ConfigError, match=r"broker\.password_file: \$CREDENTIALS_DIRECTORY is not set"):
        parse_config(document, {}, {}, folder=tmp_path)


@pytest.mark.parametrize(
    ("broker", "said"),
    [
        ({"url": "mqtt://b", "ca": "ca.pem"}, "mqtts:// URL with certificates"),
        ({"url": "mqtts://b", "certificate": "c.pem"}, "both certificate and key"),
        ({"url": "mqtts://b", "password_file": "p"}, "a username with password_file"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path: Path, broker: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"device": "k", "broker": broker, "trust": {"dir": "t"}}, {}, {}, folder=tmp_path)


def test_sample_explains_every_key_and_its_defaults_are_the_defaults(tmp_path: Path) -> None:
    sample = sample_config()
    tomllib.loads(sample)
    for key in KEYS:
        assert key.text in sample
    # With every default uncommented it equals the configuration without a file.
    lines = [
        line[1:] if line.startswith("#") and not line.startswith("# ") else line
        for line in sample.split("\n")
    ]
    text = "\n".join(line for line in lines if not line.endswith(" = ..."))
    given = {"broker.url": "mqtt://b", "trust.dir": "/t", "device": "k"}
    path = tmp_path / "agent.toml"
    path.write_text(text)
    assert load_config(path, given, {}) == load_config(None, given, {})


@pytest.mark.parametrize("content", [b"device = ", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "agent.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"agent\.toml: expected TOML"):
        load_config(path, {}, {})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml", {}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:9464", ListenAddress("127.0.0.1", 9464)), ("[::1]:80", ListenAddress("::1", 80))],
)
def test_listen_address_is_read(text: str, expected: ListenAddress) -> None:
    assert ListenAddress.parse(text) == expected


@pytest.mark.parametrize("text", ["9464", ":9464", "a:b", "a:65536", "a:-1", ""])
def test_invalid_listen_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        ListenAddress.parse(text)
