"""Names, versions and digests that manifests, topics and desired documents share: one pattern for each.

Promises that no other module of the agent or the builder defines one of these patterns or limits. Leaves the
error messages to the readers (`manifest.check_model_name` and others).
"""

from __future__ import annotations

import re
from typing import Final

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
# SHA-256 in lower case hexadecimal.
SHA256: Final = re.compile(r"[0-9a-f]{64}")

_DIGEST_PREFIX: Final = "sha256:"


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
