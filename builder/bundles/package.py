"""A package: a compiled model in memory, and the bundle file that it is saved as and loaded from.

Promises that a file is written whole or not at all, and that a package whose files do not match its manifest
is never signed. Loading serves the workstation: it reads unsigned bundles too and verifies nothing. Devices
load with `agent.bundle.verify`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from agent.bundle.archive import MANIFEST, SIGNATURE, pack, read_index, read_member, write_archive
from agent.bundle.manifest import FileDigest, Manifest
from agent.bundle.signature import SigningKey, make_signature
from agent.errors import EdgeError, MixAndMatchError
from agent.reading import open_at_once
from builder.bundles.integer_work import IntegerWork
from builder.errors import OTHER_FOLDER, PackageError
from builder.importer.other_files import instead_of_bundle
from builder.importer.ultralytics_metadata import NOTHING_SAID, Exported
from builder.spelling import similar_file


@dataclass(frozen=True, slots=True)
class UncoveredKernel:
    """A kernel whose loops come from no design space, and which may therefore be slow.

    Attributes
    ----------
    name
        The kernel, such as `fused_sum_divide`.
    share
        Its calls' share of the network's work, from 0 to 1, as estimated for one core.
    """

    name: str
    share: float


Fate: TypeAlias = Literal["kernel", "folded", "no work", "unused"]


@dataclass(frozen=True, slots=True)
class NodeFate:
    """What became of one node of the model.

    Attributes
    ----------
    name, operator
        The node.
    fate
        `kernel`: kernels compute it, its own or those of the nodes that read it. `folded`: it depends on no
        input and was computed by the compiler. `no work`: its result is its input's memory. `unused`: no
        output depends on it.
    kernels
        The kernels that compute it, in the order in which they run.
    fused_with
        The other nodes that these kernels compute.
    """

    name: str
    operator: str
    fate: Fate
    kernels: tuple[str, ...] = ()
    fused_with: tuple[str, ...] = ()


class QuantisingReport(Protocol):
    """What quantising a model did and cost."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        ...

    def lines(self) -> list[str]:
        """Return it as text."""
        ...


@dataclass(frozen=True, slots=True)
class Package:
    """A compiled model.

    Attributes
    ----------
    manifest
        The model's name, version, tensors and requirements.
    members
        File name -> content, without the manifest and the signature.
    signature
        The content of `model.sig`, or None if it is not signed.
    uncovered
        The kernels without a design space, most work first. A bundle does not contain them, so they are
        empty in a package that was loaded.
    fallbacks
        One line for each rewrite or design space that failed; the model is right, and may be slower. Empty in
        a package that was loaded.
    nodes
        What became of each node of the model; empty in a package that was loaded.
    integers
        How much of a quantised model's work is done with integers; None for other models, and in a package
        that was loaded.
    exported
        What an export of Ultralytics says about itself; nothing in a package that was loaded.
    tried
        The model's outputs for the picture that the user gave; None without one, and in a package that was
        loaded.
    quantisation
        What quantising did and cost; None if the compilation did not quantise, and in a package that was
        loaded.
    """

    manifest: Manifest
    members: Mapping[str, bytes]
    signature: bytes | None = None
    uncovered: tuple[UncoveredKernel, ...] = ()
    nodes: tuple[NodeFate, ...] = ()
    integers: IntegerWork | None = None
    fallbacks: tuple[str, ...] = ()
    quantisation: QuantisingReport | None = None
    tried: Mapping[str, npt.NDArray[Any]] | None = None
    exported: Exported = NOTHING_SAID

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Package:
        """Read a bundle file, signed or not, without verifying it.

        Raises
        ------
        PackageError
            If the file cannot be read or is not a bundle.
        """
        try:
            fd = open_at_once(path)
        except OSError as error:
            raise PackageError(
                f"{path}: cannot be read ({error.strerror})", hint=similar_file(path)
            ) from error
        try:
            files = {member.name: read_member(fd, member) for member in read_index(fd)}
            manifest = Manifest.from_bytes(files.pop(MANIFEST))
        except (EdgeError, KeyError) as error:
            if (other := instead_of_bundle(path)) is not None:
                raise PackageError(f"{path}: expected a bundle, got {other.what}", hint=other.hint) from error
            reason = "it has no manifest.json" if isinstance(error, KeyError) else str(error)
            raise PackageError(
                f"{path}: expected a bundle: {reason}", hint="make one with `edgebundle compile`"
            ) from error
        finally:
            os.close(fd)
        return cls(manifest, MappingProxyType(files), files.pop(SIGNATURE, None))

    def nodes_of(self, kernel: str) -> tuple[str, ...]:
        """Return the nodes of the model that a kernel computes, as `Operator name`; empty after loading."""
        return tuple(f"{node.operator} {node.name}" for node in self.nodes if kernel in node.kernels)

    def sign(self, key: SigningKey) -> Package:
        """Return this package with a signature by an EC P-256 key; a key file gives equal bytes each time.

        Raises
        ------
        MixAndMatchError
            If the files are not those that the manifest lists.
        """
        found, declared = digests(self.members), self.manifest.files
        wrong = sorted(n for n in declared.keys() | found.keys() if declared.get(n) != found.get(n))
        if wrong:
            raise MixAndMatchError(
                f"the manifest of {self.manifest.name} does not match {', '.join(wrong)}",
                hint="compile the model again: a bundle that does not match its manifest is not signed",
            )
        files = {name: digest.sha256 for name, digest in found.items()}
        files[MANIFEST] = _sha256(self.manifest.to_bytes())
        return replace(self, signature=make_signature(files, key, name=self.manifest.name))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bundle file, whole or not at all.

        Raises
        ------
        PackageError
            If the file cannot be written.
        """
        try:
            write_archive(path, self._files())
        except OSError as error:
            raise PackageError(f"{path}: cannot be written ({error.strerror})", hint=OTHER_FOLDER) from error

    def to_bytes(self) -> bytes:
        """Return the bytes that `save` writes."""
        return pack(self._files())

    def _files(self) -> dict[str, bytes]:
        files = {**self.members, MANIFEST: self.manifest.to_bytes()}
        if self.signature is not None:
            files[SIGNATURE] = self.signature
        return files


def digests(members: Mapping[str, bytes]) -> dict[str, FileDigest]:
    """Digest and size of each member, as the manifest lists them."""
    return {name: FileDigest(_sha256(data), len(data)) for name, data in members.items()}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
