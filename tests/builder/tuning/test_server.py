from __future__ import annotations

import socket
from pathlib import Path

import pytest

from builder.cli import main
from builder.errors import FleetError
from builder.tuning.server import is_loopback, require_free, ssh_tunnel
from builder.tuning.tracker import Tracker


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.168.1.4", False),
        ("lab", False),
    ],
)
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_tunnel_leads_both_ways_and_listens_to_loopback_alone() -> None:
    command = ssh_tunnel("pi@kitchen", 9190, 9091)
    assert command[0] == "ssh"
    assert command[command.index("-R") + 1] == "127.0.0.1:9190:127.0.0.1:9190"
    assert command[command.index("-L") + 1] == "127.0.0.1:9091:127.0.0.1:9091"
    assert command[-2:] == ["--", "pi@kitchen"]
    assert "ExitOnForwardFailure=yes" in command


@pytest.mark.parametrize("board", ["", " ", "-oProxyCommand=evil"])
def test_an_option_is_no_board(board: str) -> None:
    with pytest.raises(ValueError, match="user@host"):
        ssh_tunnel(board, 9190, 9091)


def test_ssh_starts_the_server_on_the_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "ran: $@"\nexit 7\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["rpc-server", "--ssh", "pi@kitchen", "--key", "rpi4", "--port", "9095"]) == 7
    out = capfd.readouterr().out
    assert "-L 127.0.0.1:9095:127.0.0.1:9095" in out
    assert "rpc-server --tracker 127.0.0.1:9190 --key rpi4 --host 127.0.0.1 --port 9095" in out


@pytest.mark.parametrize("verb", ["rpc-tracker", "rpc-server"])
def test_the_defaults_are_loopback(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert "127.0.0.1" in capsys.readouterr().out


def test_listening_to_all_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builder.tuning.server.serve_tracker", lambda *_: 0)
    monkeypatch.setattr("builder.tuning.server.serve_board", lambda *_: 0)
    assert main(["rpc-tracker", "--host", "0.0.0.0"]) == 0
    assert "remote code execution in clear text" in capsys.readouterr().err
    assert main(["rpc-server", "--host", "0.0.0.0", "--tracker", "lab:9190", "--key", "k"]) == 0
    assert "remote code execution in clear text" in capsys.readouterr().err
    assert main(["rpc-tracker"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            require_free("127.0.0.1", taken.getsockname()[1])
        assert main(["rpc-tracker", "--port", str(taken.getsockname()[1])]) in (1, 4)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("lab:9190", "lab", 9190), ("lab", "lab", 9190), ("[::1]:99", "::1", 99), ("10.0.0.1:1", "10.0.0.1", 1)],
)
def test_tracker_addresses_are_read(text: str, host: str, port: int) -> None:
    assert Tracker.parse(text) == Tracker(host, port)


@pytest.mark.parametrize(
    "text", ["", ":9190", "lab:", "lab:0", "lab:99999", "a:b:c", "lab:9190/x", "http://lab:9190"]
)
def test_what_is_no_tracker_address_is_refused(text: str) -> None:
    with pytest.raises(FleetError, match="host:port"):
        Tracker.parse(text)
