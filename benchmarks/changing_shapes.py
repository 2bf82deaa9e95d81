"""What shapes that change and masked tokens cost, by exact counts of executed steps.

A layer of BERT is compiled for an x86-64 core with AVX2: once with bounds, and again for each exact length. A
request is counted under qemu from its payload to that of its answer: decoding, padding, kernels, cutting,
encoding. A step is an instruction or an access to memory, as in `benchmarks.guard`. A busy machine does not
change the counts.

    python -m benchmarks.changing_shapes
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx

from benchmarks.architectures.bert import bert
from benchmarks.instructions.emulator import marks_on_this_machine
from benchmarks.requirements import RequirementError

if TYPE_CHECKING:
    from builder.bundles.package import Package

TARGET: Final = "x86-64-v3"
VOCABULARY: Final = 200
LENGTHS: Final = (16, 64, 128)
# At a bucket's edge: its own length, and one token less.
EDGES: Final = tuple(length - less for length in LENGTHS for less in (0, 1))
MASKED: Final = (16, 64, 115)
# Over the bundle of the exact length, and over the same request without masked tokens.
WORST_EDGE: Final = 1.10
WORST_MASKED: Final = 1.02

Arrays = Mapping[str, np.ndarray[Any, Any]]


def encoder(hidden: int = 192, heads: int = 4) -> onnx.ModelProto:
    """Return one layer of BERT, with embeddings and mask."""
    return bert(0, layers=1, hidden=hidden, heads=heads, vocabulary=VOCABULARY, positions=LENGTHS[-1])


def tokens(length: int, real: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of a request, of whose tokens the first `real` are not masked; all by default."""
    mask = np.zeros((1, length), np.int64)
    mask[:, : length if real is None else real] = 1
    ids = np.random.default_rng(length).integers(1, VOCABULARY, (1, length))
    return {
        "input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)
    }  # fmt: skip


def compiled(path: Path, lengths: Sequence[int]) -> Package:
    """Compile a model for one length, or with bounds from 1 to the last of several, which are its buckets."""
    from builder import Options
    from builder import compile as compile_model

    if len(lengths) == 1:
        shapes = dict.fromkeys(tokens(1), (1, lengths[0]))
        return compile_model(path, TARGET, Options(input_shapes=shapes))
    bounds = dict.fromkeys(tokens(1), (1, f"length=1..{lengths[-1]}"))
    return compile_model(path, TARGET, Options(input_shapes=bounds, buckets={"length": lengths}))


def prepare(package: Package, requests: Sequence[Arrays], folder: Path) -> Path:
    """Write a bundle and requests for it into a new `folder`, which the guest reads; return the folder."""
    folder.mkdir()
    for name, data in package.members.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_bytes(package.manifest.to_bytes())
    inputs = {f"{k}/{name}": array for k, each in enumerate(requests) for name, array in each.items()}
    np.savez(folder / "requests.npz", allow_pickle=False, **inputs)
    return folder


def count(places: Sequence[Path]) -> list[int]:
    """Return the steps of each request in prepared folders, in one run of the emulator.

    Raises
    ------
    RequirementError
        If qemu or gcc is missing.
    """
    marks = marks_on_this_machine("requests.py", "edgebundle", places)
    return [after - before for before, after in zip(marks[::2], marks[1::2], strict=True)]


def edge_costs(
    model: onnx.ModelProto, folder: Path, buckets: Sequence[int] = LENGTHS, lengths: Sequence[int] = EDGES
) -> dict[int, float]:
    """Return for each length the steps of its request over those of the bundle of the exact length."""
    path = folder / "model.onnx"
    onnx.save(model, str(path))
    bounded = prepare(compiled(path, buckets), [tokens(length) for length in lengths], folder / "bounded")
    exact = [
        prepare(compiled(path, [length]), [tokens(length)], folder / f"exact-{length}") for length in lengths
    ]
    steps = count([bounded, *exact])
    return {
        length: ours / theirs
        for length, ours, theirs in zip(lengths, steps[: len(lengths)], steps[len(lengths) :], strict=True)
    }


def masked_costs(
    model: onnx.ModelProto, folder: Path, length: int = LENGTHS[-1], real: Sequence[int] = MASKED
) -> dict[int, float]:
    """Return for each number of real tokens the steps of its request over those without masked tokens."""
    path = folder / "model.onnx"
    onnx.save(model, str(path))
    requests = [tokens(length), *(tokens(length, each) for each in real)]
    whole, *masked = count([prepare(compiled(path, [length]), requests, folder / "masked")])
    return {each: steps / whole for each, steps in zip(real, masked, strict=True)}


def main() -> int:
    """Count all requests, and print them; return the exit status: 1 if one is above its limit."""
    try:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            edges = edge_costs(encoder(), Path(first))
            # As wide as BERT-base.
            masked = masked_costs(encoder(768, 12), Path(second))
    except RequirementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for length, cost in edges.items():
        print(f"{cost:.3f} {length} tokens in buckets, over the exact length")
    for real, cost in masked.items():
        print(f"{cost:.3f} {real} real tokens of {LENGTHS[-1]}, over all real")
    return int(max(edges.values()) > WORST_EDGE or max(masked.values()) > WORST_MASKED)


if __name__ == "__main__":
    sys.exit(main())
