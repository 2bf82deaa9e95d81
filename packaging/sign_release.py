"""Write SHA256SUMS for the packages in a folder, and sign it.

    python packaging/sign_release.py --key release.key [-o dist]

The key is one that `edgebundle keygen` makes, and that no device trusts for bundles. The person who signs
names it; it is never kept here. docs/install.md has the command that verifies the signature, with OpenSSL.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from builder.bundles.key_files import read_private
from builder.errors import KeyFileError

PROJECT: Final = Path(__file__).resolve().parent.parent
SUMS: Final = "SHA256SUMS"
# What `make deb` and `make client` write.
_PATTERNS: Final = ("*.deb", "*.whl", "*.tgz", "*.cdx.json")


def sums(folder: Path) -> bytes:
    """Return the checksums of the packages in `folder`, as `sha256sum` writes and checks them."""
    found = sorted(path for pattern in _PATTERNS for path in folder.glob(pattern))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in found]
    return "".join(lines).encode()


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Sign the checksums of the packages in a folder.")
    parser.add_argument("--key", type=Path, required=True, help="private key, from edgebundle keygen")
    parser.add_argument("-o", "--output", type=Path, default=PROJECT / "dist", help="folder of the packages")
    arguments = parser.parse_args()
    stated = sums(arguments.output)
    if not stated:
        raise SystemExit(f"error: no packages in {arguments.output}\nhint: make deb client")
    try:
        key = read_private(arguments.key)
    except KeyFileError as error:
        raise SystemExit(f"error: {error}\nhint: {error.hint}") from None
    (arguments.output / SUMS).write_bytes(stated)
    signature = key.sign(stated, ec.ECDSA(hashes.SHA256()))
    (arguments.output / f"{SUMS}.sig").write_bytes(signature)
    print(arguments.output / SUMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
