"""A package: a compiled model in memory, and the bundle file that it is saved as and loaded from.

Saving is all or nothing. Loading here serves the workstation: it reads unsigned bundles too and verifies
nothing, which is why the device has its own way (`agent.bundle.verify`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.archive import MANIFEST, SIGNATURE, read_index, read_member, write_archive
from agent.bundle.manifest import FileDigest, Manifest
from agent.bundle.signature import make_signature
from agent.errors import EdgeError
from builder.errors import PackageError


@dataclass(frozen=True, slots=True)
class Package:
    """A compiled model.

    Attributes
    ----------
    manifest
        What it is and needs.
    members
        File name -> content, all but the manifest and the signature.
    signature
        `model.sig`, or None while it is unsigned.
    """

    manifest: Manifest
    members: Mapping[str, bytes]
    signature: bytes | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Package:
        """Read a bundle from a file, signed or not, without verifying it.

        Raises
        ------
        PackageError
            If the file cannot be read, or is no bundle.
        """
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise PackageError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            files = {member.name: read_member(fd, member) for member in read_index(fd)}
            manifest = Manifest.from_bytes(files.pop(MANIFEST))
        except (EdgeError, KeyError) as error:
            what = "it has no manifest.json" if isinstance(error, KeyError) else str(error)
            raise PackageError(
                f"{path}: expected a bundle: {what}", hint="make one with `edgebundle compile`"
            ) from error
        finally:
            os.close(fd)
        return cls(manifest, MappingProxyType(files), files.pop(SIGNATURE, None))

    def sign(self, key: ec.EllipticCurvePrivateKey) -> Package:
        """Return this package with a signature over all of it; equal input gives equal bytes."""
        files = {name: _sha256(data) for name, data in self.members.items()}
        files[MANIFEST] = _sha256(self.manifest.to_bytes())
        return replace(self, signature=make_signature(files, key, name=self.manifest.name))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bundle file: the whole of it or nothing.

        Raises
        ------
        PackageError
            If the file cannot be written.
        """
        members: dict[str, bytes | Path] = {**self.members, MANIFEST: self.manifest.to_bytes()}
        if self.signature is not None:
            members[SIGNATURE] = self.signature
        try:
            write_archive(path, members)
        except OSError as error:
            raise PackageError(f"{path}: cannot be written ({error.strerror})") from error


def digests(members: Mapping[str, bytes]) -> dict[str, FileDigest]:
    """Digest and size of each member, as the manifest lists them."""
    return {name: FileDigest(_sha256(data), len(data)) for name, data in members.items()}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
