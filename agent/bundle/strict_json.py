"""Hooks for `json.loads` that refuse repeated keys, NaN, infinities and integers of many digits.

Two readers of a repeated key may see two documents, and NaN is not JSON (RFC 8259, 4 and 6).
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

# Of 64 bits, with a sign. Reading 4300 digits, which Python allows, takes 0.2 ms.
_MAX_INTEGER_CHARACTERS: Final = 21


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from its members; for `object_pairs_hook`.

    Raises
    ------
    ValueError
        If a key is repeated.
    """
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!a:.60}")
            seen.add(key)
    return document


def refuse_constant(name: str) -> NoReturn:
    """Refuse `NaN`, `Infinity` and `-Infinity`; for `parse_constant`.

    Raises
    ------
    ValueError
        If it is called: `json.loads` calls it only for these names.
    """
    raise ValueError(f"{name} is not a JSON number")


def short_integer(text: str) -> int:
    """Read an integer; for `parse_int`.

    Raises
    ------
    ValueError
        If it has more digits than any number in our documents.
    """
    if len(text) > _MAX_INTEGER_CHARACTERS:
        raise ValueError(
            f"expected an integer of at most {_MAX_INTEGER_CHARACTERS} characters, got {len(text)}"
        )
    return int(text)
