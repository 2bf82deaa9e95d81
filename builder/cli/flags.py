"""Flags as the fields of a frozen dataclass: `argparse` reads them, and a verb takes them typed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from builder.cli import Parser

    Flags = TypeVar("Flags", bound=DataclassInstance)


def flag(*names: str, group: str = "", **given: Any) -> Any:  # noqa: ANN401 - a field of any type
    """Declare a flag: the field `print_top` is `--print-top`, if no other long name is given.

    Parameters
    ----------
    names
        How else it is spelled, such as `-o`.
    group
        The group of the help that it is in; a second line describes the group.
    given
        What `ArgumentParser.add_argument` takes; `completer` is what argcomplete calls for the values.
    """
    return field(metadata={"names": names, "group": group, "given": given})


def argument(**given: Any) -> Any:  # noqa: ANN401 - a field of any type
    """Declare an argument that is found by its place."""
    return field(metadata={"names": None, "group": "", "given": given})


def part(kind: type[DataclassInstance], group: str = "") -> Any:  # noqa: ANN401 - of this type
    """Declare a field that holds flags which several verbs have; `group` is that of those without one."""
    return field(metadata={"part": kind, "group": group})


def takes(parser: Parser, kind: type[Flags], handler: Callable[[Flags], int]) -> None:
    """Let a verb take these flags, and hand them to its function."""
    _add(parser, kind, "", {})
    parser.set_defaults(handler=lambda args: handler(_read(args, kind)))


def flat(flags: DataclassInstance) -> dict[str, Any]:
    """Return the values of flags by name, with those of the parts."""
    values: dict[str, Any] = {}
    for each in fields(flags):
        value = getattr(flags, each.name)
        values |= flat(value) if "part" in each.metadata else {each.name: value}
    return values


def _add(
    parser: Parser, kind: type[DataclassInstance], group: str, groups: dict[str, argparse._ArgumentGroup]
) -> None:
    for each in fields(kind):
        name = each.metadata["group"] or group
        if "part" in each.metadata:
            _add(parser, each.metadata["part"], name, groups)
            continue
        if name and name not in groups:
            title, _, about = name.partition("\n")
            groups[name] = parser.add_argument_group(title, about or None)
        names, given = each.metadata["names"], dict(each.metadata["given"])
        completer = given.pop("completer", None)
        if names is None:
            names = (each.name,)
        else:
            given["dest"] = each.name
            if not any(spelled.startswith("--") for spelled in names):
                names = (*names, f"--{each.name.replace('_', '-')}")
        action = (groups[name] if name else parser).add_argument(*names, **given)
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]  # argcomplete reads it


def _read(args: argparse.Namespace, kind: type[Flags]) -> Flags:
    parts = {each.name: each.metadata.get("part") for each in fields(kind)}
    return kind(
        **{name: getattr(args, name) if of is None else _read(args, of) for name, of in parts.items()}
    )
