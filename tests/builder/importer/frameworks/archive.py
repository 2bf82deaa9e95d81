"""Archives as `torch.export.save` and `torch.save` write them, without PyTorch."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any


def write_pt2(path: Path, *, expression: str = "", pickled: bool = False, kind: str = "models") -> Path:
    """Write an exported program: its members and their form are the real ones, its graph has no nodes."""
    constraints: dict[str, Any] = {expression: {"min_val": 1, "max_val": 8}} if expression else {}
    size: dict[str, Any] = {"as_int": 3} if not expression else {"as_expr": {"expr_str": expression}}
    graph = {
        "graph_module": {"sizes": [size]},
        "range_constraints": constraints,
        "schema_version": {"major": 8},
    }
    config = {"config": {"first.weight": {"path_name": "weight_0", "use_pickle": pickled}}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/weights/weight_0", bytes(64))
        archive.writestr("model/data/weights/model_weights_config.json", json.dumps(config))
        archive.writestr("model/archive_format", "pt2")
        if kind == "models":
            archive.writestr("model/models/model.json", json.dumps(graph))
        elif kind == "old":
            archive.writestr("serialized_exported_program.json", json.dumps(graph))
        elif kind == "aotinductor":
            archive.writestr("model/data/aotinductor/model/model.so", b"\x7fELF")
    return path


def write_pt(path: Path, content: object, *, script: bool = False) -> Path:
    """Write a zip archive as `torch.save` or `torch.jit.save` does."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr("model/data/0", bytes(16))
        if script:
            archive.writestr("model/code/__torch__.py", "class Model: ...")
    return path
