"""Names, versions, counters and digests that manifests, topics and documents share: one rule for each.

Promises that no other module of the agent or the builder defines one of these patterns or limits. The checks
need no manifest: the builder refuses a bad value before it compiles. Leaves to topics and documents how they
report what breaks a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from agent.bundle.values import match, within

# A model's name is also a level of a topic.
MODEL_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# Devices, groups, clients and jobs. 64 characters keep a topic far below MQTT's 65535 bytes.
LEVEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# https://semver.org/#is-there-a-suggested-regular-expression-regex-to-check-a-semver-string
SEMVER: Final = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?"
    r"(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?",
    re.ASCII,
)
MAX_VERSION_CHARS: Final = 64
# Devicetree specification 0.4, 2.3.1 compatible: "manufacturer,model".
COMPATIBLE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9,._+-]{0,127}")
# Types of devices that one bundle is for.
MAX_COMPATIBLE: Final = 64
# A 64-bit signed integer, which every language can read.
MAX_SECURITY_COUNTER: Final = (1 << 63) - 1
# SHA-256 in lower case hexadecimal.
SHA256: Final = re.compile(r"[0-9a-f]{64}")

_DIGEST_PREFIX: Final = "sha256:"


def check_model_name(name: str) -> None:
    """Check a model's name: 1 to 64 of `a-z`, `0-9`, `.`, `_` and `-`, the first a letter or a digit.

    Raises
    ------
    ValueError
        If it breaks that rule.
    """
    expected = "1 to 64 lower case letters, digits, '.', '_' and '-', first a letter or digit"
    match("name", name, MODEL_NAME, expected)


def check_version(version: str) -> None:
    """Check a model's version: semantic version 2.0.0 (semver.org) of at most 64 characters.

    Raises
    ------
    ValueError
        If it is longer or not a semantic version.
    """
    if len(version) > MAX_VERSION_CHARS:
        raise ValueError(f"version: expected at most {MAX_VERSION_CHARS} characters, got {len(version)}")
    match("version", version, SEMVER, "a semantic version such as 1.0.0")


def check_security_counter(counter: int) -> None:
    """Check a security counter: 0 to 2^63 - 1.

    Raises
    ------
    ValueError
        If it is out of that range.
    """
    within("security_counter", counter, 0, MAX_SECURITY_COUNTER)


def check_compatible(compatible: Sequence[str]) -> None:
    """Check the device types that a bundle is for: 1 to 64 strings such as `raspberrypi,4-model-b`.

    Each has 1 to 128 of `A-Z`, `a-z`, `0-9` and `,._+-`, and begins with a letter or a digit.

    Raises
    ------
    ValueError
        If there are none or too many, or one breaks that rule.
    """
    if not 1 <= len(compatible) <= MAX_COMPATIBLE:
        raise ValueError(f"compatible: expected 1 to {MAX_COMPATIBLE} device types, got {len(compatible)}")
    for device_type in compatible:
        match("compatible", device_type, COMPATIBLE, "a device type such as raspberrypi,4-model-b")


def check_sha256(name: str, value: str) -> None:
    """Check a SHA-256 in hexadecimal; raises ValueError."""
    match(name, value, SHA256, "64 lower case hexadecimal digits")


def format_digest(hexadecimal: str) -> str:
    """Return `sha256:<hex>`."""
    return _DIGEST_PREFIX + hexadecimal


def hex_digest(digest: str) -> str:
    """Return the hexadecimal part of `sha256:<hex>`.

    Raises
    ------
    ValueError
        If it is not a digest: the result is used in paths.
    """
    hexadecimal = digest.removeprefix(_DIGEST_PREFIX)
    if hexadecimal == digest or not SHA256.fullmatch(hexadecimal):
        raise ValueError(f"expected sha256: and 64 hex digits, got {digest[:80]!r}")
    return hexadecimal
