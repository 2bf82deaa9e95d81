"""Taking an enrollment from a partition that everybody can read."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from pathlib import Path

import pytest

from agent.errors import ConfigError, EnrollmentError
from agent.provision import taking
from agent.provision.enrollment import read_enrollment
from agent.provision.taking import take
from tests.kills import in_child, kill_at_system_call

KEY = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\ncHVibGlj\n-----END CERTIFICATE-----\n"


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    """A boot partition with an enrollment that names its secrets in files."""
    boot = tmp_path / "boot"
    boot.mkdir()
    (boot / "enroll.toml").write_text(
        'device = "kitchen"\nbroker = "mqtts://b"\nusername = "k"\npassword_file = "secret.txt"\n'
        f'cert = "kitchen.pem"\nkey = "kitchen.key"\ntrust = """\n{CERTIFICATE}"""\ngroups = ["g"]\n'
    )
    (boot / "secret.txt").write_text("hunter2\n")
    (boot / "kitchen.key").write_text("Bag Attributes\n" + KEY)
    (boot / "kitchen.pem").write_text(CERTIFICATE)
    return boot


def taken_is_whole(target: Path) -> bool:
    enrollment = read_enrollment(target)
    return (
        enrollment.device,
        enrollment.password,
        enrollment.key,
        enrollment.certificate,
        enrollment.groups,
    ) == (
        *("kitchen", "hunter2", KEY, CERTIFICATE),
        ("g",),
    )


def test_values_and_secrets_are_in_one_file_of_root_and_erased_where_all_can_read_them(
    boot: Path, tmp_path: Path
) -> None:
    target = tmp_path / "etc/enroll.json"
    erased = take(boot / "enroll.toml", target)
    assert {path.name for path in erased} == {"enroll.toml", "secret.txt", "kitchen.key"}
    assert taken_is_whole(target)
    assert "password_file" not in json.loads(target.read_text())
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in boot.iterdir()] == ["kitchen.pem"]


def test_secrets_are_overwritten_before_they_are_removed(boot: Path, tmp_path: Path) -> None:
    # A second name shows what the first one's bytes were when it was removed.
    (tmp_path / "witness").hardlink_to(boot / "kitchen.key")
    take(boot / "enroll.toml", tmp_path / "etc/enroll.json")
    assert set((tmp_path / "witness").read_bytes()) == {0}


def test_secret_outside_the_folder_of_the_file_is_taken_and_stays(boot: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("hunter2\n")
    (boot / "enroll.toml").write_text(
        f'broker = "mqtt://b"\nusername = "k"\npassword_file = "{tmp_path}/mine"\n'
    )
    take(boot / "enroll.toml", tmp_path / "etc/enroll.json")
    assert read_enrollment(tmp_path / "etc/enroll.json").password == "hunter2"
    assert (tmp_path / "mine").read_text() == "hunter2\n"


def test_kill_at_any_point_loses_no_value_and_the_same_call_erases_the_rest(
    boot: Path, tmp_path: Path
) -> None:
    target, card = tmp_path / "etc/enroll.json", tmp_path / "card"
    shutil.copytree(boot, card)
    steps = 0
    for at in itertools.count():
        shutil.rmtree(boot)
        shutil.copytree(card, boot)
        target.unlink(missing_ok=True)

        def scenario(at: int = at) -> None:
            kill_at_system_call(at)
            take(boot / "enroll.toml", target)

        killed = in_child(scenario) == signal.SIGKILL
        # As edge-agent-enroll.service does.
        if (boot / "enroll.toml").exists() or (boot / "enroll.toml.taken").exists():
            take(boot / "enroll.toml", target)
        assert taken_is_whole(target), at
        assert [path.name for path in boot.iterdir()] == ["kitchen.pem"], at
        if not killed:
            break
        steps += 1
    assert steps == 5, "the new file, the other name of the old one, and three that are erased"


def test_power_failure_while_the_file_is_overwritten_leaves_nothing_of_it(boot: Path, tmp_path: Path) -> None:
    target = tmp_path / "etc/enroll.json"
    take(boot / "enroll.toml", target)
    (boot / "enroll.toml.taken").write_bytes(bytes(40) + b'password = "hunter2"\n')
    take(boot / "enroll.toml", target)
    assert taken_is_whole(target)
    assert [path.name for path in boot.iterdir()] == ["kitchen.pem"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('broker = "mqtt://b"\nwifi = "x"\n', "wifi: unknown key"),
        ('broker = "mqtt://b"\nusername = "k"\npassword_file = "absent"\n', "absent"),
        ('broker = "mqtt://b"\ntrust = "kitchen.txt"\n', "trust: expected text in PEM"),
    ],
)
def test_file_with_mistakes_stays_where_a_person_can_correct_it(
    boot: Path, tmp_path: Path, text: str, message: str
) -> None:
    (boot / "kitchen.txt").write_text("no key")
    (boot / "enroll.toml").write_text(text)
    before = {path.name: path.read_bytes() for path in boot.iterdir()}
    with pytest.raises(EnrollmentError, match=message):
        take(boot / "enroll.toml", tmp_path / "etc/enroll.json")
    assert {path.name: path.read_bytes() for path in boot.iterdir()} == before
    assert not (tmp_path / "etc/enroll.json").exists()


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnrollmentError, match=r"cannot read .*enroll\.toml"):
        take(tmp_path / "enroll.toml", tmp_path / "etc/enroll.json")


def test_partition_that_cannot_be_written_is_told(
    boot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(_folder: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(taking, "sync_folder", read_only)
    with pytest.raises(ConfigError, match=r"cannot be erased: Read-only file system") as error:
        take(boot / "enroll.toml", tmp_path / "etc/enroll.json")
    assert error.value.hint == "erase it yourself: it may hold a secret"
    assert taken_is_whole(tmp_path / "etc/enroll.json")
