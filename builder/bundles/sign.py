"""Sign a bundle that is there already: one that was compiled without a key, or signed by somebody else.

Promises that a bundle whose members do not match its own manifest is never signed. Leaves reading and writing
to `builder.bundles.package`.
"""

from __future__ import annotations

import os

from cryptography.hazmat.primitives.asymmetric import ec

from agent.errors import MixAndMatchError
from builder.bundles.package import Package, digests


def sign_bundle(
    source: str | os.PathLike[str], key: ec.EllipticCurvePrivateKey, output: str | os.PathLike[str]
) -> Package:
    """Write the bundle again with a signature by this key, which replaces the one it may have.

    Parameters
    ----------
    source
        A bundle, signed or not.
    key
        EC P-256.
    output
        Where the signed bundle goes; it may be the source itself.

    Raises
    ------
    PackageError
        If the source is no bundle, or one of the two files cannot be read or written.
    MixAndMatchError
        If its members are not those of its manifest.
    """
    package = Package.load(source)
    found = digests(package.members)
    declared = package.manifest.files
    wrong = sorted(name for name in declared.keys() | found.keys() if declared.get(name) != found.get(name))
    if wrong:
        raise MixAndMatchError(
            f"the manifest of {package.manifest.name} does not match {', '.join(wrong)}",
            hint="compile the model again: what does not match is not signed",
        )
    signed = package.sign(key)
    signed.save(output)
    return signed
