"""A tree ensemble as arrays, and as one call in a Relax module.

The importer promises a forest: every child exists, every node has one parent or is a root, and
every leaf has a row of values. So a walk from a root ends at a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from builder.calls.packed import packed_name

if TYPE_CHECKING:  # bundles are repacked without the compiler
    from tvm import relax
    from tvm.ir import Call

Ints = NDArray[np.int32]
Floats = NDArray[np.floating[Any]]

# What makes a test true: a set of these. Complementing a set exchanges the children.
LESS: Final = 1
EQUAL: Final = 2
GREATER: Final = 4
NAN: Final = 8
MEMBER: Final = 16
AGGREGATES: Final = ("AVERAGE", "SUM", "MIN", "MAX")

# A boosted tree has ten levels, a random forest's fifty; a longer path is a list.
MAX_DEPTH: Final = 4096
_PREFIX: Final = "edge.trees"


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Trees over the features of a sample.

    Attributes
    ----------
    roots
        The root of each tree, `[trees]`, in the order in which their leaves are added.
    feature, tests, true, false
        For each node, `[nodes]`: the feature, the set of outcomes that lead to the child `true`, and the
        children. A leaf has no tests and is its own children.
    threshold
        What the feature is compared with, `[nodes]`, float32 or float64: the type of the comparison, and of
        the sums.
    row
        For a leaf its row in `values`, for a test of membership its place in `sets`, else 0; `[nodes]`.
    values
        The numbers of each leaf, `[leaves, targets]`, of the type of `threshold`. With `MIN` and `MAX`, a
        target that a leaf says nothing about has infinity.
    sets
        The members of each test of membership: a count of words, then that many words of 32 bits, of which
        each is a category.
    aggregate
        One of `AGGREGATES`.
    """

    roots: Ints
    feature: Ints
    tests: NDArray[np.uint8]
    true: Ints
    false: Ints
    threshold: Floats
    row: Ints
    values: Floats
    sets: Ints
    aggregate: str

    @property
    def targets(self) -> int:
        """How many numbers the ensemble computes for a sample."""
        return int(self.values.shape[1])

    def depth(self) -> int:
        """Return the number of tests on the longest path.

        Raises
        ------
        ValueError
            If it is longer than `MAX_DEPTH`.
        """
        return len(list(self._levels())) - 1

    def reached(self) -> int:
        """Return how many nodes there are on paths from the roots; a shared one counts each time."""
        return sum(level.size for level in self._levels())

    def _levels(self) -> Iterator[Ints]:
        """Iterate over the nodes that are 0, 1, 2 ... tests below a root."""
        level = self.roots
        for _ in range(MAX_DEPTH + 1):
            yield level
            level = level[self.tests[level] != 0]
            if not level.size:
                return
            level = np.concatenate([self.true[level], self.false[level]])
        raise ValueError(f"expected trees with at most {MAX_DEPTH} tests on a path")


@dataclass(frozen=True, slots=True)
class EnsembleCall:
    """An ensemble in a module.

    Attributes
    ----------
    samples
        `[samples, features]`, of the type of the ensemble's thresholds.
    ensemble
        The trees.
    """

    samples: relax.Expr
    ensemble: Ensemble

    NAMES: ClassVar[tuple[str, ...]] = tuple(f"{_PREFIX}.{aggregate}" for aggregate in AGGREGATES)

    @classmethod
    def of(cls, call: Call) -> EnsembleCall | None:
        """Return the ensemble that a call stands for, None if it is any other call."""
        name = packed_name(call)
        if name not in cls.NAMES:
            return None
        samples, *constants = call.args[1].fields
        roots, nodes, tests, threshold, values, sets = (constant.value.numpy() for constant in constants)
        feature, true, false, row = nodes
        aggregate = name.rsplit(".", 1)[1]
        return cls(
            samples, Ensemble(roots, feature, tests, true, false, threshold, row, values, sets, aggregate)
        )

    def emit(self, bb: relax.BlockBuilder) -> relax.Expr:
        """Emit the call; it returns what the leaves add up to, `[samples, targets]`, without a transform."""
        from tvm import relax

        ensemble = self.ensemble
        arrays = (
            ensemble.roots,
            np.stack([ensemble.feature, ensemble.true, ensemble.false, ensemble.row]),
            ensemble.tests,
            ensemble.threshold,
            ensemble.values,
            ensemble.sets,
        )
        arguments = relax.Tuple([self.samples, *(relax.const(array, str(array.dtype)) for array in arrays)])
        shape = (int(self.samples.ty.shape[0]), ensemble.targets)
        result = relax.TensorType(shape, str(ensemble.threshold.dtype))
        return bb.emit(relax.call_dps_packed(f"{_PREFIX}.{ensemble.aggregate}", arguments, result))
