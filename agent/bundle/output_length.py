"""An output whose length along an axis changes from answer to answer.

Such an output is computed in full length, the capacity, and cut before the answer is sent. Another output of
the graph holds its length; no answer contains that output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.bundle.tensor_spec import MAX_DIMENSIONS, TensorSpec


@dataclass(frozen=True, slots=True)
class OutputLength:
    """An axis of an output, and the output that holds its length.

    Attributes
    ----------
    output
        The output's name; its shape has the capacity of the axis.
    axis
        The axis, from 0.
    count
        Name of the output that holds the length, INT64 of shape [1].
    """

    output: str
    axis: int
    count: str

    def __post_init__(self) -> None:
        if not 0 <= self.axis < MAX_DIMENSIONS:
            raise ValueError(f"axis: expected 0 to {MAX_DIMENSIONS - 1}, got {self.axis}")


def check_lengths(
    lengths: Sequence[OutputLength], outputs: Sequence[TensorSpec], processed: frozenset[str]
) -> None:
    """Check that lengths fit the outputs of a graph, of which a postprocess reads `processed`.

    An output that does not exist or does not fit raises ValueError.
    """
    specs = {spec.name: spec for spec in outputs}
    if not lengths:
        raise ValueError("lengths: expected at least one, got none")
    if len({(length.output, length.axis) for length in lengths}) != len(lengths):
        raise ValueError("lengths: expected each axis once, got a duplicate")
    counts = {length.count for length in lengths}
    for length in lengths:
        for name in (length.output, length.count):
            if name not in specs:
                raise ValueError(f"lengths: a length is for output {name!r:.80}, which does not exist")
        if length.output in counts:
            raise ValueError(f"lengths: output {length.output!r:.80} is a length itself")
        if length.axis >= len(specs[length.output].shape):
            raise ValueError(f"lengths: output {length.output!r:.80} has no axis {length.axis}")
        count = specs[length.count]
        if (count.datatype, count.shape) != ("INT64", (1,)):
            raise ValueError(f"lengths: expected a length as INT64[1], got {str(count)!r:.120}")
    for name in sorted(counts & processed):
        raise ValueError(f"postprocess reads output {name!r:.80}, which is a length")


def answered(outputs: Sequence[TensorSpec], lengths: Sequence[OutputLength]) -> tuple[TensorSpec, ...]:
    """Return the outputs that answers contain: all but those that hold lengths."""
    counts = {length.count for length in lengths}
    return tuple(spec for spec in outputs if spec.name not in counts)


def shortest(smallest: Sequence[TensorSpec], lengths: Sequence[OutputLength]) -> tuple[tuple[int, ...], ...]:
    """Return the smallest shapes of outputs, whose computed lengths may be 0.

    Parameters
    ----------
    smallest
        The outputs as the answer to the smallest request has them, with their capacities.
    lengths
        The declared lengths.
    """
    changing = {(length.output, length.axis) for length in lengths}
    return tuple(
        tuple(0 if (spec.name, axis) in changing else size for axis, size in enumerate(spec.shape))
        for spec in smallest
    )
