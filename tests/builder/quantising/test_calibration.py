"""Calibration data: what is read, and one line for each thing that cannot be used."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import InputFault
from builder.quantising import calibration
from builder.quantising.calibration import MAX_SAMPLES, Source, describe, open_calibration
from tests import damaged_archives
from tests.builder.quantising.networks import Array, samples

IMAGE = TensorSpec("image", "FP32", (1, 3, 4, 6))
IDS = TensorSpec("ids", "INT64", (1, 5))
DECLARED = Preprocess(
    input="image", layout="NCHW", colour="RGB", resize=(4, 6), resize_mode="stretch",
    interpolation="bilinear", crop=None, scale=1.0, mean=(10.0,), std=(2.0,),
)  # fmt: skip


def picture(path: Path, colour: tuple[int, int, int] = (10, 20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 7), colour).save(path)


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path, allow_pickle=True, **{name: np.asarray(value) for name, value in arrays.items()})
    return path


def test_pictures_go_through_the_declared_preprocess_in_the_order_of_their_names(tmp_path: Path) -> None:
    picture(tmp_path / "b.png", (10, 30, 50))
    picture(tmp_path / "a" / "z.jpeg")
    picture(tmp_path / "c.JPG")
    picture(tmp_path / ".hidden" / "d.png")
    (tmp_path / "labels.csv").write_text("b.png,1")
    data = open_calibration(tmp_path, [IMAGE], DECLARED)
    assert data.names == ("a/z.jpeg", "b.png", "c.JPG")
    value = data.read(1)["image"]
    assert value.shape == IMAGE.shape
    np.testing.assert_array_equal(value[0, :, 0, 0], [0, 10, 20])


@pytest.mark.parametrize("shape", [(7, 3, 4, 6), (7, 1, 3, 4, 6)])
def test_arrays_have_samples_along_their_first_axis(shape: tuple[int, ...], tmp_path: Path) -> None:
    values, ids = samples(7, shape[1:]), np.arange(35).reshape(7, 5).astype(np.int32)
    path = npz(tmp_path / "data.npz", image=values.astype(np.float64), ids=ids)
    for source in (path, {"image": values, "ids": ids}):
        data = open_calibration(source, [IMAGE, IDS])
        assert data.names == tuple("0123456")
        sample = data.read(3)
        np.testing.assert_array_equal(sample["image"].ravel(), values[3].ravel())
        np.testing.assert_array_equal(sample["ids"], ids[3:4])
        assert [str(value.dtype) for value in sample.values()] == ["float32", "int64"]


def test_folder_of_arrays_is_read_file_by_file(tmp_path: Path) -> None:
    for i in range(3):
        npz(tmp_path / f"{i}.npz", image=samples(1, (3, 4, 6), seed=i), ids=np.full((1, 5), i))
    npz(tmp_path / "more.npz", image=samples(2, (3, 4, 6)), ids=[[8] * 5, [9] * 5])
    data = open_calibration(tmp_path, [IMAGE, IDS])
    assert data.names == ("0.npz", "1.npz", "2.npz", "more.npz/0", "more.npz/1")
    assert [int(data.read(i)["ids"][0, 0]) for i in (0, 4, 1, 3, 2)] == [0, 9, 1, 8, 2]


def test_fixed_batch_takes_that_many_rows(tmp_path: Path) -> None:
    data = open_calibration(
        {"x": np.arange(10, dtype=np.float32)[:, None]}, [TensorSpec("x", "FP32", (4, 1))]
    )
    assert len(data) == 2
    np.testing.assert_array_equal(data.read(1)["x"], [[4], [5], [6], [7]])


def test_large_set_is_thinned_evenly(tmp_path: Path) -> None:
    data = open_calibration({"x": np.arange(1000, dtype=np.float32)}, [TensorSpec("x", "FP32", ())])
    assert len(data) == MAX_SAMPLES
    values = [float(data.read(i)["x"]) for i in range(len(data))]
    assert values == sorted(set(values))
    assert values[-1] > 990
    assert describe(data) == "320 calibration samples, evenly chosen from 1000"


def text_file(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("not arrays")
    return path


def damaged(folder: Path) -> Path:
    picture(folder / "pictures" / "a.png")
    raw = (folder / "pictures" / "a.png").read_bytes()
    (folder / "pictures" / "a.png").write_bytes(raw[: len(raw) // 2])
    return folder / "pictures"


def mixed(folder: Path) -> Path:
    picture(folder / "both" / "a.png")
    npz(folder / "both" / "a.npz", image=samples(1, (3, 4, 6)))
    return folder / "both"


def pickled(folder: Path) -> Path:
    return npz(folder / "objects.npz", image=np.array([{}], object))


def bomb(folder: Path) -> Path:
    """An array of 3 GiB by its directory, of which nothing may be unpacked."""
    path = folder / "bomb.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 3, 16, 16)}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", header.getvalue())
    raw = path.read_bytes()
    size = len(header.getvalue()).to_bytes(4, "little")
    at = raw.rindex(b"PK\x01\x02") + 24
    assert raw[at : at + 4] == size
    path.write_bytes(raw[:at] + (3 << 30).to_bytes(4, "little") + raw[at + 4 :])
    return path


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def only_text(folder: Path) -> Path:
    (folder / "text").mkdir()
    text_file(folder / "text")
    return folder / "text"


def one_picture(folder: Path) -> Path:
    picture(folder / "only.png")
    return folder / "only.png"


def arrays(**values: object) -> Callable[[Path], Source]:
    return lambda folder: npz(folder / "data.npz", **values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", "no such file or folder"),
        (empty, "expected JPEG, PNG or .npz files, got an empty folder"),
        (only_text, "expected JPEG, PNG or .npz files, got only others"),
        (one_picture, "expected a folder of pictures, got one picture"),
        (text_file, "expected an .npz file of arrays"),
        (mixed, "expected pictures or .npz files, got both"),
        (damaged, "a.png: the image/png image cannot be read"),
        (pickled, "expected float32 for 'image', got object"),
        (bomb, "bytes of arrays, got 3221225472"),
        (arrays(image=samples(0, (3, 4, 6))), "expected at least one sample, got none"),
        (arrays(image=samples(2, (3, 5, 6))), r"\[samples, 3, 4, 6\] for 'image', got \[2, 3, 5, 6\]"),
        (arrays(image=samples(2, (4, 6, 3))), r"expected shape \[samples, 3, 4, 6\] for 'image'"),
        (arrays(image=np.zeros(3, np.float32)), r"expected shape .* got \[3\]"),
        (arrays(image=np.float32(3)), r"expected shape .* got \[\]"),
        (arrays(image=np.zeros((2, 3, 4, 6), np.uint8)), "expected float32 for 'image', got uint8"),
        (arrays(image=np.zeros((2, 3, 4, 6), "U3")), "expected float32 for 'image', got <U3"),
        (arrays(image=np.zeros((2, 3, 4, 6), np.complex64)), "expected float32 for 'image', got complex64"),
        (arrays(image=np.full((2, 3, 4, 6), np.nan)), "sample 0: expected finite .* 'image', got nan"),
        (arrays(image=np.full((2, 3, 4, 6), -np.inf)), "sample 0: expected finite .*, got -inf"),
        (arrays(image=np.full((2, 3, 4, 6), 1e300)), "sample 0: .* got a number out of range"),
        (arrays(pixels=samples(2, (3, 4, 6))), "expected arrays named 'image', got 'pixels'"),
        (arrays(image=samples(2, (3, 4, 6)), other=[1]), "expected arrays named 'image', got 'other'"),
        (arrays(), "expected an array for each input, got none for 'image'"),
    ],
)  # fmt: skip
def test_unusable_data_give_one_line(make: Callable[[Path], Source], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputFault, match=message) as caught:
        open_calibration(make(tmp_path), [IMAGE], DECLARED).read(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("which", damaged_archives.DAMAGED)
def test_damaged_arrays_give_one_line(which: str, tmp_path: Path) -> None:
    path = damaged_archives.write(tmp_path, which)
    with pytest.raises(InputFault, match=r"damaged\.npz: expected") as caught:
        open_calibration(path, [TensorSpec("x", "FP32", (1, 8))]).read(0)
    assert "\n" not in str(caught.value)


def test_pictures_without_a_preprocess_ask_for_one(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(InputFault, match="expected a preprocess for the pictures") as caught:
        open_calibration(tmp_path, [IMAGE])
    assert "--preprocess" in str(caught.value.hint)


def test_pictures_for_one_of_two_inputs_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(InputFault, match="got only pictures for 'image': 'ids' would be missing"):
        open_calibration(tmp_path, [IMAGE, IDS], DECLARED)


def test_inputs_with_different_numbers_of_samples_are_refused() -> None:
    source = {"image": samples(3, (3, 4, 6)), "ids": np.zeros((2, 5), np.int64)}
    with pytest.raises(InputFault, match="equally many samples for all inputs, got 3 for 'image', 2 for"):
        open_calibration(source, [IMAGE, IDS])


def test_integer_out_of_range_is_refused() -> None:
    spec = TensorSpec("x", "UINT8", (1, 2))
    with pytest.raises(InputFault, match="expected uint8 for 'x', got a number out of range"):
        open_calibration({"x": np.array([[1, 256]])}, [spec]).read(0)


def test_only_one_file_of_a_folder_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    load = calibration._arrays

    def counted(path: Path) -> dict[str, Array]:
        opened.append(path.name)
        return load(path)

    monkeypatch.setattr(calibration, "_arrays", counted)
    for i in range(2):
        npz(tmp_path / f"{i}.npz", image=samples(3, (3, 4, 6)))
    data = open_calibration(tmp_path, [IMAGE])
    assert opened == []
    for i in (0, 1, 2, 3, 0):
        data.read(i)
    assert opened == ["0.npz", "1.npz", "0.npz"]
