"""Taking an enrollment file from where others can read it, such as a card's boot partition.

Promises: the values are on disk, in one file that only its owner can read, before anything is erased. After a
power failure at any point the same call ends what was begun. Secrets that the file names in its own folder
are taken and erased with it. Leaves the enrollment to `enroll`. Flash may keep what was erased.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.durable import sync_folder
from agent.errors import ConfigError, EnrollmentError
from agent.mqtt.settings import read_secret
from agent.provision import credentials
from agent.provision.enrollment import KEYS, Enrollment, is_text, key_files, read_enrollment
from agent.provision.files import Owner, make_folder, write_file

# The name of the taken values, beside the configuration.
TAKEN_FILE: Final = "enroll.json"
# A file whose values were taken, and that is being erased.
_ERASING: Final = ".taken"
_MODE: Final = 0o600
_PEM_FLAGS: Final = (("cafile", "ca"), ("cert", "certificate"), ("key", "key"))


def take(source: Path, target: Path) -> tuple[Path, ...]:
    """Move an enrollment file and the secrets that it names to one file, readable only by its owner.

    `target` gets all values, with the text of files in place of their names. Return what was erased. A file
    with mistakes (EnrollmentError) is left for a person who corrects it; one that cannot be written or erased
    raises ConfigError.
    """
    erasing = source.parent / f"{source.name}{_ERASING}"
    if source.exists() or not erasing.exists():
        document = _with_texts(read_enrollment(source))
        make_folder(target.parent, Owner.of_service())
        write_file(target, json.dumps(document, indent=1).encode(), Owner(-1, -1), _MODE)
        try:
            source.replace(erasing)
            sync_folder(source.parent)
        except OSError as error:
            raise _not_erased(source, error) from error
    secrets: list[Path] = []
    with suppress(EnrollmentError):  # it is half erased, after its secrets were
        secrets += _secret_files(read_enrollment(erasing))
    for path in (*secrets, erasing):
        _erase(path)
    return (*secrets, source)


def _with_texts(enrollment: Enrollment) -> dict[str, object]:
    """Return an enrollment as a document that refers to no other file."""
    document = {
        flag: value for flag, name in KEYS.items() if (value := getattr(enrollment, name)) not in (None, ())
    }
    try:
        if enrollment.password_file is not None:
            del document["password_file"]
            document["password"] = read_secret(_path(enrollment, enrollment.password_file))
        for flag, name in _PEM_FLAGS:
            given = getattr(enrollment, name)
            if given is not None:
                document[flag] = _pem(given, enrollment.folder, flag)
        if enrollment.trust:
            document["trust"] = [_pem(given, enrollment.folder, "trust") for given in key_files(enrollment)]
    except ConfigError as error:
        raise EnrollmentError(str(error), hint=error.hint) from error
    return document


def _pem(given: str, folder: Path, flag: str) -> str:
    """Return the text of a credential from its first block on, as an enrollment file may have it."""
    raw = credentials.read_credential(given, folder, flag)
    begin = raw.find(b"-----BEGIN ")
    if begin < 0 or not raw.isascii():
        raise EnrollmentError(
            f"{flag}: expected text in PEM, got other bytes in {given:.200}",
            hint="give a file that contains -----BEGIN",
        )
    return raw[begin:].decode()


def _secret_files(enrollment: Enrollment) -> Iterator[Path]:
    """Yield the files with secrets that an enrollment names and that lie in its own folder."""
    folder = enrollment.folder.resolve()
    for given in (enrollment.password_file, enrollment.key):
        if given is not None and not is_text(given):
            path = _path(enrollment, given)
            if path.is_file() and path.resolve().is_relative_to(folder):
                yield path


def _path(enrollment: Enrollment, given: str) -> Path:
    return enrollment.folder / Path(given).expanduser()


def _erase(path: Path) -> None:
    """Overwrite a file, and remove it."""
    try:
        with path.open("r+b", buffering=0) as file:
            file.write(bytes(os.fstat(file.fileno()).st_size))
            os.fsync(file.fileno())
        path.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise _not_erased(path, error) from error


def _not_erased(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be erased: {error.strerror}", hint="erase it yourself: it may hold a secret"
    )
