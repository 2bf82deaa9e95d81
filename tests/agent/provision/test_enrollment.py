"""The values that a device is enrolled with are read strictly, and all mistakes are reported at once."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from agent.errors import EnrollmentError
from agent.provision.enrollment import Enrollment, check_enrollment, read_enrollment

FULL = Enrollment(device="kitchen", broker="mqtts://broker", trust=("signing.pub",))


@pytest.mark.parametrize("form", ["toml", "json"])
def test_file_holds_all_values_and_its_paths_are_relative_to_it(tmp_path: Path, form: str) -> None:
    path = tmp_path / "first-boot"
    document = {"device": "kitchen", "broker": "mqtts://b", "trust": "a.pub", "groups": ["door"]}
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in document.items())
    path.write_text(json.dumps(document) if form == "json" else text)
    assert read_enrollment(path) == Enrollment(
        device="kitchen", broker="mqtts://b", trust=("a.pub",), groups=("door",), folder=tmp_path
    )


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
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


def test_a_file_may_use_the_names_of_the_flags_or_of_earlier_versions(tmp_path: Path) -> None:
    path = tmp_path / "first-boot.toml"
    found = []
    for ca, cert in (("cafile", "cert"), ("ca", "certificate")):
        path.write_text(f'broker = "mqtts://b"\n{ca} = "ca.pem"\n{cert} = "c.pem"\nkey = "c.key"\n')
        found.append(read_enrollment(path))
    assert found[0] == found[1]
    assert (found[0].ca, found[0].certificate) == ("ca.pem", "c.pem")
    path.write_text('ca = "a.pem"\ncafile = "b.pem"\n')
    with pytest.raises(EnrollmentError, match="cafile: given twice, also as ca"):
        read_enrollment(path)
    path.write_text('cafile = 5\nca = "b.pem"\n')
    assert _mistakes(path).endswith("cafile: expected a non-empty string\n  ca: given twice, also as cafile")


def test_every_key_that_the_message_names_is_one(tmp_path: Path) -> None:
    path = tmp_path / "first-boot.toml"
    path.write_text("colour = 1\n")
    named = _mistakes(path).partition("expected one of ")[2].split(", ")
    assert len(named) == len(fields(Enrollment)) - 1
    for key in named:
        path.write_text(f"{key} = 5\n")
        assert "expected a " in _mistakes(path)


def _mistakes(path: Path) -> str:
    with pytest.raises(EnrollmentError) as caught:
        read_enrollment(path)
    return str(caught.value)


@pytest.mark.parametrize("content", [b"\xff", b"{", b"a = ", b"[" * 100_000, b"x" * (2 << 20)])
def test_file_that_is_neither_toml_nor_json_is_refused(tmp_path: Path, content: bytes) -> None:
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
        ({"certificate": "c"}, "--cert and --key: expected both"),
        ({"password": "x"}, "--username: expected a user name"),
        ({"username": "u", "password": "x", "password_file": "y"}, "got both"),
        ({"broker": "mqtt://b", "ca": "c"}, "expected mqtts:// with certificates"),
    ],
)
def test_missing_or_contradictory_values_are_reported(changes: dict[str, object], expected: str) -> None:
    values = {"device": "kitchen", "broker": "mqtts://broker", "trust": ("signing.pub",), **changes}
    with pytest.raises(EnrollmentError) as caught:
        check_enrollment(Enrollment(**values), enrolled=False)  # type: ignore[arg-type]
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_complete_values_are_accepted() -> None:
    check_enrollment(FULL, enrolled=False)
    check_enrollment(Enrollment(broker="mqtt://b"), enrolled=True)
