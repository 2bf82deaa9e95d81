"""Signed bundles for tests, made in memory without a compiler.

A test names only what differs from a good bundle:

    build()                                             # a good bundle, signed with KEY
    build(version="2.0.0", key=stranger)                # other fields of the manifest, another key
    build({**FILES, "mod.params": b"other weights"})    # other contents

To break a bundle after it was signed, change what `signed_members` returns, then `pack` it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.archive import MANIFEST, SIGNATURE, pack
from agent.bundle.keyring import Keyring
from agent.bundle.manifest import FileDigest, Manifest, Resources, Runtime, Samples, Target
from agent.bundle.provenance import Provenance
from agent.bundle.signature import make_signature
from agent.bundle.tensor_spec import TensorSpec
from agent.bundle.verify import VerifiedBundle, verify

# Signatures are deterministic (RFC 6979), so a fixed key gives the same bundle in every run.
KEY: Final = ec.derive_private_key(0x1F2E3D4C5B6A79880123456789ABCDEF, ec.SECP256R1())
KEYRING: Final = Keyring.of([KEY.public_key()])

# The members that every bundle has; nothing in them can be executed.
FILES: Final = MappingProxyType({"mod.json": b"{}", "mod.params": b"weights", "mod.so": b"\x7fELF code"})


def make_manifest(files: Mapping[str, bytes] = FILES, **changes: Any) -> Manifest:
    """Return the manifest of these members: a model from `x` to `y`, both FP32 (1, 4), for any x86-64 Linux.

    `changes` replaces fields of it.
    """
    manifest = Manifest(
        name="echo",
        version="1.0.0",
        security_counter=1,
        compatible=("linux-x86_64",),
        target=Target("x86_64-linux-gnu", "x86-64", ()),
        runtime=Runtime("0.27.0", "0.1.14", "graph", "tvm-ffi-0.1", "2.28"),
        inputs=(TensorSpec("x", "FP32", (1, 4)),),
        outputs=(TensorSpec("y", "FP32", (1, 4)),),
        preprocess=None,
        postprocess=None,
        samples=Samples(0, 1e-4, 1e-5),
        resources=Resources(1024, 16),
        files={name: FileDigest(sha256(data), len(data)) for name, data in files.items()},
        provenance=Provenance("0" * 64, "edgebundle 0.1.0"),
    )
    return replace(manifest, **changes)


def signed(
    members: Mapping[str, bytes], key: ec.EllipticCurvePrivateKey = KEY, *, name: str = "bundle"
) -> dict[str, bytes]:
    """Return these members with a model.sig over all of them; `name` is the name of its subject.

    The members need not belong together: tests sign a manifest of other files this way.
    """
    unsigned = {name: data for name, data in members.items() if name != SIGNATURE}
    digests = {name: sha256(data) for name, data in unsigned.items()}
    return {**unsigned, SIGNATURE: make_signature(digests, key, name=name)}


def signed_members(
    files: Mapping[str, bytes] = FILES, *, key: ec.EllipticCurvePrivateKey = KEY, **changes: Any
) -> dict[str, bytes]:
    """Return all members of a good bundle; `changes` replaces fields of its manifest."""
    return signed({**files, MANIFEST: make_manifest(files, **changes).to_bytes()}, key)


def build(
    files: Mapping[str, bytes] = FILES, *, key: ec.EllipticCurvePrivateKey = KEY, **changes: Any
) -> bytes:
    """Return a good bundle; `changes` replaces fields of its manifest."""
    return pack(signed_members(files, key=key, **changes))


def public_pem(key: ec.EllipticCurvePrivateKey = KEY) -> bytes:
    """Return the public half of a key, as a keyring's `.pub` file has it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def sha256(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Signer:
    """A new key, and a keyring folder that trusts only this key."""

    trust: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        self.trust.mkdir(exist_ok=True)
        (self.trust / "test.pub").write_bytes(public_pem(self.key))

    def packed(self, name: str = "echo", version: str = "1.0.0", **changes: Any) -> bytes:
        """Return a bundle, whose code differs with its version; `changes` replaces fields of its manifest."""
        graphs = () if changes.get("buckets") is None else changes["buckets"].members()
        files = {**FILES, "mod.so": b"\x7fELF " + version.encode(), **dict.fromkeys(graphs, b"{}")}
        return build(files, key=self.key, name=name, version=version, **changes)

    def bundle(self, name: str = "echo", version: str = "1.0.0", **changes: Any) -> VerifiedBundle:
        """Return that bundle as an agent holds it after verifying it."""
        descriptor = os.memfd_create("bundle")
        try:
            os.write(descriptor, self.packed(name, version, **changes))
            return verify(descriptor, Keyring.from_dir(self.trust))
        finally:
            os.close(descriptor)
