"""Typical networks: generated from their architectures, or real ones from the folder EDGEBUNDLE_MODELS."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from benchmarks.architectures import generate
from builder import Options, Package, compile, load

SharedFile = Callable[[str, Callable[[Path], None]], Path]
RealPackage = Callable[[str, str], Package]

# Width and height of the ResNets' pictures: all layers are there, and LLVM takes half as long as for 224.
SIZE = 64
PROCESSING: dict[str, dict[str, Any]] = {
    "slim-320": {"preprocess": "ultraface", "postprocess": "faces"},
    "RFB-320": {"preprocess": "ultraface", "postprocess": "faces"},
    "yunet_n_320": {"preprocess": "raw-bgr"},
}


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of slim-320, RFB-320, yunet_n_320, mnist and two photographs, from EDGEBUNDLE_MODELS."""
    folder = os.environ.get("EDGEBUNDLE_MODELS")
    if not folder:
        pytest.skip("EDGEBUNDLE_MODELS is not set to a folder of real models")
    return Path(folder)


@pytest.fixture(scope="session")
def resnet50_v2(shared_file: SharedFile) -> Path:
    """The pre-activation ResNet-50 of the tutorials, with a symbolic batch."""
    return shared_file("resnet50-v2-7.onnx", lambda path: onnx.save(generate("resnet50-v2", size=SIZE), path))


@pytest.fixture(scope="session")
def resnet18(shared_file: SharedFile) -> Path:
    return shared_file("resnet18.onnx", lambda path: onnx.save(generate("resnet18", size=SIZE), path))


@pytest.fixture(scope="session")
def resnet18_package(shared_file: SharedFile, resnet18: Path) -> Package:
    """ResNet-18, compiled for this machine from Python."""
    return Package.load(
        shared_file("resnet18.bundle", lambda path: compile(load(resnet18), target="llvm").save(path))
    )


@pytest.fixture(scope="session")
def real_package(shared_file: SharedFile, models: Path) -> RealPackage:
    """Compile one of the real models for a target; the host's bundles have what a photograph needs."""

    def get(name: str, target: str) -> Package:
        processing = PROCESSING.get(name, {}) if target == "host" else {}

        def write(path: Path) -> None:
            compile(models / f"{name}.onnx", target, Options(**processing)).save(path)

        return Package.load(shared_file(f"{name}-{target}.bundle", write))

    return get
