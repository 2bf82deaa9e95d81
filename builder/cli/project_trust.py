"""What an `edgebundle.toml` may do without a yes: its author is not always the person who runs the verb.

Promises: without a yes, the file makes no verb open a file outside its folder, links included, run a program,
or send a password in clear text to the broker that it names. A yes holds for this folder and these values.
Inside its folder, the file makes no verb replace anything but a bundle.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.bundle import archive
from agent.durable import replacing
from agent.errors import EdgeError, FormatError
from agent.mqtt.settings import parse_broker_url
from agent.reading import open_at_once
from agent.terminal import note
from builder.cli.confirmation import confirmed
from builder.cli.project_file import FILE
from builder.errors import ProjectError
from builder.loopback import is_loopback

# Arguments that may be a file. A name, such as a preset's, is one in the folder.
_FILES: Final = (
    *(
        "model",
        "bundle",
        "bundles",
        "output",
        "preprocess",
        "postprocess",
        "labels",
        "columns",
        "calibration",
    ),
    *("sign_key", "cafile", "cert", "key", "password_file"),
)
# Where a verb connects and what it signs with is said on a terminal.
_SHOWN: Final = ("broker", "password_file", "cafile", "cert", "key", "sign_key")
# A line of 65 bytes for each folder to which a person has said yes.
_MAX_ANSWERS_BYTES: Final = 1 << 20


def require_trust(args: Mapping[str, object], values: Mapping[str, object], arguments: Sequence[str]) -> None:
    """Ask once for what a stranger's file must not do, and say what the file has set.

    `args`: the arguments of a verb that is run in the project's folder.
    `values`: the project's values by argument.
    `arguments`: the command line; what it says itself needs no yes.
    Raises `ProjectError` if the answer is not yes, or there is no terminal to ask on; if a file that is no
        bundle would be replaced.
    """
    typed = {word.partition("=")[2] if word.startswith("--") and "=" in word else word for word in arguments}
    used = {
        name: value
        for name, value in values.items()
        if value and _texts(args.get(name)) == _texts(value) and not typed >= set(_words(value))
    }
    doubts = _doubts(args, used)
    if doubts and not _has_yes(doubts):
        note(f"{FILE} in {Path.cwd()}:", *(f"  {doubt}" for doubt in doubts))
        if not confirmed("go on, now and whenever it says the same? [y/N] "):
            raise ProjectError(
                f"{FILE}: expected files in its folder, no program, and no password in clear text, "
                f"got: {doubts[0]}",
                hint="give these values as flags, or answer y on a terminal once",
            )
        remember(doubts)
    if "output" in used:
        _check_replaced(str(used["output"]))
    shown = [f"{name} {used[name]}" for name in _SHOWN if name in used]
    if shown and sys.stderr.isatty():
        note(f"{FILE}: {', '.join(shown)}")


def trust_outside(folder: Path, values: Mapping[str, str | None]) -> None:
    """Remember a yes for files outside a project that this user is making."""
    for name, value in values.items():
        doubt = None if value is None else _outside(name, value, folder)
        if doubt is not None:
            remember([doubt], folder)


def remember(doubts: Sequence[str], folder: Path | None = None) -> None:
    """Keep a yes; if that is not possible, the question comes again."""
    path = _answers()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = path.read_bytes() if path.exists() else b""
        with replacing(path) as file:
            file.write(known[-_MAX_ANSWERS_BYTES:])
            file.writelines(_mark(doubt, folder) + b"\n" for doubt in doubts)
    except OSError:
        return


def _check_replaced(path: str) -> None:
    """Check that a file that will be replaced is a bundle; a file that is not there is no concern."""
    try:
        fd = open_at_once(path)
    except OSError:  # the verb says what is wrong
        return
    try:
        archive.read_index(fd)
    except FormatError as error:
        raise ProjectError(
            f"{FILE}: expected a bundle to replace, got another file: {path}",
            hint="remove that file, or give bundle another name in edgebundle.toml",
        ) from error
    except EdgeError:  # such as a folder, which cannot be read
        return
    finally:
        os.close(fd)


def _doubts(args: Mapping[str, object], used: Mapping[str, object]) -> list[str]:
    folder = Path.cwd()
    doubts = []
    for name in _FILES:
        doubts += [_outside(name, each, folder) for each in _words(used.get(name))]
    if "broker" in used and args.get("password_file") is not None:
        doubts.append(_in_clear_text(str(used["broker"])))
    return [doubt for doubt in doubts if doubt is not None]


def _words(value: object) -> list[str]:
    return [] if value is None else [str(each) for each in (value if isinstance(value, list) else (value,))]


def _texts(value: object) -> list[str]:
    """Return what is equal before and after argparse has made a path of it."""
    return [os.path.normpath(word) for word in _words(value)]


def _outside(name: str, value: str, folder: Path) -> str | None:
    """Describe a file that is not in the folder, links being followed, or a program that would be run."""
    if name == "sign_key":
        from builder.bundles.signers import EXEC  # loads `cryptography`, as the verb will

        if value.startswith(EXEC):
            return f"{name} runs the program {value.removeprefix(EXEC)}"
    path = Path(os.path.realpath(folder / value))
    if path.is_relative_to(os.path.realpath(folder)):
        return None
    return f"{name} is the file {path}, outside the folder"


def _in_clear_text(url: str) -> str | None:
    try:
        broker = parse_broker_url(url)
    except EdgeError:
        return None  # the verb says what is wrong
    return (
        None if broker.tls or is_loopback(broker.host) else f"a password goes in clear text to {broker.host}"
    )


def _has_yes(doubts: Sequence[str]) -> bool:
    try:
        known = set(_answers().read_bytes().splitlines())
    except OSError:
        return False
    return all(_mark(doubt, None) in known for doubt in doubts)


def _mark(doubt: str, folder: Path | None) -> bytes:
    where = os.path.realpath(Path.cwd() if folder is None else folder)
    return hashlib.sha256(json.dumps([where, doubt]).encode()).hexdigest().encode()


def _answers() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "edgebundle" / "trusted-projects"
