"""Typical networks: generated from their architectures, or real ones from the folder EDGEBUNDLE_MODELS."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest

from benchmarks.architectures import generate


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of slim-320, RFB-320, yunet_n_320, mnist and two photographs, from EDGEBUNDLE_MODELS."""
    folder = os.environ.get("EDGEBUNDLE_MODELS")
    if not folder:
        pytest.skip("EDGEBUNDLE_MODELS is not set to a folder of real models")
    return Path(folder)


@pytest.fixture(scope="session")
def resnet50_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pre-activation ResNet-50 of the tutorials, with a symbolic batch."""
    path = tmp_path_factory.mktemp("resnet") / "resnet50-v2-7.onnx"
    onnx.save(generate("resnet50-v2"), path)
    return path


@pytest.fixture(scope="session")
def resnet18(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resnet") / "resnet18.onnx"
    onnx.save(generate("resnet18"), path)
    return path
