"""Change what a bundle declares without compiling: pre- and postprocess, labels, name, version, counter.

Promises the same kernels, weights and recorded samples, byte for byte. Samples are the model's own tensors,
so they stay right whatever happens before and after the model. The result is unsigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agent.bundle.processing import Postprocess
from agent.errors import MixAndMatchError
from builder.bundles.package import Package, digests
from builder.compiling import declarations
from builder.compiling.bucket_plan import check_declared
from builder.compiling.identity import Identity
from builder.compiling.labels import Labels, check_labels, read_named_labels
from builder.errors import ModelError

# In place of a declaration or of labels: the bundle then has none.
NONE: Final = "none"
_LABELS: Final = "labels.txt"


def repack(
    package: Package,
    *,
    identity: Identity | None = None,
    preprocess: str | None = None,
    postprocess: str | None = None,
    labels: Labels | None = None,
) -> Package:
    """Change what a bundle declares.

    Parameters
    ----------
    package
        The bundle.
    identity
        Its new name, version, counter and compatible devices; None in place of the name or the devices keeps
        them. None keeps all but the counter, which becomes the time of the build.
    preprocess, postprocess
        As in `builder.compile`; None keeps what the bundle declares, `"none"` removes it.
    labels
        As in `builder.compile`; None keeps those of the bundle, `"none"` removes them.

    Returns
    -------
    Package
        The new package, unsigned.

    Raises
    ------
    ModelError
        If a declaration cannot be used, or does not fit the model or the labels.
    MixAndMatchError
        If the bundle's files are not those of its manifest.
    """
    manifest = package.manifest
    if digests(package.members) != dict(manifest.files):
        raise MixAndMatchError(
            f"the manifest of {manifest.name} does not match its files", hint="compile the model again"
        )
    identity = identity or Identity(version=manifest.version)
    identity.check()
    before, after = manifest.preprocess, manifest.postprocess
    if preprocess is not None:
        before = None if preprocess == NONE else declarations.preprocess(preprocess, manifest.smallest_inputs)
    if postprocess is not None:
        after = (
            None
            if postprocess == NONE
            else declarations.postprocess(postprocess, manifest.smallest_outputs, manifest.smallest_inputs)
        )
    if manifest.buckets is not None:
        check_declared(manifest.buckets, before, after)
    members = _with_labels(package, labels, after)
    changes: Mapping[str, Any] = {
        "name": identity.name or manifest.name,
        "version": identity.version,
        "security_counter": identity.counter(),
        "compatible": tuple(identity.compatible or manifest.compatible),
        "preprocess": before,
        "postprocess": after,
        "files": digests(members),
    }
    try:
        return Package(replace(manifest, **changes), members, uncovered=package.uncovered)
    except ValueError as error:
        raise ModelError(f"the bundle cannot be described: {error}") from error


def _with_labels(package: Package, labels: Labels | None, after: Postprocess | None) -> dict[str, bytes]:
    members = dict(package.members)
    old = members.pop(_LABELS, b"")
    outputs = package.manifest.smallest_outputs
    lines: bytes | None
    if labels is None and old:
        try:
            kept = check_labels(old.decode().splitlines(), outputs, after, "the bundle's labels")
        except ModelError as error:
            raise ModelError(str(error), hint="add --labels FILE, or --labels none") from error
        lines = ("\n".join(kept) + "\n").encode()
    else:
        lines = read_named_labels(None if labels == NONE else labels, outputs, after)
    return members if lines is None else {**members, _LABELS: lines}
