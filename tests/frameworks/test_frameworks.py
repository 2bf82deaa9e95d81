"""Models of PyTorch, Keras and TensorFlow, read and run by the real ones (`make test-frameworks`)."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import compile, load
from builder.compiling.framework_parity import check_import
from builder.errors import BuildError, ModelError, UnsupportedOperatorError
from builder.importer.frameworks.interpreter import VARIABLE

pytestmark = pytest.mark.frameworks
MODELS = Path(__file__).with_name("models.py")
SharedFile = Callable[[str, Callable[[Path], None]], Path]


def write(kind: str, folder: Path) -> None:
    folder.mkdir()
    subprocess.run(
        [os.environ[VARIABLE], str(MODELS), kind, str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


@pytest.fixture
def pytorch(shared_file: SharedFile) -> Path:
    return shared_file("pytorch", lambda path: write("pytorch", path))


@pytest.fixture
def keras(shared_file: SharedFile) -> Path:
    return shared_file("keras", lambda path: write("keras", path))


def agrees(path: Path) -> str:
    """Compile a model; return what the comparison with its framework says."""
    lines: list[str] = []
    model = load(path)
    assert check_import(model) is not None
    compile(model, progress=lines.append)
    [line] = [line for line in lines if line.startswith("agrees with")]
    return line


@pytest.mark.parametrize(
    "name", ["mobilenet", "encoder", "recurrent", "yolo", "odd", "dynamic", "half", "bfloat16"]
)
def test_programs(pytorch: Path, name: str) -> None:
    assert "agrees with PyTorch" in agrees(pytorch / f"{name}.pt2")


@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_quantised_programs(pytorch: Path, name: str, backend: str) -> None:
    assert "quantised tensors agree" in agrees(pytorch / f"{name}_{backend}.pt2")


def test_names_are_those_of_the_module(pytorch: Path) -> None:
    model = load(pytorch / "encoder.pt2")
    assert [spec.name for spec in model.outputs] == ["logits", "pair.0", "pair.1"]
    names = {node.name for node in model.source.nodes}
    assert "table" in names
    assert any(name.startswith("encoder.layers.1.linear2") for name in names)


def test_another_batch(pytorch: Path) -> None:
    model = load(pytorch / "dynamic.pt2", input_shapes={"input": (5, 3, 8, 8)})
    assert model.outputs[0].shape[0] == 5
    assert check_import(model) is not None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("state", "changes its buffer count"), ("training", "got aten.dropout of training in 1")],
)
def test_programs_that_are_refused(pytorch: Path, name: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        load(pytorch / f"{name}.pt2")
    assert caught.value.hint


def test_unknown_operators_are_all_named_with_their_modules(pytorch: Path) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        load(pytorch / "unknown.pt2")
    assert {entry.operator: entry.nodes for entry in caught.value.obstacles} == {
        "aten._linalg_svd": ("head",),
        "prims.bessel_i0": ("head",),
    }


def test_damaged_programs_get_one_line(pytorch: Path, tmp_path: Path) -> None:
    """Most are refused by the archive's check; the others reach PyTorch, in its own process."""
    whole = (pytorch / "odd.pt2").read_bytes()
    rng = random.Random(0)
    path = tmp_path / "damaged.pt2"
    for at in range(12):
        damaged = bytearray(whole)
        if at % 4 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        for _ in range(at % 4):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            load(path)
        except BuildError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 600


def test_a_module_in_memory(tmp_path: Path) -> None:
    """In the framework's own environment, where the builder is installed too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from builder import compile, load\n"
        "module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)).train()\n"
        "model = load(module, torch.rand(2, 4))\n"
        "assert module.training and module[1].training\n"
        "assert model.name == 'Sequential', model.name\n"
        "lines = []\n"
        "compile(model, progress=lines.append)\n"
        "print([line for line in lines if line.startswith('agrees with PyTorch')])\n"
    )
    done = subprocess.run(
        [os.environ[VARIABLE], str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "agrees with PyTorch" in done.stdout, done.stderr


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize("name", ["convolutions", "recurrent", "several"])
def test_files_of_keras(keras: Path, name: str, suffix: str) -> None:
    assert "agrees with Keras" in agrees(keras / f"{name}{suffix}")


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("mixed_float16", ["uint8", "float32"]),
        ("mixed_bfloat16", ["uint8", "float32"]),
        ("float16", ["float16", "float16"]),
        ("bfloat16_input", ["float32", "float32"]),
        ("float64", ["float32", "float64"]),
    ],
)
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_types_that_tensorflow_lite_lacks(keras: Path, name: str, types: list[str], suffix: str) -> None:
    path = keras / f"{name}{suffix}"
    model = load(path)
    assert [spec.dtype for spec in (*model.inputs, *model.outputs)] == types
    assert any("is imported in float32" in note for note in model.notes)
    assert "agrees with Keras" in agrees(path)


def test_float64_of_long_integers_is_refused(keras: Path) -> None:
    with pytest.raises(UnsupportedOperatorError, match="TensorFlow Lite lacks"):
        load(keras / "long_integers.keras")


@pytest.mark.parametrize("name", ["convolutions", "several"])
def test_saved_models(keras: Path, name: str) -> None:
    assert "agrees with TensorFlow" in agrees(keras / name)


def test_keras_on_pytorch(keras: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert "agrees with Keras" in agrees(keras / "convolutions.keras")


def test_a_recurrent_saved_model_says_what_to_do(keras: Path) -> None:
    with pytest.raises(ModelError, match="recurrent layer that TensorFlow Lite cannot take") as caught:
        load(keras / "recurrent")
    assert "batch_size=1" in str(caught.value.hint)


def test_a_saved_model_that_augments_pictures_is_refused_and_its_keras_file_is_not(keras: Path) -> None:
    with pytest.raises(ModelError, match="it draws random numbers") as caught:
        load(keras / "augmenting")
    assert "give the .keras file instead" in str(caught.value.hint)
    assert "agrees with Keras" in agrees(keras / "augmenting.keras")


def test_code_in_a_file_of_keras_is_refused(keras: Path) -> None:
    with pytest.raises(ModelError, match="Lambda layer") as caught:
        load(keras / "code.keras")
    assert "model.export('FOLDER')" in str(caught.value.hint)
