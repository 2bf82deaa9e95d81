"""Who may use the dashboard: names that were rebound, other sites and other tokens are refused."""

from __future__ import annotations

import pytest

from dashboard.guard import Guard, new_token

LOCAL = Guard("t" * 32, "127.0.0.1")
OPEN = Guard("t" * 32, "0.0.0.0", frozenset({"workstation"}))


@pytest.mark.parametrize(
    ("host", "local", "opened"),
    [
        ("localhost:8700", True, True),
        ("LOCALHOST", True, True),
        ("127.0.0.1:9999", True, True),  # the other end of a tunnel
        ("[::1]:8700", True, True),
        ("192.168.1.5:8700", False, True),  # an address cannot be rebound
        ("workstation:8700", False, True),
        ("evil.example", False, False),
        ("localhost.evil.example:8700", False, False),
        ("127.0.0.1.evil.example", False, False),
        ("evil@localhost", False, False),
        ("localhost:port", False, False),
        ("localhost/x", False, False),
        ("", False, False),
        (None, False, False),
    ],
)
def test_host_must_name_this_machine(host: str | None, local: bool, opened: bool) -> None:
    assert LOCAL.is_host(host) is local
    assert OPEN.is_host(host) is opened


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:8700", True),
        ("http://localhost:8701", False),  # another program of this machine
        ("http://localhost", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
        (None, False),
        ("file://localhost:8700", False),
        ("http://[", False),
    ],
)
def test_origin_must_be_the_page_itself(origin: str | None, expected: bool) -> None:
    assert LOCAL.is_origin(origin, "localhost:8700") is expected


def test_only_the_token_of_this_start_is_one() -> None:
    guard = Guard(new_token(), "127.0.0.1")
    assert guard.is_token(guard.token)
    assert new_token() != new_token()
    for token in (None, "", guard.token[:-1], guard.token + "a", new_token(), "\u00e9"):
        assert not guard.is_token(token)
    assert guard.token not in repr(guard)
