"""A stranger's `edgebundle.toml`: which files it may name, and what it may send, without a yes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import cli
from tests.cli.terminal import Edgebundle


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write an `edgebundle.toml` and enter its folder."""
    folder = tmp_path / "stranger"
    (folder / "keys").mkdir(parents=True)
    (tmp_path / "secret").write_text("mine\n")
    (folder / "keys" / "password").write_text("theirs\n")

    def write(text: str) -> Path:
        (folder / "edgebundle.toml").write_text(text)
        monkeypatch.chdir(folder)
        return folder

    return write


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Answer each question on a terminal alike, and return the list of those that were asked."""

    def answering(text: str) -> list[str]:
        asked: list[str] = []

        def readline() -> str:
            asked.append(text)
            return text

        monkeypatch.setattr(
            sys, "stdin", type("Terminal", (), {"isatty": lambda _: True, "readline": lambda _: readline()})()
        )
        return asked

    return answering


CLOSED = "127.0.0.1:9"  # nothing listens at the port that discards


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("agents", f'[fleet]\nbroker = "mqtt://x@{CLOSED}"\npassword_file = "../secret"'),
        ("agents", f'[fleet]\nbroker = "mqtts://x@{CLOSED}"\npassword_file = "link"'),
        (
            "metrics",
            f'[fleet]\nagents = ["a"]\nbroker = "mqtts://{CLOSED}"\ncert = "../secret"\nkey = "/etc/shadow"',
        ),
        ("dashboard", f'[fleet]\nbroker = "mqtts://{CLOSED}"\ncafile = "keys/../../secret"'),
        ("compile", '[model]\nfile = "a.onnx"\n[sign]\nkey = "../secret"'),
        ("compile", '[model]\nfile = "a.onnx"\n[sign]\nkey = "exec:keys/program"'),
        ("compile", '[model]\nfile = "a.onnx"\nbundle = "../secret"'),
        ("compile", '[model]\nfile = "a.onnx"\nlabels = "../secret"'),
        ("check", '[model]\nfile = "../secret"'),
        ("quantize", '[model]\nfile = "a.onnx"\ncalibration = "/home"'),
        ("run", '[model]\nbundle = "linked/secret"'),
        ("deploy", f'[model]\nbundle = "../secret"\n[fleet]\nagents = ["a"]\nbroker = "mqtt://{CLOSED}"'),
        ("agents", '[fleet]\nbroker = "mqtt://x@stranger.example"\npassword_file = "keys/password"'),
        ("agents", '[fleet]\nbroker = "mqtt://x@127.0.0.1.example"\npassword_file = "keys/password"'),
    ],
)
def test_nothing_outside_the_folder_and_no_password_in_the_clear_without_a_yes(
    edgebundle: Edgebundle,
    project: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    text: str,
) -> None:
    folder = project(text)
    (folder / "link").symlink_to("../secret")
    (folder / "linked").symlink_to("..")

    def dial(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", dial)
    done = edgebundle(verb)
    assert done.returncode == 4, done.stderr
    assert "edgebundle: error: edgebundle.toml: expected files in its folder" in done.stderr
    assert "edgebundle: hint: give these values as flags, or answer y on a terminal once" in done.stderr
    assert (folder.parent / "secret").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("verb", "text", "flags"),
    [
        # Its own folder, a broker on this machine, and values that the user gives.
        ("agents", f'[fleet]\nbroker = "mqtt://x@{CLOSED}"\npassword_file = "keys/password"', ()),
        ("agents", f'[fleet]\nbroker = "mqtts://x@{CLOSED}"\npassword_file = "./keys/../keys/password"', ()),
        (
            "agents",
            f'[fleet]\nbroker = "mqtt://x@{CLOSED}"\npassword_file = "../secret"',
            ("--password-file", "../secret"),
        ),
        (
            "agents",
            f'[fleet]\nbroker = "mqtt://x@{CLOSED}"\npassword_file = "../secret"',
            ("--password-file=../secret",),
        ),
        ("agents", '[fleet]\nbroker = "mqtt://stranger.example"', ("--broker", f"mqtt://x@{CLOSED}")),
        ("check", '[model]\nfile = "../secret"', ("other.onnx",)),
    ],
)
def test_other_values_need_no_yes(
    edgebundle: Edgebundle, project: Callable[[str], Path], verb: str, text: str, flags: tuple[str, ...]
) -> None:
    project(text)
    done = edgebundle(verb, *flags)
    assert done.returncode != 0
    assert "expected files in its folder" not in done.stderr


def test_a_yes_holds_for_this_folder_and_these_values(
    project: Callable[[str], Path], answer: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project('[model]\nfile = "../secret"')
    asked = answer("n\n")
    assert cli.main(["check"]) == 4
    assert len(asked) == 1
    asked = answer("y\n")
    assert cli.main(["check"]) != 0  # no model
    shown = capsys.readouterr().err
    assert f"  model is the file {folder.parent / 'secret'}, outside the folder" in shown.splitlines()
    cli.main(["check"])
    assert len(asked) == 1
    (folder / "edgebundle.toml").write_text('[model]\nfile = "../edgebundle.toml"')
    cli.main(["check"])
    assert len(asked) == 2
    (folder / "model").symlink_to("../secret")
    (folder / "edgebundle.toml").write_text('[model]\nfile = "model"')
    cli.main(["check"])
    assert len(asked) == 2  # the same file by the same argument
    (folder / "model").unlink()
    (folder / "model").symlink_to("/etc/passwd")
    cli.main(["check"])
    assert len(asked) == 3
    os.chdir(folder.parent)
    (folder.parent / "edgebundle.toml").write_text('[model]\nfile = "secret"')
    cli.main(["check"])
    assert len(asked) == 3


def test_one_who_makes_a_project_has_said_yes(
    edgebundle: Edgebundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "labels.txt").write_text("a\nb\n")
    made = edgebundle("new", "mine", "--labels", "labels.txt", "--broker", f"mqtt://{CLOSED}", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    monkeypatch.chdir(tmp_path / "mine")
    done = edgebundle("compile", "absent.onnx", "--labels", "../labels.txt")
    assert "expected files in its folder" not in done.stderr
    done = edgebundle("compile")
    assert "expected files in its folder" not in done.stderr


@pytest.mark.parametrize("content", [b"print('mine')\n", b"", b"\0" * 1024])
def test_a_bundle_replaces_only_a_bundle(
    edgebundle: Edgebundle, project: Callable[[str], Path], content: bytes
) -> None:
    folder = project('[model]\nfile = "m.onnx"\nbundle = "train.py"')
    (folder / "m.onnx").touch()
    (folder / "train.py").write_bytes(content)
    result = edgebundle("compile")
    assert result.returncode == 4
    assert "expected a bundle to replace, got another file: train.py" in result.stderr
    assert "hint: remove that file, or give bundle another name in edgebundle.toml" in result.stderr
    assert (folder / "train.py").read_bytes() == content


def test_a_bundle_is_replaced_and_so_is_what_the_command_line_names(
    edgebundle: Edgebundle, project: Callable[[str], Path], digits_bundle: Path
) -> None:
    folder = project('[model]\nfile = "m.onnx"\nbundle = "out.bundle"')
    (folder / "m.onnx").touch()
    (folder / "other").write_text("mine")
    assert "replace" not in edgebundle("compile").stderr  # there is none yet
    (folder / "out.bundle").write_bytes(digits_bundle.read_bytes())
    assert "replace" not in edgebundle("compile").stderr
    assert "replace" not in edgebundle("compile", "-o", "other").stderr
