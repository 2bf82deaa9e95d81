"""The sizes of a run of a model whose shapes change: from the user's inputs, or from `--input-shapes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from agent.bundle.graph import Graph
from agent.bundle.manifest import Manifest
from agent.bundle.params import index_params
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EdgeError
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.graph_executor import GraphModule
from agent.runtime.module import KernelModule
from agent.runtime.storage import Array
from builder.bundles.package import Package
from builder.errors import PackageError, ShapeError
from builder.spelling import did_you_mean

Shapes = Mapping[str, Sequence[int]]


def make_module(package: Package, kernels: KernelModule, make: type[GraphModule]) -> BucketedModule:
    """Set up the graphs of a package with buckets, and load its weights.

    Raises `PackageError` if the package's files do not fit its manifest.
    """
    manifest, members = package.manifest, package.members
    assert manifest.buckets is not None
    try:
        graphs = [Graph.from_json(members[name]) for name in manifest.buckets.members()]
        module = BucketedModule(manifest.buckets, manifest.inputs, manifest.outputs, graphs, kernels, make)
        module.load_params(members["mod.params"])
    except (EdgeError, KeyError) as error:
        raise PackageError(
            f"the bundle's graphs do not fit its manifest: {error}",
            hint="compile it again, or download it again",
        ) from error
    return module


def fit(package: Package, module: object, values: Mapping[str, Array], shapes: Shapes) -> list[TensorSpec]:
    """Return the inputs that a run takes, and choose its bucket if there are any.

    `values`: the inputs that the user gives, by name.
    `shapes`: input name -> shape, for inputs that are filled. Without both, a run has the largest sizes.
    Raises `ShapeError` if a size is out of its bounds, or shapes are given for a model whose shapes are
        fixed.
    """
    manifest = package.manifest
    names = [spec.name for spec in manifest.inputs]
    if unknown := [name for name in shapes if name not in names]:
        raise ShapeError(
            f"--input-shapes: expected inputs among {', '.join(names)}, got {unknown[0]!r:.80}",
            hint=did_you_mean(unknown[0], names, otherwise="see them with `edgebundle inspect BUNDLE`"),
        )
    if not isinstance(module, BucketedModule):
        for spec in manifest.inputs:
            if tuple(shapes.get(spec.name, spec.shape)) != spec.shape:
                raise ShapeError(
                    f"input '{spec.name}': expected {list(spec.shape)}, got {list(shapes[spec.name])}: "
                    "the bundle's shapes are fixed",
                    hint="compile it with bounds: edgebundle compile MODEL --input-shapes 'NAME:[1,1..512]'",
                )
        return list(manifest.inputs)
    known = {name: tuple(shape) for name, shape in shapes.items()}
    known |= {name: value.shape for name, value in values.items()}
    try:
        if known:
            module.fit(known)
        else:
            module.use(_largest(manifest))
        manifest.check_items(module.sizes)
    except EdgeError as error:
        raise ShapeError(
            str(error),
            hint=error.hint or "give sizes within the bounds that `edgebundle inspect BUNDLE` shows",
        ) from error
    return list(module.specs.values())


def _largest(manifest: Manifest) -> tuple[int, ...]:
    """Return the largest sizes that a run may have."""
    buckets = manifest.buckets
    assert buckets is not None
    single = buckets.batches if manifest.takes_one_item else frozenset()
    return tuple(each.low if each.name in single else each.high for each in buckets.dimensions)


def timed_bucket(package: Package, values: Mapping[str, Array], shapes: Shapes) -> Package:
    """Return the package with the graph that computes these inputs as its `mod.json`, for pages about it."""
    buckets = package.manifest.buckets
    if buckets is None:
        return package
    known = {name: tuple(shape) for name, shape in shapes.items()}
    known |= {name: value.shape for name, value in values.items()}
    specs = {spec.name: spec for spec in package.manifest.inputs}
    sizes = buckets.sizes_of(known, specs) if known else _largest(package.manifest)
    index = buckets.smallest_for(sizes)
    graph = package.members[buckets.members()[index]]
    return replace(package, members={**package.members, "mod.json": graph})


def recorded_input(package: Package, spec: TensorSpec) -> Array:
    """Return values of a recorded input, which are known to be in range, repeated to fill a shape.

    Raises `PackageError` if the bundle has no recorded input of this name.
    """
    raw = package.members.get("samples/inputs.params", b"")
    for entry in index_params(raw) if raw else ():
        if entry.spec.name == f"0/{spec.name}":
            flat = np.frombuffer(raw, entry.spec.dtype, int(np.prod(entry.spec.shape)), entry.offset)
            return np.resize(flat, spec.shape)
    raise PackageError(
        f"the bundle has no recorded input for {spec.name}", hint="give the input with --inputs"
    )
