"""Buckets: the sizes at which a model with changing dimensions was compiled.

A *dimension* has a name, bounds, and the sizes of its graphs. A *bucket* is one graph: a size for
each dimension. A request has any size within the bounds; it is computed by the smallest bucket that holds it:
its inputs are padded by the declared rules, and the outputs are cut to the sizes that the model itself would
have given. Promises that every rule fits the model's tensors and that all numbers are bounded. Leaves the
arrays to `agent.runtime.bucketed_module`.

The compiler has compared both with the reference: a model whose answer changes if its input is padded has no
buckets between its exact sizes (docs/decisions/0038-shapes-that-change.md).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.bundle.tensor_spec import MAX_DIMENSIONS as MAX_RANK
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError

# A batch and a length, or the sides of a picture, and one to spare.
MAX_DIMENSIONS: Final = 4
# Each is a member of the bundle, which has at most 64, and is set up when the model is loaded.
MAX_BUCKETS: Final = 32
# More than any tensor may have elements.
MAX_SIZE: Final = 1 << 31
# Axes that change: of each of 1024 tensors, some.
_MAX_AXES: Final = 4096
_SYMBOL: Final = re.compile(r"[ -:<-~]{1,64}")

CONSTANT: Final = "constant"
EDGE: Final = "edge"


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension that changes from request to request.

    Attributes
    ----------
    name
        1 to 64 printable ASCII characters without a semicolon, such as `sequence`.
    low, high
        Its bounds, both included; `low` is at least 1.
    sizes
        The sizes of its buckets, in increasing order; the last is `high`.
    """

    name: str
    low: int
    high: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _SYMBOL.fullmatch(self.name):
            raise ValueError(
                f"name: expected 1 to 64 printable ASCII characters without ';', got {self.name!r:.80}"
            )
        if not 1 <= self.low <= self.high <= MAX_SIZE:
            raise ValueError(f"expected 1 <= low <= high <= {MAX_SIZE}, got {self.low} and {self.high}")
        if not 1 <= len(self.sizes) <= MAX_BUCKETS:
            raise ValueError(f"sizes: expected 1 to {MAX_BUCKETS}, got {len(self.sizes)}")
        ascending = all(a < b for a, b in itertools.pairwise(self.sizes))
        if not ascending or self.sizes[0] < self.low or self.sizes[-1] != self.high:
            raise ValueError(
                f"sizes: expected increasing sizes from {self.low} to {self.high}, got {self.sizes!s:.80}"
            )

    def __str__(self) -> str:
        return f"{self.name}={self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class InputAxis:
    """An axis of an input that changes, and how it is padded.

    Attributes
    ----------
    tensor, axis
        The input's name, and the axis, from 0.
    dimension
        The dimension that the axis follows.
    pad
        `constant`: what is added has the value `value`. `edge`: it repeats the last element of the axis.
    value
        The constant, a number that the input's datatype has; 0.0 with `edge`.
    """

    tensor: str
    axis: int
    dimension: str
    pad: str = CONSTANT
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.pad not in (CONSTANT, EDGE):
            raise ValueError(f"pad: expected {CONSTANT} or {EDGE}, got {self.pad!r:.80}")
        if self.pad == EDGE and self.value:
            raise ValueError(f"value: expected 0.0 with {EDGE}, got {self.value}")


@dataclass(frozen=True, slots=True)
class OutputAxis:
    """An axis of an output that changes: `(size + add) // divide * multiply + offset`.

    Attributes
    ----------
    tensor, axis
        The output's name, and the axis, from 0.
    dimension
        The dimension that the axis follows; its size is that of the request.
    multiply, add, divide, offset
        The rule; `divide` and `multiply` are at least 1.
    """

    tensor: str
    axis: int
    dimension: str
    multiply: int = 1
    add: int = 0
    divide: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.multiply <= MAX_SIZE or not 1 <= self.divide <= MAX_SIZE:
            raise ValueError(
                f"expected multiply and divide from 1 to {MAX_SIZE}, got {self.multiply} and {self.divide}"
            )
        if max(abs(self.add), abs(self.offset)) > MAX_SIZE:
            raise ValueError(f"expected add and offset up to {MAX_SIZE}, got {self.add} and {self.offset}")

    def __call__(self, size: int) -> int:
        """Return the axis's size in the answer to a request of this size."""
        return max(0, (size + self.add) // self.divide * self.multiply + self.offset)


@dataclass(frozen=True, slots=True)
class Buckets:
    """The dimensions of a model that change, and what follows them.

    Buckets are numbered in the order of `itertools.product` over the dimensions' sizes, so that the last one
    is the largest. Its graph is `mod.json`; that of bucket K is `buckets/KK.json`.

    Attributes
    ----------
    dimensions
        1 to 4, with different names.
    inputs, outputs
        The axes that follow them. Each dimension has an axis of an input.
    batch
        The dimension whose parts are requests of their own: requests that wait may be computed together, one
        after the other along it. It is the first axis of every input and output. None if there is none.
    """

    dimensions: tuple[Dimension, ...]
    inputs: tuple[InputAxis, ...]
    outputs: tuple[OutputAxis, ...]
    batch: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.dimensions) <= MAX_DIMENSIONS:
            raise ValueError(f"expected 1 to {MAX_DIMENSIONS} dimensions, got {len(self.dimensions)}")
        names = [dimension.name for dimension in self.dimensions]
        if len(set(names)) != len(names):
            raise ValueError("two dimensions have the same name")
        if self.count > MAX_BUCKETS:
            raise ValueError(f"expected at most {MAX_BUCKETS} buckets, got {self.count}")
        axes: tuple[InputAxis | OutputAxis, ...]
        for axes in (self.inputs, self.outputs):
            if len(axes) > _MAX_AXES or len({(each.tensor, each.axis) for each in axes}) != len(axes):
                raise ValueError(f"expected at most {_MAX_AXES} different axes, got a duplicate or more")
            for each in axes:
                if each.dimension not in names or not 0 <= each.axis < MAX_RANK:
                    raise ValueError(
                        f"axis {each.axis} of {each.tensor!r:.80} follows {each.dimension!r:.80}, "
                        f"expected an axis below {MAX_RANK} and one of {', '.join(names)}"
                    )
        if missing := [name for name in names if name not in {each.dimension for each in self.inputs}]:
            raise ValueError(f"no input has the dimension {missing[0]}")
        if self.batch is not None and self.batch not in names:
            raise ValueError(f"batch: expected one of {', '.join(names)}, got {self.batch!r:.80}")

    def check(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Check that every rule fits a model's tensors, whose shapes are those of the largest bucket.

        Raises
        ------
        ValueError
            If a tensor or axis does not exist, a shape differs from the rule, or a datatype does not have a
            padding value.
        """
        high = {dimension.name: dimension.high for dimension in self.dimensions}
        specs = {spec.name: spec for spec in inputs}
        for each in self.inputs:
            spec = _axis_of(specs, "input", each)
            if spec.shape[each.axis] != high[each.dimension]:
                raise ValueError(
                    f"input {spec} at axis {each.axis}: expected {high[each.dimension]}, "
                    f"the largest {each.dimension}"
                )
            if not _has_value(spec, each.value):
                raise ValueError(f"input {spec}: {each.value} is not a value of {spec.datatype}")
        specs = {spec.name: spec for spec in outputs}
        for rule in self.outputs:
            spec = _axis_of(specs, "output", rule)
            if spec.shape[rule.axis] != rule(high[rule.dimension]):
                raise ValueError(
                    f"output {spec} at axis {rule.axis}: expected {rule(high[rule.dimension])}, "
                    f"got {spec.shape[rule.axis]}"
                )
        if self.batch is not None:
            first = {e.tensor for e in self.inputs if e.axis == 0 and e.dimension == self.batch}
            first_out = {r.tensor for r in self.outputs if r.axis == 0 and r.dimension == self.batch}
            whole = all(r.multiply == r.divide == 1 and r.add == r.offset == 0 for r in self._batches())
            if first != {s.name for s in inputs} or first_out != {s.name for s in outputs} or not whole:
                raise ValueError(f"batch: expected {self.batch} as the first axis of every input and output")

    def _batches(self) -> list[OutputAxis]:
        return [rule for rule in self.outputs if rule.dimension == self.batch and rule.axis == 0]

    @property
    def count(self) -> int:
        """Number of buckets."""
        return math.prod(len(dimension.sizes) for dimension in self.dimensions)

    def sizes(self) -> Iterator[tuple[int, ...]]:
        """Yield the sizes of each bucket, in the order of `dimensions`."""
        return itertools.product(*(dimension.sizes for dimension in self.dimensions))

    def members(self) -> tuple[str, ...]:
        """Return the names of the buckets' graphs in the bundle."""
        return (*(member_of(index) for index in range(self.count - 1)), "mod.json")

    def smallest_for(self, sizes: Sequence[int]) -> int:
        """Return the bucket for a request of these sizes, which are within the bounds."""
        index = 0
        for dimension, size in zip(self.dimensions, sizes, strict=True):
            place = next(i for i, each in enumerate(dimension.sizes) if each >= size)
            index = index * len(dimension.sizes) + place
        return index

    def input_shape(self, spec: TensorSpec, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an input at some sizes."""
        by_name = self._named(sizes)
        shape = list(spec.shape)
        for each in self.inputs:
            if each.tensor == spec.name:
                shape[each.axis] = by_name[each.dimension]
        return tuple(shape)

    def output_shape(self, spec: TensorSpec, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an output at some sizes."""
        by_name = self._named(sizes)
        shape = list(spec.shape)
        for rule in self.outputs:
            if rule.tensor == spec.name:
                shape[rule.axis] = rule(by_name[rule.dimension])
        return tuple(shape)

    def smallest(
        self, specs: Sequence[TensorSpec], shape: Callable[[TensorSpec, Sequence[int]], tuple[int, ...]]
    ) -> tuple[TensorSpec, ...]:
        """Return tensors as the smallest request has them; `shape` is `input_shape` or `output_shape`."""
        return tuple(TensorSpec(spec.name, spec.datatype, shape(spec, self.lowest)) for spec in specs)

    @property
    def lowest(self) -> tuple[int, ...]:
        """The smallest sizes of a request."""
        return tuple(dimension.low for dimension in self.dimensions)

    def sizes_of(
        self, shapes: Mapping[str, tuple[int, ...]], inputs: Mapping[str, TensorSpec]
    ) -> tuple[int, ...]:
        """Return the sizes of a request.

        Parameters
        ----------
        shapes
            The shapes of its inputs by name. A dimension of which it has no input takes its lowest size.
        inputs
            The model's inputs by name, which `shapes` has or a part of them.

        Raises
        ------
        InputError
            If a size is out of its bounds, two axes of one dimension have different sizes, or a rank differs.
        """
        found: dict[str, tuple[int, str]] = {}
        by_name = {dimension.name: dimension for dimension in self.dimensions}
        for each in self.inputs:
            if each.tensor not in shapes:
                continue
            shape, spec = shapes[each.tensor], inputs[each.tensor]
            if len(shape) != len(spec.shape):
                raise InputError(
                    f"input {spec.name!r} expects {spec.datatype}{self.describe(spec)}, got {_shown(shape)}"
                )
            dimension, size = by_name[each.dimension], shape[each.axis]
            if not dimension.low <= size <= dimension.high:
                raise InputError(
                    f"input {spec.name!r} expects {spec.datatype}{self.describe(spec)}, got {_shown(shape)}: "
                    f"{dimension.name} must be from {dimension.low} to {dimension.high}"
                )
            known, source = found.setdefault(dimension.name, (size, spec.name))
            if known != size:
                raise InputError(
                    f"expected one size of {dimension.name}, got {known} in input {source!r} "
                    f"and {size} in {spec.name!r}"
                )
        return tuple(found.get(each.name, (each.low, ""))[0] for each in self.dimensions)

    def shapes_of_bytes(self, nbytes: int, inputs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of inputs of which only the number of bytes is known, that of all together.

        Raises
        ------
        InputError
            If the bytes do not tell the sizes, because several axes change, or no size has so many.
        """
        low = {name: self.input_shape(spec, self.lowest) for name, spec in inputs.items()}
        changing = [each for each in self.inputs if each.tensor in inputs]
        if len(self.dimensions) > 1 or len({each.tensor for each in changing}) != len(changing):
            raise InputError(
                "expected a user property `tensor` for each input, got none",
                hint="several dimensions change, and the number of bytes does not tell their sizes",
            )
        sizes = {name: math.prod(shape) * inputs[name].itemsize for name, shape in low.items()}
        smallest, each_more = self.dimensions[0].low, 0
        for axis in changing:
            each_more += sizes[axis.tensor] // smallest
        more, rest = divmod(nbytes - sum(sizes.values()), max(each_more, 1))
        size = smallest + more
        if rest or not smallest <= size <= self.dimensions[0].high:
            described = ", ".join(f"{name} {self.describe(spec)}" for name, spec in inputs.items())
            raise InputError(f"expected the bytes of {described:.200}, got {nbytes} bytes")
        return {name: self.input_shape(spec, (size,)) for name, spec in inputs.items()}

    def describe(self, spec: TensorSpec) -> str:
        """Return a tensor's shape as messages show it, such as `[1,sequence=1..512]`.

        An output's axis that is not as large as its dimension shows its own smallest and largest size.
        """
        bounds = {dimension.name: dimension for dimension in self.dimensions}
        axes = {each.axis: str(bounds[each.dimension]) for each in self.inputs if each.tensor == spec.name}
        for rule in self.outputs:
            if rule.tensor == spec.name:
                dimension = bounds[rule.dimension]
                low, high = rule(dimension.low), rule(dimension.high)
                is_whole = (low, high) == (dimension.low, dimension.high)
                axes[rule.axis] = str(dimension) if is_whole else f"{low}..{high}"
        return f"[{','.join(axes.get(axis, str(size)) for axis, size in enumerate(spec.shape))}]"

    def _named(self, sizes: Sequence[int]) -> dict[str, int]:
        return {dimension.name: size for dimension, size in zip(self.dimensions, sizes, strict=True)}


def member_of(index: int) -> str:
    """Return the name of a smaller bucket's graph in the bundle."""
    return f"buckets/{index:02}.json"


def _axis_of(specs: Mapping[str, TensorSpec], kind: str, each: InputAxis | OutputAxis) -> TensorSpec:
    spec = specs.get(each.tensor)
    if spec is None or each.axis >= len(spec.shape):
        raise ValueError(f"the model has no axis {each.axis} of {kind} {each.tensor!r:.80}")
    return spec


_INTEGERS: Final = re.compile(r"(U?)INT(\d+)")


def _has_value(spec: TensorSpec, value: float) -> bool:
    if spec.datatype == "BOOL":
        return value in (0.0, 1.0)
    match = _INTEGERS.fullmatch(spec.datatype)
    if match is None:
        return math.isfinite(value)
    bits = int(match[2])
    low, high = (0, (1 << bits) - 1) if match[1] else (-(1 << bits - 1), (1 << bits - 1) - 1)
    return value.is_integer() and low <= value <= high


def _shown(shape: Sequence[int]) -> str:
    """Return a request's shape, shortened: its numbers may have any length."""
    return f"[{','.join(str(size) if size < MAX_SIZE else 'huge' for size in shape[:MAX_RANK]):.80}]"
