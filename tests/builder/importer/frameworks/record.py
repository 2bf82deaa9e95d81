"""Record what PyTorch answers about small models, for tests that run where it is not installed.

    .venv-frameworks/bin/python -m tests.builder.importer.frameworks.record

runs the real process of each model, and keeps its files in `vectors/`. Needs torch, onnxscript and torchao.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from builder.importer.frameworks.process import FrameworkProcess
from builder.importer.frameworks.pytorch import PYTORCH

VECTORS = Path(__file__).with_name("vectors")
FILES = ("model.onnx", "examples.npz", "outputs.npz")


def quantised(backend: str) -> Any:
    """A small network with a residual, quantised by PT2E for one of its backends."""
    import torch
    from torch import nn
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
            self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
            self.head = nn.Linear(16, 5)

        def forward(self, picture: Any) -> Any:
            x = torch.relu(self.first(picture))
            x = x + self.block(x)
            return {"logits": self.head(x.mean((2, 3)))}

    torch.manual_seed(0)
    inputs = (torch.randn(1, 3, 12, 12),)
    quantizer: Any
    if backend == "x86":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    else:
        from torchao.testing.pt2e._xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )

        quantizer = XNNPACKQuantizer()
        quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True))
    module = torch.export.export(Network().eval(), inputs, strict=True).module()
    prepared = prepare_pt2e(module, quantizer)
    for _ in range(3):
        prepared(torch.randn(1, 3, 12, 12))
    return torch.export.export(convert_pt2e(prepared), inputs)


def recurrent() -> Any:
    """An LSTM over an embedding, with a tuple of outputs and a mask."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 6)
            self.rnn = nn.LSTM(6, 4, batch_first=True)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, ids: Any, mask: Any) -> Any:
            every, (last, _) = self.rnn(self.table(ids) * mask[..., None])
            return every * self.scale, last

    torch.manual_seed(0)
    inputs = (torch.randint(0, 11, (1, 7)), torch.rand(1, 7))
    return torch.export.export(Network().eval(), inputs)


def record(name: str, program: Any) -> None:
    """Keep the files of one program."""
    import torch

    with FrameworkProcess(sys.executable, PYTORCH.program, "PyTorch", name) as process:
        torch.export.save(program, process.folder / "model.pt2")
        reply = process.ask("convert")
        shutil.copyfile(process.folder / "examples.npz", process.folder / "inputs.npz")
        process.ask("run")
        (VECTORS / name).mkdir(parents=True, exist_ok=True)
        for file in FILES:
            shutil.copyfile(process.folder / file, VECTORS / name / file)
        arrays: dict[str, Any] = dict(np.load(process.folder / "outputs.npz"))
        np.savez_compressed(VECTORS / name / "outputs.npz", **arrays)
        (VECTORS / name / "reply.json").write_text(json.dumps(reply) + "\n")


def main() -> None:
    """Record all."""
    for backend in ("x86", "xnnpack"):
        record(f"quantised_{backend}", quantised(backend))
    record("recurrent", recurrent())


if __name__ == "__main__":
    main()
