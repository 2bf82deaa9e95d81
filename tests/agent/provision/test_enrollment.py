"""What a device is told: read strictly, from a file or by questions."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import ConfigError, EnrollmentError
from agent.provision.enrollment import Enrollment, check_enrollment, read_enrollment
from agent.provision.questions import ask

FULL = Enrollment(device="kitchen", broker="mqtts://broker", trust=("signing.pub",))


@pytest.mark.parametrize("form", ["toml", "json"])
def test_a_file_holds_everything_and_its_files_lie_beside_it(tmp_path: Path, form: str) -> None:
    path = tmp_path / "first-boot"
    document = {"device": "kitchen", "broker": "mqtts://b", "trust": "a.pub", "groups": ["door"]}
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in document.items())
    path.write_text(json.dumps(document) if form == "json" else text)
    assert read_enrollment(path) == Enrollment(
        device="kitchen", broker="mqtts://b", trust=("a.pub",), groups=("door",), folder=tmp_path
    )


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "first-boot.toml"
    path.write_text('colour = "red"\nbroker = 5\ntrust = [1]\ndevice = ""\n')
    with pytest.raises(EnrollmentError) as caught:
        read_enrollment(path)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    for expected in (
        "colour: unknown key",
        "broker: expected a non-empty string",
        "trust: expected a list",
        "device: exp",
    ):
        assert expected in message


@pytest.mark.parametrize("content", [b"\xff", b"{", b"a = ", b"[" * 100_000, b"x" * (2 << 20)])
def test_a_file_that_is_none_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "first-boot.toml"
    path.write_bytes(content)
    with pytest.raises(EnrollmentError, match="expected"):
        read_enrollment(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"broker": None}, "--broker: expected mqtts://HOST"),
        ({"broker": "http://b"}, "--broker: expected a URL with mqtt:// or mqtts://"),
        ({"broker": "mqtts://me:secret@b"}, "--broker: a password in a URL"),
        ({"trust": ()}, "--trust: expected the public key"),
        ({"device": "a/b"}, "--device: expected 1 to 64"),
        ({"groups": ("replies",)}, "--group: expected 1 to 64"),
        ({"certificate": "c"}, "--certificate and --key: expected both"),
        ({"password": "x"}, "--username: expected a user name"),
        ({"username": "u", "password": "x", "password_file": "y"}, "got both"),
        ({"broker": "mqtt://b", "ca": "c"}, "expected mqtts:// with certificates"),
    ],
)
def test_what_is_missing_or_contradicts_is_told(changes: dict[str, object], expected: str) -> None:
    values = {"device": "kitchen", "broker": "mqtts://broker", "trust": ("signing.pub",), **changes}
    with pytest.raises(EnrollmentError) as caught:
        check_enrollment(Enrollment(**values), enrolled=False)  # type: ignore[arg-type]
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_enough_is_enough() -> None:
    check_enrollment(FULL, enrolled=False)
    check_enrollment(Enrollment(broker="mqtt://b"), enrolled=True)


def answers(*given: str) -> Callable[[str], str]:
    left = iter(given)

    def read(question: str) -> str:
        asked.append(question)
        return next(left)

    asked: list[str] = []
    return read


def test_only_what_is_missing_is_asked_for() -> None:
    whole = Enrollment(
        device="k", broker="mqtts://b", ca="ca.pem", certificate="c.pem", key="c.key", trust=("s.pub",)
    )
    assert ask(whole, trusts=False, read=answers(), read_secret=answers()) == whole


def test_wrong_answers_are_asked_again_and_empty_ones_take_the_default() -> None:
    read = answers("a/b", "", "broker.lan", "mqtts://broker.lan", "", "", "me", "", "s.pub")
    found = ask(Enrollment(), trusts=False, read=read, read_secret=answers("hunter2"))
    assert found == Enrollment(
        device=socket.gethostname().partition(".")[0],
        broker="mqtts://broker.lan",
        username="me",
        password="hunter2",
        trust=("s.pub",),
    )
    assert "hunter2" not in repr(found)


def test_somebody_who_never_answers_is_not_asked_for_ever() -> None:
    with pytest.raises(ConfigError, match="expected a valid answer"):
        ask(Enrollment(device="k"), trusts=True, read=answers(*["nonsense"] * 9), read_secret=answers())
