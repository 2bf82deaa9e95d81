"""`edgebundle.toml`: what a project's folder says about its model, its key and its fleet.

Promises: every key is known, has its type, and is bounded; the first mistake is one error with what was
meant. A path is as it is written: relative to the folder of the file.

Leaves to others: which flag of which verb a key stands for (`builder.cli.project_defaults`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from builder.errors import ProjectError
from builder.spelling import did_you_mean

FILE: Final = "edgebundle.toml"
# A project of a hundred agents takes 4 KiB.
MAX_FILE_BYTES: Final = 64 << 10
_EXAMPLE: Final = "docs/project.md shows such a file, and `edgebundle new` writes one"
MAX_AGENTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The table `[model]`: from the model's file to the bundle. What is None is not in the file.

    `file`: the model, such as `yolox_nano.onnx`.
    `target`: the device to compile for, such as `rpi4`.
    `name`, `version`: the model's name on devices, and its version.
    `preprocess`, `postprocess`, `labels`, `columns`: presets, names, or files.
    `input_shapes`, `input_values`: as the flags of these names have them.
    `calibration`: samples to quantise with.
    `precision`: `int8` to quantise the model first.
    `bundle`: the bundle that `compile` writes, and that `run` and `deploy` take.
    """

    file: str | None = None
    target: str | None = None
    name: str | None = None
    version: str | None = None
    preprocess: str | None = None
    postprocess: str | None = None
    labels: str | None = None
    columns: str | None = None
    input_shapes: str | None = None
    input_values: str | None = None
    calibration: str | None = None
    precision: str | None = None
    bundle: str | None = None


@dataclass(frozen=True, slots=True)
class SignTable:
    """The table `[sign]`.

    `key`: the private key that bundles are signed with, or `exec:` and a program that signs.
    """

    key: str | None = None


@dataclass(frozen=True, slots=True)
class FleetTable:
    """The table `[fleet]`: where the agents are.

    `broker`: the broker's URL.
    `agents`: their names: `deploy` goes to each of them, `infer` to the first.
    `cafile`, `cert`, `key`, `password_file`, `mqtt_version`: as the flags of these names have them.
    """

    broker: str | None = None
    agents: tuple[str, ...] = ()
    cafile: str | None = None
    cert: str | None = None
    key: str | None = None
    password_file: str | None = None
    mqtt_version: str | None = None


_TABLES: Final = {"model": ModelTable, "sign": SignTable, "fleet": FleetTable}


@dataclass(frozen=True, slots=True)
class Project:
    """A project.

    `model`, `sign`, `fleet`: its tables; an absent one is empty.
    """

    model: ModelTable = ModelTable()
    sign: SignTable = SignTable()
    fleet: FleetTable = FleetTable()

    @classmethod
    def load(cls, path: Path) -> Project:
        """Read a project's file.

        Raises `ProjectError` if it is not TOML, or has a key that no project has, or a value of another type.
        Raises `OSError` if it cannot be read.
        """
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ProjectError(f"{path}: expected at most {MAX_FILE_BYTES} bytes, got more", hint=_EXAMPLE)
        try:
            document = tomllib.loads(raw.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProjectError(f"{path}: expected TOML: {str(error)[:200]}", hint=_EXAMPLE) from error
        tables = {}
        for name, value in document.items():
            kind = _TABLES.get(name)
            if kind is None:
                raise ProjectError(
                    f"{path}: expected the tables {', '.join(_TABLES)}, got {name!r:.80}",
                    hint=_elsewhere(name) or did_you_mean(name, _TABLES, otherwise=_help(path)),
                )
            if not isinstance(value, dict):
                raise ProjectError(
                    f"{path}: {name}: expected a table, [{name}], got a value",
                    hint=f"write [{name}] on a line of its own, and its values below",
                )
            tables[name] = kind(**_values(path, name, kind, value))
        return cls(**tables)


def _values(path: Path, table: str, kind: type[Any], given: Mapping[str, object]) -> dict[str, object]:
    known = [field.name for field in fields(kind)]
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise ProjectError(
                f"{path}: [{table}]: expected one of {', '.join(known)}, got {name!r:.80}",
                hint=_other_table(table, name) or did_you_mean(name, known, otherwise=_help(path)),
            )
        if name == "agents":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise ProjectError(
                    f'{path}: [{table}] {name}: expected a list of names, such as ["kitchen"], '
                    f"got {_shown(value)}",
                    hint=f'write {name} = ["kitchen", "garage"]',
                )
            if len(value) > MAX_AGENTS:
                raise ProjectError(
                    f"{path}: [{table}] {name}: expected at most {MAX_AGENTS} names",
                    hint="deploy to the others with --agent",
                )
            values[name] = tuple(value)
        elif not isinstance(value, str) or not value:
            raise ProjectError(
                f"{path}: [{table}] {name}: expected a string, got {_shown(value)}",
                hint=f'write {name} = "..."',
            )
        else:
            values[name] = value
    return values


def _other_table(table: str, name: str) -> str | None:
    place = _elsewhere(name)
    return None if place is None or f"[{table}]" in place else place


def _elsewhere(name: str) -> str | None:
    """Return a hint that names the table that a key belongs to."""
    for table, kind in _TABLES.items():
        if any(field.name == name for field in fields(kind)):
            return f"write it below [{table}]"
    return None


def _help(path: Path) -> str:
    return f"remove it from {path.name}, or see docs/project.md"


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]
