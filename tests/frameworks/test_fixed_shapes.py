"""Shapes in onnx2torch's graphs are written out, for PyTorch and LiteRT in `make bench-arm`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from builder.importer.frameworks.interpreter import VARIABLE

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[2]
# A slice of what is reshaped, as ShuffleNet has it behind its shuffle, by shapes that are reshaped, too.
PROGRAM = """
import torch
from torch import fx, nn
from benchmarks.fixed_shapes import write_out

class OnnxReshape(nn.Module):
    def forward(self, x, shape):
        return x.reshape(tuple(int(each) for each in shape))

class OnnxSlice(nn.Module):
    def forward(self, x, starts, ends, axes):
        return x.narrow(int(axes[0]), int(starts[0]), int(ends[0]) - int(starts[0]))

class Shuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.reshape, self.slice = OnnxReshape(), OnnxSlice()
        for name, value in (("shape", [2, 3]), ("one", [[1]]), ("flat", [1]), ("end", [3])):
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x):
        start = self.reshape(self.one, self.flat)
        return self.slice(self.reshape(x, self.shape), start, self.end, start)

class Leaves(fx.Tracer):
    def is_leaf_module(self, m, name):
        return type(m).__name__.startswith("Onnx")

network = Shuffle()
traced = fx.GraphModule(network, Leaves().trace(network))
x = torch.arange(6.0)
expected = traced(x)
written = write_out(traced, (x,))
assert all(node.op != "call_module" for node in written.graph.nodes), written.graph
assert torch.equal(written(x), expected)
torch.export.export(written, (x,))
"""


def test_a_slice_of_what_was_reshaped() -> None:
    subprocess.run([os.environ[VARIABLE], "-c", PROGRAM], cwd=ROOT, check=True)
