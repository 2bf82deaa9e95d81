from __future__ import annotations

import socket

import pytest

from builder.boards.rpc_servers import require_free
from builder.cli import main


@pytest.mark.parametrize("verb", ["rpc-tracker", "rpc-server"])
def test_the_defaults_are_loopback(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert "127.0.0.1" in capsys.readouterr().out


def test_listening_on_all_addresses_prints_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builder.boards.rpc_servers.serve_tracker", lambda *_: 0)
    monkeypatch.setattr("builder.boards.rpc_servers.serve_board", lambda *_, **__: 0)
    assert main(["rpc-tracker", "--host", "0.0.0.0"]) == 0
    assert "remote code execution in clear text" in capsys.readouterr().err
    assert main(["rpc-server", "--host", "0.0.0.0", "--tracker", "lab:9190", "--rpc-key", "k"]) == 0
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
