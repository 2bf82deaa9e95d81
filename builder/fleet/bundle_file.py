"""A bundle's file, as a deployment needs it: its digest, its manifest, whether it is signed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from agent.bundle.archive import MANIFEST, SIGNATURE, read_index, read_member
from agent.bundle.manifest import Manifest
from agent.bundle.names import format_digest
from builder.errors import PackageError


@dataclass(frozen=True, slots=True)
class BundleFile:
    """What a bundle's file says about itself; nothing of it is verified.

    Attributes
    ----------
    manifest
        The manifest.
    digest
        `sha256:<hex>` of the file.
    size
        Of the file, in bytes.
    is_signed
        Whether it has a signature. Only the agent checks it.
    """

    manifest: Manifest
    digest: str
    size: int
    is_signed: bool

    @classmethod
    def read(cls, path: Path) -> BundleFile:
        """Read a file.

        Raises
        ------
        PackageError
            If it has no manifest.
        BundleError
            If it is not a bundle.
        OSError
            If it cannot be read.
        """
        with path.open("rb") as file:
            digest = format_digest(hashlib.file_digest(file, "sha256").hexdigest())
            size = file.seek(0, 2)
            members = {member.name: member for member in read_index(file.fileno())}
            if MANIFEST not in members:
                raise PackageError(
                    f"{path} has no {MANIFEST}", hint="give a file that `edgebundle compile` wrote"
                )
            manifest = Manifest.from_bytes(read_member(file.fileno(), members[MANIFEST]))
        return cls(manifest, digest, size, SIGNATURE in members)

    def require_signature(self, name: str) -> None:
        """Check that the bundle has a signature, so that an agent does not refuse it after the upload.

        Raises
        ------
        PackageError
            If it does not have one.
        """
        if not self.is_signed:
            raise PackageError(
                f"{name}: expected a signed bundle, got one without a signature",
                hint=f"edgebundle sign {name} --sign-key keys/signing.key",
            )
