"""Runs the calls that classic models are imported to, one node and one round at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from builder.calls.trees import AGGREGATES, Ensemble
from tests.builder.importer.classic.forests import reference


def couple(r: np.ndarray) -> np.ndarray:
    """Algorithm 2 of Wu, Lin and Weng (2004) for one sample's pairs, in double precision."""
    k = len(r)
    r = r.astype("f8")
    q = -(r.T * r)
    np.fill_diagonal(q, [(r[np.arange(k) != i, i] ** 2).sum() for i in range(k)])
    p = np.full(k, 1 / k)
    for _ in range(100):
        if np.abs(q @ p - p @ q @ p).max() < 0.005 / k:
            break
        for i in range(k):
            p[i] += (p @ q @ p - q[i] @ p) / q[i, i]
            p /= p.sum()
    return p


def register() -> None:
    """Let TVM's virtual machine find the calls."""
    import tvm_ffi

    def trees(aggregate: str) -> Any:
        def run(*tensors: Any) -> None:
            found: list[Any] = [np.from_dlpack(tensor) for tensor in tensors]
            x, roots, nodes, tests, threshold, values, sets, out = found
            feature, true, false, row = nodes
            arrays = (roots, feature, tests, true, false, threshold, row, values, sets, aggregate)
            out[:] = reference(Ensemble(*arrays), x)

        return run

    def coupling(pairs: Any, out: Any) -> None:
        np.from_dlpack(out)[:] = np.stack([couple(one) for one in np.from_dlpack(pairs)])

    for aggregate in AGGREGATES:
        tvm_ffi.register_global_func(f"edge.trees.{aggregate}", trees(aggregate), override=True)
    tvm_ffi.register_global_func("edge.pairwise_coupling", coupling, override=True)
